//! Entry for fuzzing: bytes from a peer as each body that a server or client decodes, tokens, certificates and event
//! streams. Must never panic; owns nothing.

use crate::extract::decode;
use crate::pki::Holder;
use crate::sse::Parser;
use crate::token::Token;
use godwit_types::control_api as control;
use godwit_types::host_api as host;
use godwit_types::migration;
use godwit_types::{ApiError, VmSpec};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Decodes `bytes` as every body; what decodes must encode again.
pub fn body(bytes: &[u8]) {
    one::<control::JoinRequest>(bytes);
    one::<control::StartRequest>(bytes);
    one::<control::StopRequest>(bytes);
    one::<control::ResolveRequest>(bytes);
    one::<control::CancelRequest>(bytes);
    one::<control::VmView>(bytes);
    one::<control::HostView>(bytes);
    one::<migration::MigrateRequest>(bytes);
    one::<migration::MigrationSpec>(bytes);
    one::<migration::MigrationReport>(bytes);
    one::<host::PutVm>(bytes);
    one::<host::PrepareIncoming>(bytes);
    one::<host::PreflightIncoming>(bytes);
    one::<host::PreflightOutgoing>(bytes);
    one::<host::PeerEnvelope>(bytes);
    one::<host::ProbeRequest>(bytes);
    one::<host::ProbeResult>(bytes);
    one::<host::Revoked>(bytes);
    one::<host::VmRequest>(bytes);
    one::<host::VmAnswer>(bytes);
    one::<ApiError>(bytes);
    one::<crate::controller_client::MigrateAnswer>(bytes);
    if let Ok(spec) = decode::<VmSpec>(bytes) {
        let _ = spec.check();
        let _ = spec.mac(0);
    }
    let _ = Parser::default().push(bytes);
    let _ = Holder::read(bytes);
    let _ = Token::parse(&String::from_utf8_lossy(bytes));
}

fn one<T: DeserializeOwned + Serialize>(bytes: &[u8]) {
    if let Ok(value) = decode::<T>(bytes) {
        let _ = serde_json::to_vec(&value);
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn hostile_bodies_do_not_panic() {
        let deep = "[".repeat(100_000);
        let bodies: [&[u8]; 5] = [
            b"",
            b"{}",
            b"\xff\xfe",
            deep.as_bytes(),
            b"{\"name\":\"../x\"}",
        ];
        for body in bodies {
            super::body(body);
        }
    }
}
