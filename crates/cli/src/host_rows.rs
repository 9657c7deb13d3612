//! What `host show` says of a host, row by row.
//!
//! Owns nothing. Refuses nothing.

use godwit_types::DatastoreName;
use godwit_types::datastore::Datastore;
use godwit_types::host::HostInfo;
use godwit_types::text::listed;

/// Name and value of each row.
pub fn info_rows(info: &HostInfo) -> Vec<(&'static str, String)> {
    let addresses: Vec<String> = info
        .migration_addresses
        .iter()
        .map(ToString::to_string)
        .collect();
    let groups: Vec<String> = info
        .port_groups
        .iter()
        .map(|(group, bridge)| format!("{group}={bridge}"))
        .collect();
    vec![
        ("name", info.name.to_string()),
        ("agent", info.agent_address.to_string()),
        ("godwit", info.version.clone()),
        (
            "speaks",
            format!(
                "protocol {}, migration {}, hardware {}",
                info.speaks.protocol, info.speaks.migration, info.speaks.hardware
            ),
        ),
        ("kernel", info.kernel.clone()),
        ("qemu", info.qemu.clone()),
        ("runs guests on", info.accelerator.to_string()),
        ("cpu models", models_of(info)),
        (
            "encryption",
            if info.encryption {
                "yes".into()
            } else {
                "no".into()
            },
        ),
        ("cpus", info.cpus.to_string()),
        (
            "memory",
            format!(
                "{} of {} MiB free",
                info.memory_free_mib, info.memory_total_mib
            ),
        ),
        ("migration addresses", addresses.join(", ")),
        ("port groups", groups.join(", ")),
        ("datastores", datastores_of(info)),
    ]
}

fn datastores_of(info: &HostInfo) -> String {
    let of = |(name, store): (&DatastoreName, &Datastore)| {
        let mut said = Vec::new();
        said.extend(store.shared.then(|| "shared".to_owned()));
        said.extend(
            store
                .room
                .map(|room| format!("{} of {} MiB free", room.free_mib, room.total_mib)),
        );
        let said = match said.is_empty() {
            true => String::new(),
            false => format!(" ({})", said.join(", ")),
        };
        format!("{name}={}{said}", store.path)
    };
    listed(info.datastores.iter().map(of))
}

/// Without the names that stand for a version of the same model.
fn models_of(info: &HostInfo) -> String {
    let plain = |name: &&String| {
        let version = name.rsplit_once("-v").map(|(_, version)| version);
        version.is_none_or(|version| !version.bytes().all(|byte| byte.is_ascii_digit()))
    };
    let names = info.models_under(info.accelerator).iter().filter(plain);
    names.map(String::as_str).collect::<Vec<_>>().join(", ")
}
