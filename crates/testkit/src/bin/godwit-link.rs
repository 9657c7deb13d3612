//! Runs an emulated link between two network namespaces, and changes one that runs. See `--help`.

use std::fs::File;
use std::io::Write;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::{Args, Parser, Subcommand};
use godwit_testkit::link::control::{RemoteLink, serve};
use godwit_testkit::link::{Direction, End, Link, LinkSpec};

#[derive(Parser)]
#[command(
    about = "A link with delay, rate, queue and loss between two network namespaces",
    version
)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Makes a TAP device at each end and carries packets between them until it is ended
    Run(Run),
    /// Changes a running link
    Set {
        /// Socket of the link
        control: PathBuf,
        /// What it is like from now on, as for 'run'
        link: LinkSpec,
        /// Only this direction: a-to-b or b-to-a
        #[arg(long, value_parser = direction)]
        only: Option<Direction>,
    },
    /// Prints what a running link counted, as JSON
    Counters {
        /// Socket of the link
        control: PathBuf,
    },
    /// Drops everything, without a sign at either end
    Cut {
        /// Socket of the link
        control: PathBuf,
    },
    /// Undoes 'cut'
    Heal {
        /// Socket of the link
        control: PathBuf,
    },
}

#[derive(Args)]
struct Run {
    /// Network namespace of the first end: a process id, or a file such as /run/netns/x
    #[arg(long)]
    a: String,
    /// Network namespace of the second end
    #[arg(long)]
    b: String,
    /// Device to make at the first end
    #[arg(long, default_value = "link0")]
    a_device: String,
    /// Device to make at the second end
    #[arg(long, default_value = "link0")]
    b_device: String,
    /// Addresses of the first end with their prefix lengths
    #[arg(long)]
    a_address: Vec<String>,
    /// Addresses of the second end
    #[arg(long)]
    b_address: Vec<String>,
    /// Bridge that the first end becomes a port of
    #[arg(long)]
    a_bridge: Option<String>,
    /// Bridge that the second end becomes a port of
    #[arg(long)]
    b_bridge: Option<String>,
    /// MTU of both devices
    #[arg(long, default_value_t = 1500)]
    mtu: u32,
    /// What it is like: rtt=50ms,jitter=1ms,reorder,rate=1gbit,queue=10ms or 1mb,loss=0.1%,seed=7; each optional
    #[arg(long, default_value = "")]
    link: LinkSpec,
    /// Socket to make for 'set', 'counters', 'cut' and 'heal'
    #[arg(long)]
    control: PathBuf,
}

fn main() -> Result<()> {
    match Arguments::parse().command {
        Command::Run(arguments) => run(arguments),
        Command::Set {
            control,
            link,
            only: None,
        } => Ok(RemoteLink::new(control).set(link)?),
        Command::Set {
            control,
            link,
            only: Some(direction),
        } => Ok(RemoteLink::new(control).set_direction(direction, link)?),
        Command::Counters { control } => {
            let counters = RemoteLink::new(control).counters()?;
            println!("{}", serde_json::to_string_pretty(&counters)?);
            Ok(())
        }
        Command::Cut { control } => Ok(RemoteLink::new(control).cut()?),
        Command::Heal { control } => Ok(RemoteLink::new(control).heal()?),
    }
}

fn run(arguments: Run) -> Result<()> {
    let mtu = arguments.mtu;
    let a = End {
        namespace: namespace(&arguments.a)?.into(),
        device: arguments.a_device,
        addresses: arguments.a_address,
        bridge: arguments.a_bridge,
        mtu,
    };
    let b = End {
        namespace: namespace(&arguments.b)?.into(),
        device: arguments.b_device,
        addresses: arguments.b_address,
        bridge: arguments.b_bridge,
        mtu,
    };
    let link = Link::between(a, b, arguments.link)?;
    let control = &arguments.control;
    let listener = UnixListener::bind(control)
        .with_context(|| format!("cannot make the socket {}", control.display()))?;
    // For whoever waits for it; that nobody reads it is no error.
    let _ = writeln!(std::io::stdout(), "ready");
    Ok(serve(&link, &listener)?)
}

fn namespace(name: &str) -> Result<File> {
    let path = match name.parse::<u32>() {
        Ok(pid) => PathBuf::from(format!("/proc/{pid}/ns/net")),
        Err(_) => PathBuf::from(name),
    };
    File::open(&path).with_context(|| format!("no network namespace at {}", path.display()))
}

fn direction(text: &str) -> Result<Direction, String> {
    match text {
        "a-to-b" => Ok(Direction::AToB),
        "b-to-a" => Ok(Direction::BToA),
        _ => Err("the directions are a-to-b and b-to-a".to_owned()),
    }
}
