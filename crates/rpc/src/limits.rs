//! Named limits of the control plane. Owns nothing.

use std::time::Duration;

/// Longest request body, bytes.
pub const REQUEST_LEN_MAX: usize = 1 << 20;
/// Longest answer that a client takes, bytes: a list of several thousand VMs fits.
pub const ANSWER_LEN_MAX: usize = 16 << 20;
/// Longest request head, bytes.
pub const HEADER_LEN_MAX: usize = 32 << 10;
/// Longest line of an event stream, bytes.
pub const EVENT_LINE_LEN_MAX: usize = 1 << 20;
/// Most connections that one listener serves at a time.
pub const CONNECTIONS_MAX: usize = 512;

/// How long a peer may take, as a server sees it.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// For the TLS handshake.
    pub handshake: Duration,
    /// For a request's head, and idle between two requests.
    pub head: Duration,
    /// For a request's body.
    pub body: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            handshake: Duration::from_secs(10),
            head: Duration::from_secs(10),
            body: Duration::from_secs(10),
        }
    }
}
