//! What a controller is told when it starts. Owns nothing.

use godwit_rpc::agent_client::Deadlines;
use godwit_rpc::pki::CERTIFICATE_DAYS;
use godwit_types::migration::GIVEN_UP_WITHIN;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

/// How long certificates are good for unless said otherwise.
pub const CERTIFICATE_VALID: Duration =
    Duration::from_secs(CERTIFICATE_DAYS.unsigned_abs() * 86_400);

/// What `controller.toml` and the command line decide about a controller.
#[derive(Debug, Clone)]
pub struct ControllerConfig {
    /// Directory of the database, CA and keys.
    pub state_dir: PathBuf,
    /// Unix socket for local people.
    pub socket: PathBuf,
    /// Addresses to listen on for hosts and operators.
    pub listen: Vec<SocketAddr>,
    /// Addresses that hosts reach it by, for join tokens; the listening ones when empty.
    pub advertise: Vec<SocketAddr>,
    /// How often each agent is asked.
    pub poll_every: Duration,
    /// How often a migration under way is asked about, and shown.
    pub watch_every: Duration,
    /// How long a source that does not answer counts as moving a VM that its destination gave up.
    pub source_gives_up: Duration,
    /// How long agents may take.
    pub deadlines: Deadlines,
    /// How long a join token is good for.
    pub token_valid: Duration,
    /// How long a certificate is good for; it is renewed when two thirds of that are over.
    pub certificate_valid: Duration,
}

impl ControllerConfig {
    /// Usual values for everything but the places.
    pub fn new(state_dir: PathBuf, socket: PathBuf, listen: Vec<SocketAddr>) -> Self {
        Self {
            state_dir,
            socket,
            listen,
            advertise: Vec::new(),
            poll_every: Duration::from_secs(1),
            watch_every: Duration::from_millis(200),
            source_gives_up: GIVEN_UP_WITHIN,
            deadlines: Deadlines::default(),
            token_valid: Duration::from_secs(3600),
            certificate_valid: CERTIFICATE_VALID,
        }
    }
}
