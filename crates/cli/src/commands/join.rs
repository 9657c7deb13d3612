//! `godwit host join`: enrols this machine with a controller and writes its configuration.
//!
//! Owns what it writes: certificate and configuration. Refuses: a controller whose CA is not the token's; to
//! overwrite the configuration of a host that has joined already.

use crate::args::HostJoin;
use crate::commands::{config_file, token};
use crate::exit::{CommandResult, Failure};
use crate::output::Output;
use crate::watch::failure;
use godwit_agent::config::{CONFIG_PATH, HostConfig, LISTEN_PORT};
use godwit_rpc::pki::Request;
use godwit_rpc::{Client, ControllerClient, Token};
use godwit_types::control_api::{Done, JoinRequest};
use godwit_types::{ErrorCode, HostName};
use std::fmt::Display;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;

const SERVICE: &str = "godwit-agent.service";

fn usage(message: impl Into<String>) -> Failure {
    Failure::new(ErrorCode::InvalidRequest, message)
}

fn local(doing: &str) -> impl Fn(&dyn Display) -> Failure {
    let doing = doing.to_string();
    move |error| Failure::new(ErrorCode::Internal, format!("cannot {doing}: {error}"))
}

/// Enrols this host at the controller and starts its agent.
pub async fn run(arguments: HostJoin, output: &Output) -> CommandResult {
    let token = token::read(&arguments.token)?;
    if arguments.config.exists() {
        return Err(Failure::new(
            ErrorCode::AlreadyExists,
            format!(
                "{} exists: this machine has joined already; take it out of its site with 'godwit host leave', then join anew",
                arguments.config.display()
            ),
        ));
    }
    let name = chosen_name(arguments.name.clone())?;
    let (controller, listen) = addresses(&token, arguments.listen)?;
    must_be_own(listen.ip())?;
    arguments
        .migration
        .iter()
        .try_for_each(|address| must_be_own(*address))?;
    let text = config_text(&arguments, &name, listen, controller)?;
    // Checked before the token is used up: it is good for one joining only.
    let config = HostConfig::parse(&text, &arguments.config);
    let config = config.map_err(|error| usage(error.to_string()))?;
    no_agent_runs(&config.agent_socket())?;
    nothing_is_left(&arguments.state_dir)?;
    let pki = arguments.state_dir.join("pki");
    private_dir(&pki)?;
    enrol(&token, controller, &name, listen, &pki).await?;
    config_file::write(&arguments.config, &text)
        .map_err(|error| local("write the configuration")(&error))?;
    let next = begin(arguments.no_start, &arguments.config).await;
    let mut message = format!("host '{name}' has joined the controller at {controller}; {next}");
    for (group, bridge) in &config.port_groups {
        if !is_bridge(bridge) {
            message.push_str(&format!(
                "\nwarning: there is no bridge {bridge} here, which port group {group} stands for: make it, or correct {}",
                arguments.config.display()
            ));
        }
    }
    output.show(&Done { message }, |output, done| output.line(&done.message));
    Ok(())
}

/// The options that a joining host mostly needs beside its token.
const OPTIONS: &str = "--name NAME --migration ADDRESS --port-group vm=BRIDGE";

/// Shows how a host joins: the command, and what is that host's own in it.
pub fn show_command(output: &Output, command: &str) {
    output.verbatim(format!("\n  {command} {OPTIONS}\n"));
    output.line("NAME: the host's name; the machine's own when left out.");
    output.line("ADDRESS: its address on the migration network; the one that reaches the controller when left out.");
    output.line(
        "BRIDGE: the bridge that port group 'vm' of VM descriptions stands for on this host.",
    );
}

/// Refuses an address that this machine does not have: nothing could listen there.
pub fn must_be_own(address: IpAddr) -> Result<(), Failure> {
    match UdpSocket::bind(SocketAddr::new(address, 0)) {
        Err(error) if error.kind() == std::io::ErrorKind::AddrNotAvailable => Err(usage(format!(
            "this machine has no address {address}: see its addresses with 'ip address', and give one of them"
        ))),
        // What else stands in the way is told by who listens.
        _ => Ok(()),
    }
}

fn is_bridge(name: &str) -> bool {
    Path::new("/sys/class/net")
        .join(name)
        .join("bridge")
        .exists()
}

/// What an earlier life of this machine held is not this host's: its records would speak for what the site has gone past.
fn nothing_is_left(state_dir: &Path) -> Result<(), Failure> {
    let vms = state_dir.join("vms");
    let has_records = std::fs::read_dir(&vms).is_ok_and(|mut entries| entries.next().is_some());
    if !has_records && !state_dir.join("site.json").exists() {
        return Ok(());
    }
    Err(Failure::new(
        ErrorCode::AlreadyExists,
        format!(
            "{} holds what this machine was before: empty it, or move it away, then join",
            state_dir.display()
        ),
    ))
}

fn chosen_name(given: Option<HostName>) -> Result<HostName, Failure> {
    if let Some(name) = given {
        return Ok(name);
    }
    let text = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let short = text
        .trim()
        .split('.')
        .next()
        .unwrap_or_default()
        .to_string();
    HostName::new(short).map_err(|error| {
        usage(format!(
            "this machine's host name will not do ({error}): give --name"
        ))
    })
}

