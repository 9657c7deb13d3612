//! Makes the guests under target/guests: counter guests and the Linux guest. See `--help`.

use std::path::PathBuf;
use std::process::{Command, ExitCode};

use anyhow::{Context, Result};
use clap::{Parser, Subcommand, ValueEnum};
use godwit_testkit::guest::counter::{self, CounterSpec};
use godwit_testkit::guest::linux;

#[derive(Parser)]
#[command(
    about = "Makes the test guests under target/guests, or one counter guest by its parameters",
    version
)]
struct Arguments {
    #[command(subcommand)]
    command: Option<Make>,
}

#[derive(Subcommand)]
enum Make {
    /// The Linux guest: kernel and initramfs with Redis; the default
    Linux,
    /// One counter guest: a kernel file for QEMU's -kernel
    Counter(CounterArguments),
}

#[derive(clap::Args)]
struct CounterArguments {
    /// real: pages 0x20..0x80 in real mode (runs under any KVM); flat: 1 MiB to the limit, 32 bits, no paging
    #[arg(long, value_enum, default_value = "flat")]
    mode: Mode,
    /// End of the counted memory in MiB (flat only), at most the guest's RAM
    #[arg(long, default_value_t = 64)]
    until_mib: u32,
    /// What to do when the pass counter reaches --at, on the first boot only
    #[arg(long, value_enum, default_value = "none")]
    action: Action,
    /// The pass at which the action is taken
    #[arg(long, default_value_t = 0)]
    at: u32,
    /// Idle loop turns after each page: slows the dirtying
    #[arg(long, default_value_t = 0)]
    spin: u32,
    /// Where to write the kernel file
    #[arg(long, short)]
    output: PathBuf,
}

#[derive(Clone, Copy, ValueEnum)]
enum Mode {
    Real,
    Flat,
}

#[derive(Clone, Copy, ValueEnum)]
enum Action {
    None,
    PowerOff,
    Reset,
    Panic,
}

impl CounterArguments {
    fn spec(&self) -> CounterSpec {
        let base = match self.mode {
            Mode::Real => CounterSpec::real(),
            Mode::Flat => CounterSpec::flat(self.until_mib),
        };
        let action = match self.action {
            Action::None => counter::Action::None,
            Action::PowerOff => counter::Action::PowerOff,
            Action::Reset => counter::Action::Reset,
            Action::Panic => counter::Action::Panic,
        };
        base.then(action, self.at).slowed(self.spin)
    }
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("guest-image: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    match Arguments::parse().command.unwrap_or(Make::Linux) {
        Make::Linux => make_linux(),
        Make::Counter(arguments) => make_counter(&arguments),
    }
}

fn make_counter(arguments: &CounterArguments) -> Result<()> {
    let file = counter::build(&arguments.spec())?;
    std::fs::write(&arguments.output, file)
        .with_context(|| format!("cannot write {}", arguments.output.display()))
}

fn make_linux() -> Result<()> {
    let target = linux::target_dir()?;
    let guest = linux::build(&target, &probe_program()?)?;
    println!(
        "kernel {}\ninitrd {}",
        guest.kernel.display(),
        guest.initrd.display()
    );
    Ok(())
}

/// The built `guest-probe` beside this program; under `cargo run` it is brought up to date first.
fn probe_program() -> Result<PathBuf> {
    let probe = std::env::current_exe()?.with_file_name("guest-probe");
    if let Some(cargo) = std::env::var_os("CARGO") {
        let status = Command::new(cargo)
            .args([
                "build",
                "--quiet",
                "--release",
                "-p",
                "godwit-testkit",
                "--bin",
                "guest-probe",
            ])
            .status()
            .context("cannot run cargo to build guest-probe")?;
        anyhow::ensure!(status.success(), "guest-probe does not build");
    }
    anyhow::ensure!(
        probe.exists(),
        "no guest-probe beside this program, build it with: cargo build --release -p godwit-testkit"
    );
    Ok(probe)
}
