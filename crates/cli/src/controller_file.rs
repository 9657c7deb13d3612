//! The controller's configuration file, `/etc/godwit/controller.toml`.
//!
//! Owns nothing. Refuses: unknown keys, a controller that listens nowhere.

use crate::exit::Failure;
use godwit_controller::ControllerConfig;
use godwit_types::ErrorCode;
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Seconds that certificates may be good for: long enough to be renewed, and not longer than ten years.
const LIVES_S: RangeInclusive<u64> = 10..=10 * 365 * 86_400;

/// What `controller.toml` says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ControllerFile {
    /// Addresses to listen on for hosts and operators.
    pub listen: Vec<SocketAddr>,
    /// Addresses that hosts reach it by, where they differ.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub advertise: Vec<SocketAddr>,
    /// Directory of database and certificates.
    pub state_dir: PathBuf,
    /// Unix socket for local commands.
    pub socket: PathBuf,
    /// How long certificates are good for, seconds; a year unless said otherwise. They renew themselves at two thirds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub certificate_life_s: Option<u64>,
}

impl ControllerFile {
    /// Reads and checks the file.
    pub fn load(path: &Path) -> Result<Self, Failure> {
        let text = std::fs::read_to_string(path).map_err(|error| {
            let message = format!(
                "cannot read {}: {error}; set the controller up with 'godwit controller init'",
                path.display()
            );
            Failure::new(ErrorCode::InvalidRequest, message)
        })?;
        let file: Self = toml::from_str(&text).map_err(|error| {
            let message = format!(
                "{} is not valid: {}",
                path.display(),
                godwit_agent::config::one_line(&text, &error)
            );
            Failure::new(ErrorCode::InvalidRequest, message)
        })?;
        if file.listen.is_empty() {
            let message = format!(
                "{}: listen names no address: hosts could not reach the controller",
                path.display()
            );
            return Err(Failure::new(ErrorCode::InvalidRequest, message));
        }
        if file
            .certificate_life_s
            .is_some_and(|life| !LIVES_S.contains(&life))
        {
            let message = format!(
                "{}: certificate_life_s is not between {} and {} seconds",
                path.display(),
                LIVES_S.start(),
                LIVES_S.end()
            );
            return Err(Failure::new(ErrorCode::InvalidRequest, message));
        }
        Ok(file)
    }

    /// As the controller takes it.
    pub fn config(self) -> ControllerConfig {
        let mut config = ControllerConfig::new(self.state_dir, self.socket, self.listen);
        config.advertise = self.advertise;
        if let Some(seconds) = self.certificate_life_s {
            config.certificate_valid = Duration::from_secs(seconds);
        }
        config
    }
}
