//! Manual pages and completions: made from the command tree, those of files from `docs/configuration.md`.
//!
//! Owns nothing. Refuses: to make the directory's parents.

use crate::args::Cli;
use crate::complete;
use crate::exit::{CommandResult, Failure};
use crate::file_pages;
use crate::output::Output;
use clap::{Command, CommandFactory};
use godwit_types::ErrorCode;
use std::path::Path;

/// Prints a shell's completions.
pub fn completion(shell: clap_complete::Shell) -> CommandResult {
    let mut text = Vec::new();
    complete::register(shell, &mut text)
        .map_err(|error| Failure::new(ErrorCode::Internal, format!("no completions: {error}")))?;
    // A pipe that was closed early, as by `head`, is no failure.
    let _ = std::io::Write::write_all(&mut std::io::stdout(), &text);
    Ok(())
}

/// Writes a page per command (section 1) and per file (section 5).
pub fn man(dir: &Path, output: &Output) -> CommandResult {
    let written = write_all(dir).map_err(|error| {
        let message = format!(
            "cannot write manual pages into {}: {error}; make the directory first",
            dir.display()
        );
        Failure::new(ErrorCode::InvalidRequest, message)
    })?;
    let text = format!("{written} manual pages are in {}", dir.display());
    output.show(&serde_json::json!({ "message": text }), |output, _| {
        output.line(&text)
    });
    Ok(())
}

fn write_all(dir: &Path) -> std::io::Result<usize> {
    let mut root = Cli::command();
    root.build();
    let mut written = 0;
    write_page(&root, "godwit", dir, &mut written)?;
    for (name, text) in file_pages::all() {
        std::fs::write(dir.join(format!("{name}.5")), text)?;
        written += 1;
    }
    Ok(written)
}

/// What help says after the options, in the sections where a reader of pages looks for it.
fn sections(told: &str) -> String {
    let (mut page, mut last) = (String::new(), "");
    for paragraph in told.split("\n\n").filter(|text| !text.is_empty()) {
        let (first, rest) = paragraph.split_once('\n').unwrap_or((paragraph, ""));
        let (heading, lines) = match first {
            "Exit codes:" => ("EXIT STATUS", rest),
            "Environment:" => ("ENVIRONMENT", rest),
            "Example:" | "Examples:" => ("EXAMPLES", rest),
            _ => ("NOTES", paragraph),
        };
        page += &match heading == last {
            true => ".PP\n".to_owned(),
            false => format!(".SH \"{heading}\"\n"),
        };
        last = heading;
        // Prose is one line, which is broken where the reader's terminal ends.
        let as_it_stands = lines.contains('\n') || heading != "NOTES";
        let lines: String = lines
            .lines()
            .map(file_pages::escaped)
            .fold(String::new(), |all, line| all + &line + "\n");
        page += &match as_it_stands {
            true => format!(".nf\n{lines}.fi\n"),
            false => lines,
        };
    }
    page
}

fn write_page(
    command: &Command,
    name: &str,
    dir: &Path,
    written: &mut usize,
) -> std::io::Result<()> {
    let mut text = Vec::new();
    // clap wants names of commands to live as long as the program; these few do.
    let page: &'static str = Box::leak(name.to_string().into_boxed_str());
    let told = command
        .get_after_long_help()
        .or_else(|| command.get_after_help())
        .map(ToString::to_string);
    let shown = command.clone().name(page);
    let shown = shown
        .after_help(clap::builder::Resettable::Reset)
        .after_long_help(clap::builder::Resettable::Reset);
    clap_mangen::Man::new(shown).render(&mut text)?;
    text.extend(sections(&told.unwrap_or_default()).bytes());
    std::fs::write(dir.join(format!("{name}.1")), text)?;
    *written += 1;
    for sub in command.get_subcommands().filter(|sub| !sub.is_hide_set()) {
        write_page(sub, &format!("{name}-{}", sub.get_name()), dir, written)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_has_its_examples_and_exit_codes_where_readers_look() {
        let told = "Only so.\n\nExit codes:\n  0  done\n\nExample:\n  godwit host list --json";
        assert_eq!(
            sections(told),
            ".SH \"NOTES\"\nOnly so.\n.SH \"EXIT STATUS\"\n.nf\n  0  done\n.fi\n.SH \"EXAMPLES\"\n.nf\n  godwit host list \\-\\-json\n.fi\n"
        );
    }
}
