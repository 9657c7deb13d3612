//! Named limits of the control plane. Owns nothing.

use std::time::Duration;

/// Longest request body, bytes.
pub const REQUEST_LEN_MAX: usize = 1 << 20;
/// Longest answer that a client takes of a single thing, bytes.
pub const ANSWER_LEN_MAX: usize = 1 << 20;
/// Longest list that a client takes from one host, bytes: a thousand VMs fit whose descriptions and notes are as long as
/// they may be, and as many records as a host keeps.
pub const LIST_LEN_MAX: usize = 32 << 20;
/// Longest list that a client takes from a controller, bytes: those of all its hosts.
pub const SITE_LIST_LEN_MAX: usize = 512 << 20;
/// Longest time from an answer's head to its end. That more of it comes within the call's deadline is asked besides.
pub const ANSWER_WAIT: Duration = Duration::from_secs(20);
/// Longest request head, bytes.
pub const HEADER_LEN_MAX: usize = 32 << 10;
/// Longest line of an event stream, bytes.
pub const EVENT_LINE_LEN_MAX: usize = 1 << 20;
/// Most connections that one listener serves at a time.
pub const CONNECTIONS_MAX: usize = 512;
/// Most of these for one certificate's role and name, but for the controller's.
pub const CONNECTIONS_PER_HOLDER: usize = CONNECTIONS_MAX / 2;
/// Of these, those that only the controller gets: a host that it cannot reach would look as if it were off.
pub const CONNECTIONS_FOR_CONTROLLER: usize = 32;
/// Most connections of one listener that have not ended their TLS handshake; beyond that one makes room.
pub const HANDSHAKES_MAX: usize = 256;
/// Most of these from one source address: all hosts of a small site may stand behind one.
pub const HANDSHAKES_PER_SOURCE: usize = 64;
/// Most connections of one listener whose peers have shown no certificate, or one that was revoked: each may ask once.
pub const STRANGERS_MAX: usize = 64;
/// Most of these from one source address.
pub const STRANGERS_PER_SOURCE: usize = 16;

/// Longest time until a connection with a peer far away is made and both sides have proved who they are. A host that is
/// cut off is known by that before anything was asked of it.
pub const CONNECT_WAIT: Duration = Duration::from_secs(5);

/// How long a peer may take, as a server sees it.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// For the TLS handshake.
    pub handshake: Duration,
    /// For a request's head, and idle between two requests.
    pub head: Duration,
    /// For a request's body.
    pub body: Duration,
    /// For a part of an answer, in which its reader takes nothing.
    pub write: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            handshake: CONNECT_WAIT,
            head: Duration::from_secs(10),
            body: Duration::from_secs(10),
            write: Duration::from_secs(20),
        }
    }
}
