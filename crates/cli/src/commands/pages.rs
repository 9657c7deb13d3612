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

fn write_page(
    command: &Command,
    name: &str,
    dir: &Path,
    written: &mut usize,
) -> std::io::Result<()> {
    let mut text = Vec::new();
    // clap wants names of commands to live as long as the program; these few do.
    let page: &'static str = Box::leak(name.to_string().into_boxed_str());
    clap_mangen::Man::new(command.clone().name(page)).render(&mut text)?;
    std::fs::write(dir.join(format!("{name}.1")), text)?;
    *written += 1;
    for sub in command.get_subcommands().filter(|sub| !sub.is_hide_set()) {
        write_page(sub, &format!("{name}-{}", sub.get_name()), dir, written)?;
    }
    Ok(())
}
