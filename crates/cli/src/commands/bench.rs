//! `bench`: finds the bench beside this program and becomes it.
//!
//! The bench is a program of its own, since it brings guests, test hosts and checkers, of which nothing belongs in the
//! product. Refuses: where it is not there.

use crate::exit::{CommandResult, Failure};
use godwit_types::ErrorCode;
use std::os::unix::process::CommandExt as _;
use std::process::Command;

const PROGRAM: &str = "godwit-bench";

/// Gives way to the bench; returns only when that cannot be.
pub fn run(arguments: &[String]) -> CommandResult {
    let own = std::env::current_exe().map_err(|error| {
        let text = format!("cannot tell where this program lies: {error}");
        Failure::new(ErrorCode::Internal, text)
    })?;
    let bench = own.with_file_name(PROGRAM);
    if !bench.is_file() {
        let text = format!(
            "the bench is not here: {} does not exist; build it with 'cargo build --release -p godwit-bench -p godwit-testkit'",
            bench.display()
        );
        return Err(Failure::new(ErrorCode::NotFound, text));
    }
    let error = Command::new(&bench).args(arguments).exec();
    let text = format!("cannot run {}: {error}", bench.display());
    Err(Failure::new(ErrorCode::Internal, text))
}
