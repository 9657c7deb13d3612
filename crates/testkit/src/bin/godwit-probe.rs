//! Asks the Linux test guest something, or tells it to do something. See `--help`.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Parser;

/// Sends one command to the probe in the test guest (TCP port 7) and prints its answer.
///
/// Commands: mono, uptime, fill MIB, hot MIB MIB_PER_S, free, membw, reboot, poweroff, panic, help. After the answer
/// to 'mono' stands 'client_ns N', this machine's monotonic clock at the middle of the exchange: the guest's
/// clock fell behind between two calls by the difference of both growths.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// The guest's address
    address: IpAddr,
    /// The command and its numbers
    #[arg(required = true)]
    command: Vec<String>,
    /// How long to wait for the answer
    #[arg(long, default_value_t = 60)]
    timeout_s: u64,
}

fn main() -> ExitCode {
    match ask(&Arguments::parse()) {
        Ok(answer) if answer.starts_with("error") => {
            eprintln!("godwit-probe: {answer}");
            ExitCode::FAILURE
        }
        Ok(answer) => {
            println!("{answer}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("godwit-probe: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn ask(arguments: &Arguments) -> Result<String> {
    let address = SocketAddr::new(arguments.address, 7);
    let limit = Duration::from_secs(arguments.timeout_s.max(1));
    let mut stream = TcpStream::connect_timeout(&address, limit)
        .with_context(|| format!("cannot reach {address}"))?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(limit))?;
    // The first exchange pays for waking a thread in the guest; clocks are read on the second.
    let command = arguments.command.join(" ");
    if command == "mono" {
        exchange(&mut stream, &command)?;
    }
    let (began_ns, began) = (monotonic_ns(), Instant::now());
    let answer = exchange(&mut stream, &command)?;
    let middle_ns = began_ns + began.elapsed().as_nanos() as u64 / 2;
    Ok(if command == "mono" {
        format!("{answer} client_ns {middle_ns}")
    } else {
        answer
    })
}

fn exchange(stream: &mut TcpStream, command: &str) -> Result<String> {
    stream.write_all(format!("{command}\n").as_bytes())?;
    let mut answer = String::new();
    BufReader::new(stream.take(4096))
        .read_line(&mut answer)
        .context("the guest does not answer")?;
    ensure!(answer.ends_with('\n'), "the guest's answer was cut short");
    Ok(answer.trim().to_owned())
}

fn monotonic_ns() -> u64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `time` is a valid timespec that the call fills.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
