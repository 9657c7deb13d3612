//! The README's own commands and description, so that what it tells people is what is tested.
//!
//! Reads the repository's README and owns nothing. Refuses: a README without them.

use anyhow::{Context as _, Result, ensure};
use std::path::Path;

/// What the README has people type, in its order.
pub struct Commands {
    /// Sets up the controller.
    pub init: String,
    /// Makes a machine a host.
    pub join: String,
    /// Looks at a host.
    pub check: String,
    /// Makes and starts a VM.
    pub create: String,
    pub migrate: String,
}

fn text() -> Result<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../README.md");
    Ok(std::fs::read_to_string(path)?)
}

/// The command line that begins so, without what is said of it.
fn line(text: &str, begin: &str) -> Result<String> {
    let found = text.lines().find(|line| line.starts_with(begin));
    let found = found.with_context(|| format!("the README has no line '{begin} ...'"))?;
    let command = found
        .split_once("  #")
        .map_or(found, |(command, _)| command);
    Ok(command.trim().to_owned())
}

/// Reads the five commands.
pub fn commands() -> Result<Commands> {
    let text = text()?;
    let line = |begin: &str| line(&text, begin);
    Ok(Commands {
        init: line("godwit controller init")?,
        join: line("godwit host join")?,
        check: line("godwit host check")?,
        create: line("godwit vm create")?,
        migrate: line("godwit vm migrate")?,
    })
}

/// Reads the description of the VM.
pub fn description() -> Result<String> {
    let text = text()?;
    let blocks = text.split("```toml\n").skip(1);
    let mut blocks = blocks.filter_map(|rest| rest.split_once("```"));
    let found = blocks.find(|(block, _)| block.starts_with("name = "));
    let (block, _) = found.context("the README describes no VM")?;
    ensure!(block.contains("kernel = "), "the README's VM has no kernel");
    Ok(block.to_owned())
}

/// The same description with another value for a key of the VM itself; a key that it lacks is added.
pub fn with(description: &str, key: &str, value: &str) -> String {
    let new = format!("{key} = {value}");
    let begin = format!("{key} = ");
    if !description.lines().any(|line| line.starts_with(&begin)) {
        return format!("{new}\n{description}");
    }
    let lines = description
        .lines()
        .map(|line| match line.starts_with(&begin) {
            true => new.clone(),
            false => line.to_owned(),
        });
    lines.collect::<Vec<_>>().join("\n") + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_readme_has_five_commands_and_a_description() {
        let commands = commands().unwrap();
        assert!(commands.init.contains("--listen "), "{}", commands.init);
        assert!(commands.join.contains(" TOKEN "), "{}", commands.join);
        assert!(commands.create.contains(" && godwit vm start web"));
        assert!(!commands.check.contains('#'), "{}", commands.check);
        assert_eq!(commands.migrate, "godwit vm migrate web --to b");
        let text = text().unwrap();
        let at = |command: &str| text.find(&format!("\n{command}")).unwrap();
        assert!(at(&commands.check) < at(&commands.join), "checked too late");
        let small = with(&description().unwrap(), "memory_mib", "256");
        assert!(small.contains("\nmemory_mib = 256\n"), "{small}");
        assert!(with(&small, "accelerator", "\"tcg\"").starts_with("accelerator = \"tcg\"\n"));
    }
}
