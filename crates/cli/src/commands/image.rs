//! `godwit image`: what an image on this host says of who has it.
//!
//! Owns nothing; asks neither controller nor agent. Refuses: to let an image go that is open.

use crate::args::ImageCommand;
use crate::exit::CommandResult;
use crate::output::Output;
use godwit_types::ApiError;
use godwit_vmproc::image;
use serde_json::{Value, json};
use std::path::Path;

/// Reads what the image at a path says, or has it forget that.
pub fn run(command: &ImageCommand, output: &Output) -> CommandResult {
    match command {
        ImageCommand::Show { path } => {
            let record = of(image::show(path))?;
            output.show(&record, |output, record| show(path, record, output));
        }
        ImageCommand::Release { path } => {
            let record = of(image::release(path))?;
            output.show(&record, |output, record| {
                show(path, record, output);
                output.line(
                    "It says nothing of that any more: the next VM that is started with it has it.",
                );
            });
        }
    }
    Ok(())
}

fn of<T: serde::Serialize>(record: Result<Option<T>, ApiError>) -> Result<Value, ApiError> {
    record.map(|record| json!(record))
}

fn show(path: &Path, record: &Value, output: &Output) {
    let text = |name: &str| record[name].as_str().unwrap_or_default().to_owned();
    match record {
        Value::Null => output.line(format!(
            "{} does not say that anybody has it.",
            path.display()
        )),
        _ => output.line(format!(
            "{} is disk '{}' of VM '{}': host '{}' had it last, under generation {}. Its id is {}.",
            path.display(),
            text("disk"),
            text("vm"),
            text("holder"),
            record["generation"],
            text("image"),
        )),
    }
}