/// An agent that runs has the certificate and the table of this machine's earlier life, and would write that into the new one.
fn no_agent_runs(socket: &Path) -> Result<(), Failure> {
    use std::io::ErrorKind::{ConnectionRefused, NotFound};
    match UnixStream::connect(socket) {
        Err(error) if matches!(error.kind(), NotFound | ConnectionRefused) => return Ok(()),
        // Whatever else it says, something may listen there.
        _ => {}
    }
    Err(Failure::new(
        ErrorCode::WrongState,
        format!(
            "an agent of this machine's earlier life runs ({}): stop it first, with 'systemctl stop {SERVICE}' or by hand; its guests run on. Then join again; the token is still good",
            socket.display()
        ),
    ))
}

/// The controller's address that this machine has a way to, and where the agent listens.
fn addresses(
    token: &Token,
    listen: Option<SocketAddr>,
) -> Result<(SocketAddr, SocketAddr), Failure> {
    for controller in &token.addresses {
        if let Ok(own) = own_address(*controller) {
            return Ok((
                *controller,
                listen.unwrap_or(SocketAddr::new(own, LISTEN_PORT)),
            ));
        }
    }
    let list: Vec<String> = token.addresses.iter().map(ToString::to_string).collect();
    Err(Failure::new(
        ErrorCode::HostUnreachable,
        format!(
            "this machine has no route to the controller at {}: check its network",
            list.join(" or ")
        ),
    ))
}

/// The address with which this machine would reach `peer`; nothing is sent.
fn own_address(peer: SocketAddr) -> std::io::Result<IpAddr> {
    let any: IpAddr = if peer.is_ipv4() {
        [0, 0, 0, 0].into()
    } else {
        [0u16; 8].into()
    };
    let socket = UdpSocket::bind(SocketAddr::new(any, 0))?;
    socket.connect(peer)?;
    Ok(socket.local_addr()?.ip())
}

fn config_text(
    arguments: &HostJoin,
    name: &HostName,
    listen: SocketAddr,
    controller: SocketAddr,
) -> Result<String, Failure> {
    let mut groups = toml::Table::new();
    for pair in &arguments.port_groups {
        let (group, bridge) = pair.split_once('=').ok_or_else(|| {
            usage(format!(
                "--port-group {pair} is not GROUP=BRIDGE, such as vm=vmbr0"
            ))
        })?;
        groups.insert(group.into(), bridge.into());
    }
    let migration = match arguments.migration.as_slice() {
        [] => vec![listen.ip()],
        given => given.to_vec(),
    };
    let migration: Vec<String> = migration.iter().map(ToString::to_string).collect();
    let mut table = toml::Table::new();
    table.insert("name".into(), name.as_str().into());
    table.insert("listen".into(), listen.to_string().into());
    table.insert("controller".into(), controller.to_string().into());
    table.insert(
        "state_dir".into(),
        arguments.state_dir.to_string_lossy().into_owned().into(),
    );
    table.insert(
        "run_dir".into(),
        arguments.run_dir.to_string_lossy().into_owned().into(),
    );
    table.insert("migration_addresses".into(), migration.into());
    table.insert("encryption".into(), (!arguments.no_encryption).into());
    table.insert("port_groups".into(), groups.into());
    toml::to_string(&table).map_err(|error| usage(error.to_string()))
}

fn private_dir(dir: &Path) -> Result<(), Failure> {
    let wrong = local("make the state directory");
    godwit_store::make_directory(dir, 0o700).map_err(|error| wrong(&error))?;
    std::fs::set_permissions(dir, std::fs::Permissions::from_mode(0o700))
        .map_err(|error| wrong(&error))
}

async fn enrol(
    token: &Token,
    controller: SocketAddr,
    name: &HostName,
    listen: SocketAddr,
    pki: &Path,
) -> CommandResult {
    let wrong = local("make this host's certificate");
    let client = Client::joining(controller, token.fingerprint).map_err(|error| wrong(&error))?;
    let request = Request::new().map_err(|error| wrong(&error))?;
    let body = JoinRequest {
        secret: token.secret().to_string(),
        name: name.clone(),
        agent_address: listen,
        csr_pem: request.csr_pem.clone(),
        former: None,
    };
    let answer = ControllerClient::new(client)
        .join(&body)
        .await
        .map_err(failure)?;
    let identity = request
        .into_identity(answer.certificate_pem, answer.ca_pem)
        .map_err(|error| wrong(&error))?;
    let same_ca = identity.ca_fingerprint().map_err(|error| wrong(&error))? == token.fingerprint;
    if !same_ca {
        return Err(Failure::new(
            ErrorCode::BadToken,
            "the controller answered with another CA than the token's: nothing was kept",
        ));
    }
    identity.save(pki).map_err(|error| wrong(&error))
}

