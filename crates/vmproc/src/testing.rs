//! What several modules' tests need.

use crate::shared_report::SharedReport;
use godwit_types::migration::{
    AgentAddress, Cipher, MigrationReport, MigrationSecret, MigrationSpec, Side,
};
use godwit_types::{Generation, HostName, MigrationId, VmName};
use godwit_wire::Spec;
use std::sync::Arc;

/// An encrypted migration named `m`.
pub(crate) fn spec() -> Arc<Spec> {
    let secret = MigrationSecret {
        key: vec![1; 32],
        nonce: vec![2; 8],
    };
    let id = MigrationId::new("m").unwrap();
    Arc::new(Spec::new(id, &secret, Cipher::Aes256Gcm).unwrap())
}

/// A migration named `id` of the VM `web` from host `a` to host `b`.
pub(crate) fn migration(id: &str) -> MigrationSpec {
    let host = |name: &str| AgentAddress {
        host: HostName::new(name).unwrap(),
        address: "127.0.0.1:1".parse().unwrap(),
    };
    MigrationSpec {
        id: MigrationId::new(id).unwrap(),
        vm: VmName::new("web").unwrap(),
        generation: Generation(2),
        source: host("a"),
        destination: host("b"),
        secret: MigrationSecret {
            key: vec![1; 32],
            nonce: vec![2; 8],
        },
        cipher: Cipher::Aes256Gcm,
        max_downtime_ms: 50,
        deadline_s: None,
        max_bandwidth_mbit_per_s: None,
        max_guest_slowdown_percent: None,
        prepare_memory: false,
        prediction: None,
        source_addresses: Vec::new(),
        destination_addresses: Vec::new(),
    }
}

/// The report of that migration, begun.
pub(crate) fn report(side: Side) -> SharedReport {
    SharedReport::new(MigrationReport::begun(&migration("m"), side, 4, 0))
}
