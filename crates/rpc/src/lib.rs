//! The control plane's wires: JSON over HTTP/1.1 on a Unix socket (peer credentials) or over TCP with mutual TLS 1.3,
//! for server and client, with the certificates and join tokens behind them.
//!
//! Owns: who a peer is ([`Peer`]), which routes it may call ([`access`]), size and time limits of every request, and
//! the shape of every error ([`godwit_types::ApiError`]). Refuses: any route that has no rule, any peer that has no
//! certificate of the CA on anything but joining, certificates that were revoked, bodies over
//! [`limits::REQUEST_LEN_MAX`], and headers or bodies that trickle in.
#![forbid(unsafe_code)]

pub mod access;
pub mod agent_client;
pub mod audit;
pub mod client;
pub mod controller_client;
mod current;
pub mod extract;
mod former;
#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;
pub mod limits;
pub mod listen;
pub mod pki;
mod pki_files;
mod places;
pub mod rate;
pub mod revocations;
pub mod server;
pub mod sse;
pub mod tls;
pub mod token;
pub mod unix_socket;
mod unproved;
mod until;
pub mod wiped;

pub use access::{Peer, Rule, Unwanted};
pub use agent_client::{AgentClient, HeardVms};
pub use client::{Client, ClientError, Stamps};
pub use controller_client::ControllerClient;
pub use current::Current;
pub use extract::{ApiResult, Failure, JsonBody, PathParam};
pub use pki::{Authority, Fingerprint, Identity, Role};
pub use revocations::{Admission, Revocations};
pub use server::{CameFrom, Server};
pub use token::Token;