/// Starts the agent's service where systemd runs; says what is left to do.
async fn begin(no_start: bool, config: &Path) -> String {
    let by_hand = format!(
        "start its agent with 'godwit agent run --config {}'",
        config.display()
    );
    // The package's unit reads that file and no other.
    let is_units = config == Path::new(CONFIG_PATH);
    if no_start || !is_units || !Path::new("/run/systemd/system").exists() {
        return by_hand;
    }
    let started = tokio::process::Command::new("systemctl")
        .args(["enable", "--now", SERVICE])
        .output();
    match tokio::time::timeout(std::time::Duration::from_secs(30), started).await {
        Ok(Ok(output)) if output.status.success() => {
            "its agent runs; see 'godwit host check'".into()
        }
        _ => by_hand,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arguments(extra: &[&str]) -> HostJoin {
        use clap::Parser;
        let mut words = vec!["godwit", "host", "join", "t"];
        words.extend(extra);
        let cli = crate::args::Cli::parse_from(words);
        match cli.command {
            crate::args::Command::Host(crate::args::HostCommand::Join(join)) => join,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_command_that_is_shown_has_all_that_a_host_needs() {
        use crate::output::tests::PRINTED;
        PRINTED.take();
        show_command(&Output::new(false), "godwit host join t");
        let printed = PRINTED.take();
        let shown = printed.iter().find_map(|line| line.split_once(" join t "));
        let (_, options) = shown.expect("the command");
        let options = options.replace("NAME", "a").replace("BRIDGE", "vmbr0");
        let options = options.replace("ADDRESS", "10.1.0.1");
        let options: Vec<&str> = options.split(' ').collect();
        assert_eq!(arguments(&options).name, Some(HostName::new("a").unwrap()));
        let config = HostConfig::parse(&text(&options).unwrap(), Path::new("t")).unwrap();
        assert_eq!(config.migration_addresses.len(), 1);
        let groups: Vec<_> = config.port_groups.iter().collect();
        assert_eq!(groups.len(), 1);
        assert_eq!(
            (groups[0].0.as_str(), groups[0].1.as_str()),
            ("vm", "vmbr0")
        );
    }

    fn text(extra: &[&str]) -> Result<String, Failure> {
        let name = HostName::new("a").unwrap();
        let here = "10.0.0.2:8472".parse().unwrap();
        config_text(
            &arguments(extra),
            &name,
            here,
            "10.0.0.1:8471".parse().unwrap(),
        )
    }

    #[test]
    fn a_machine_joins_without_the_records_of_its_former_life() {
        let dir = tempfile::tempdir().unwrap();
        // What an earlier try to join leaves, and empty directories, are in nobody's way.
        for made in ["pki", "vms"] {
            std::fs::create_dir(dir.path().join(made)).unwrap();
        }
        assert!(nothing_is_left(dir.path()).is_ok());
        std::fs::create_dir(dir.path().join("vms/web")).unwrap();
        let refused = nothing_is_left(dir.path()).unwrap_err();
        assert_eq!(refused.error.code, ErrorCode::AlreadyExists);
        std::fs::remove_dir(dir.path().join("vms/web")).unwrap();
        std::fs::write(dir.path().join("site.json"), "{}").unwrap();
        assert!(nothing_is_left(dir.path()).is_err());
    }

    #[test]
    fn what_is_written_is_a_valid_configuration() {
        let written = text(&[
            "--port-group",
            "vm=vmbr0",
            "--migration",
            "fd00::1",
            "--no-encryption",
        ])
        .unwrap();
        let config = HostConfig::parse(&written, Path::new("t")).unwrap();
        assert_eq!(
            config.migration_addresses,
            ["fd00::1".parse::<IpAddr>().unwrap()]
        );
        assert_eq!(config.port_groups.len(), 1);
        assert!(!config.encryption);
    }

    #[test]
    fn the_listening_address_carries_migrations_unless_said_otherwise() {
        let config = HostConfig::parse(&text(&[]).unwrap(), Path::new("t")).unwrap();
        assert_eq!(
            config.migration_addresses,
            ["10.0.0.2".parse::<IpAddr>().unwrap()]
        );
    }

    #[test]
    fn a_machine_whose_former_agent_runs_does_not_join() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("agent.sock");
        assert!(no_agent_runs(&socket).is_ok());
        let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        let refused = no_agent_runs(&socket).unwrap_err();
        assert_eq!(refused.error.code, ErrorCode::WrongState);
        assert!(refused.error.message.contains("stop it first"));
        drop(listener);
        assert!(no_agent_runs(&socket).is_ok(), "its socket was left");
    }

    #[test]
    fn an_address_of_another_machine_is_refused() {
        assert!(must_be_own("127.0.0.1".parse().unwrap()).is_ok());
        let refused = must_be_own("192.0.2.77".parse().unwrap()).unwrap_err();
        assert!(refused.error.message.contains("no address 192.0.2.77"));
        assert!(!is_bridge("lo") && !is_bridge("no-such-bridge"));
    }

    #[test]
    fn a_port_group_needs_a_bridge() {
        let failure = text(&["--port-group", "vm"]).unwrap_err();
        assert_eq!(failure.exit, crate::exit::USAGE);
        assert!(failure.error.message.contains("vm=vmbr0"));
    }
}
