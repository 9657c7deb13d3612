//! `godwit controller`: set up and run.
//!
//! Owns the configuration file that it writes. Refuses: to set up over an existing configuration.

use crate::args::{CONTROLLER_CONFIG, CONTROLLER_STATE, ControllerInit};
use crate::commands::{config_file, join};
use crate::controller_file::ControllerFile;
use crate::exit::{CommandResult, Failure};
use crate::output::Output;
use godwit_types::ErrorCode;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

/// Runs the controller until a signal; it makes its own runtime.
pub fn serve(config: &Path) -> CommandResult {
    let config = ControllerFile::load(config)?.config();
    if let Some(dir) = config.socket.parent().filter(|dir| !dir.exists()) {
        make_public_dir(dir)
            .map_err(|error| failed(&format!("cannot make {}: {error}", dir.display())))?;
    }
    godwit_controller::run(config).map_err(|error| failed(&error))
}

/// The sockets in it have modes of their own.
fn make_public_dir(dir: &Path) -> std::io::Result<()> {
    std::fs::create_dir_all(dir)?;
    std::fs::set_permissions(dir, std::fs::Permissions::from_mode(0o711))
}

fn failed(error: &impl std::fmt::Display) -> Failure {
    Failure::new(ErrorCode::Internal, error.to_string())
}

/// Sets a controller up.
pub async fn init(arguments: ControllerInit, output: &Output) -> CommandResult {
    if arguments.config.exists() {
        let message = format!(
            "{} exists: this controller is set up already; make a join token with 'godwit host add'",
            arguments.config.display()
        );
        return Err(Failure::new(ErrorCode::AlreadyExists, message));
    }
    join::must_be_own(arguments.listen.ip())?;
    if arguments.listen.ip().is_unspecified() && arguments.advertise.is_empty() {
        let message = format!(
            "no host can reach {}: name the address that hosts reach this machine at with --advertise ADDRESS, or listen on that one",
            arguments.listen.ip()
        );
        return Err(Failure::new(ErrorCode::InvalidRequest, message));
    }
    let start = how_to_start(&arguments);
    let file = ControllerFile {
        listen: vec![arguments.listen],
        advertise: arguments.advertise,
        state_dir: arguments.state_dir,
        socket: arguments.socket,
        certificate_life_s: arguments.certificate_life_s,
    };
    let text = toml::to_string(&file).map_err(|error| failed(&error))?;
    let made = godwit_controller::init(&file.config())
        .await
        .map_err(|error| failed(&error))?;
    config_file::write(&arguments.config, &text).map_err(|error| {
        let message = format!("cannot write {}: {error}", arguments.config.display());
        Failure::new(ErrorCode::Internal, message)
    })?;
    let shown = serde_json::json!({
        "ca_fingerprint": made.ca_fingerprint,
        "operator_dir": made.operator_dir,
        "join": made.join,
    });
    output.show(&shown, |output, _| {
        output.line(format!("The controller is set up. Start it with {start}."));
        output.line("Then run this on the first host, within an hour:");
        join::show_command(output, &made.join.command);
        output.line(format!(
            "The operator's certificate for other machines is in {}.",
            made.operator_dir.display()
        ));
    });
    Ok(())
}

/// The package's unit reads one file, and may write to one directory.
fn how_to_start(arguments: &ControllerInit) -> String {
    let is_units = arguments.config == Path::new(CONTROLLER_CONFIG)
        && arguments.state_dir == Path::new(CONTROLLER_STATE);
    match is_units {
        true => "'systemctl enable --now godwit-controller' or 'godwit controller run'".into(),
        false => format!(
            "'godwit controller run --config {}'; a unit for it has to name this file, and {} in ReadWritePaths=",
            arguments.config.display(),
            arguments.state_dir.display()
        ),
    }
}
