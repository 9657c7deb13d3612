//! Builds the preloaded library `handout/handout.c` with the system's C compiler.
//!
//! The result is embedded in the crate: a host needs no compiler, only the builder does.

use std::path::PathBuf;
use std::process::ExitCode;

const SOURCE: &str = "handout/handout.c";
const FLAGS: [&str; 12] = [
    "-shared",
    "-fPIC",
    "-O2",
    "-std=gnu11",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-fvisibility=hidden",
    "-fstack-protector-strong",
    "-pthread",
    "-Wl,-z,relro,-z,now",
    "-s",
];

fn main() -> ExitCode {
    println!("cargo::rerun-if-changed={SOURCE}");
    let Some(out_dir) = std::env::var_os("OUT_DIR") else {
        println!("cargo::error=OUT_DIR is not set: run this through cargo");
        return ExitCode::FAILURE;
    };
    let library = PathBuf::from(out_dir).join("handout.so");
    let compiler = cc::Build::new()
        .cargo_metadata(false)
        .opt_level(2)
        .debug(false)
        .get_compiler();
    let status = compiler
        .to_command()
        .args(FLAGS)
        .arg("-o")
        .arg(&library)
        .arg(SOURCE)
        .status();
    match status {
        Ok(status) if status.success() => ExitCode::SUCCESS,
        Ok(status) => {
            println!("cargo::error=the C compiler refused {SOURCE}: {status}");
            ExitCode::FAILURE
        }
        Err(error) => {
            println!(
                "cargo::error=no C compiler to build {SOURCE} with ({error}): install gcc or clang"
            );
            ExitCode::FAILURE
        }
    }
}
