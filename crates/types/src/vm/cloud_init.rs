//! What a guest is told when it boots the first time: cloud-init's user data, keys, name and network.
//!
//! Pure, owns nothing. The texts are whole in the description, so that every host makes the same seed of them; that travels with
//! each status of the VM, hence the bounds, which are those of the great clouds. Refuses: texts that cloud-init would pass over, names that are none, more
//! networks than cards, and the table where the hardware has no seed. What it says of people is not shown by `Debug`: logs hold none of it.

use super::{InvalidVm, VmSpec};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::IpAddr;
use utoipa::ToSchema;

/// The first hardware version with a seed and with a port for the guest's agent.
pub const SEED_AND_AGENT: u32 = 3;
/// Longest user data, bytes.
pub const USER_DATA_LEN_MAX: usize = 16 << 10;
/// Most keys, and the longest one, bytes.
pub const SSH_KEYS_MAX: usize = 32;
pub const SSH_KEY_LEN_MAX: usize = 2048;
/// Most addresses of a card, and most servers and domains that its guest asks for names.
const ADDRESSES_MAX: usize = 8;
const DNS_MAX: usize = 4;
const SEARCH_MAX: usize = 8;
/// Longest name of an instance, bytes.
const INSTANCE_LEN_MAX: usize = 64;
/// Longest name of a host, and of a part of it, bytes.
const HOST_LEN_MAX: usize = 253;
const LABEL_LEN_MAX: usize = 63;
/// What user data begins with that cloud-init knows.
const BEGINNINGS: [&str; 9] = [
    "#cloud-config",
    "#!",
    "#include",
    "#cloud-boothook",
    "#part-handler",
    "## template:",
    "Content-Type:",
    "MIME-Version:",
    "From ",
];

/// What cloud-init is told: the table `[cloud_init]`.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema, Default)]
#[serde(deny_unknown_fields)]
pub struct CloudInit {
    /// The user data itself: `#cloud-config`, a script, or what else cloud-init knows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user_data: Option<String>,
    /// A file that holds the user data. The command line reads it and sends the text; never part of a description that is kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user_data_file: Option<String>,
    /// Public keys of those who may log in as the image's own user, as in `authorized_keys`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ssh_keys: Vec<String>,
    /// The guest's name; the VM's, where that is none of a host, with `-` for what may not be in one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hostname: Option<String>,
    /// Under which name cloud-init knows this guest: under another it does again what it does once. Made of the VM's name when left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instance_id: Option<String>,
    /// The network of each card, in their order; a card without one asks by DHCP.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub network: Vec<CardNetwork>,
}

/// The network of one card in the guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema, Default)]
#[serde(deny_unknown_fields)]
pub struct CardNetwork {
    /// Addresses with the lengths of their networks, such as `192.0.2.10/24`. None: by DHCP.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<String>,
    /// Routers for all that is elsewhere: at most one of IPv4 and one of IPv6.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(value_type = Vec<String>)]
    pub gateways: Vec<IpAddr>,
    /// Servers that are asked for names.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(value_type = Vec<String>)]
    pub dns: Vec<IpAddr>,
    /// Domains in which short names are looked for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub search: Vec<String>,
}

impl fmt::Debug for CloudInit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CloudInit({self})")
    }
}

impl fmt::Display for CloudInit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (keys, user_data) = (self.ssh_keys.len(), &self.user_data);
        match user_data {
            Some(text) => write!(f, "user data of {} bytes, ", text.len())?,
            None => f.write_str("no user data, ")?,
        }
        match keys {
            1 => f.write_str("1 key"),
            keys => write!(f, "{keys} keys"),
        }
    }
}

impl CloudInit {
    fn check(&self, cards: usize) -> Result<(), String> {
        if self.user_data_file.is_some() {
            return Err("`user_data_file` is read by the command line, where `godwit vm create` runs: send its text as `user_data`".into());
        }
        self.user_data.as_deref().map_or(Ok(()), check_user_data)?;
        if self.ssh_keys.len() > SSH_KEYS_MAX {
            let keys = self.ssh_keys.len();
            return Err(format!(
                "{keys} keys are too many: use at most {SSH_KEYS_MAX}"
            ));
        }
        for (key, number) in self.ssh_keys.iter().zip(1..) {
            check_key(key).map_err(|why| format!("key number {number} of `ssh_keys` {why}"))?;
        }
        if let Some(name) = self.hostname.as_ref().filter(|name| !is_host_name(name)) {
            return Err(format!(
                "hostname = \"{}\" is no name of a host: use letters, digits and '-', with dots between the parts",
                name.escape_debug()
            ));
        }
        let fits = |id: &&String| {
            let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
            (1..=INSTANCE_LEN_MAX).contains(&id.len()) && id.chars().all(allowed)
        };
        if let Some(id) = self.instance_id.as_ref().filter(|id| !fits(id)) {
            return Err(format!(
                "instance_id = \"{}\" is not valid: use 1 to {INSTANCE_LEN_MAX} of letters, digits, '-', '_' and '.'",
                id.escape_debug()
            ));
        }
        if self.network.len() > cards {
            let networks = self.network.len();
            return Err(format!(
                "{networks} networks are described and {cards} cards: each [[cloud_init.network]] is of the [[nic]] in the same place"
            ));
        }
        for (network, number) in self.network.iter().zip(1..) {
            network
                .check()
                .map_err(|why| format!("[[cloud_init.network]] number {number}: {why}"))?;
        }
        Ok(())
    }
}

impl CardNetwork {
    /// Its addresses, and the lengths of their networks.
    pub fn parsed(&self) -> impl Iterator<Item = Option<(IpAddr, u8)>> {
        self.addresses.iter().map(|text| parse_address(text))
    }

    fn check(&self) -> Result<(), String> {
        let counted = [
            ("addresses", self.addresses.len(), ADDRESSES_MAX),
            ("gateways", self.gateways.len(), 2),
            ("dns servers", self.dns.len(), DNS_MAX),
            ("search domains", self.search.len(), SEARCH_MAX),
        ];
        if let Some((what, count, most)) = counted.iter().find(|(_, count, most)| count > most) {
            return Err(format!("{count} {what} are too many: use at most {most}"));
        }
        let wrong = self
            .addresses
            .iter()
            .find(|text| parse_address(text).is_none());
        if let Some(text) = wrong {
            return Err(format!(
                "\"{}\" is no address of a card: write it with the length of its network, such as 192.0.2.10/24",
                text.escape_debug()
            ));
        }
        for (gateway, index) in self.gateways.iter().zip(0..) {
            let same = |other: &IpAddr| other.is_ipv4() == gateway.is_ipv4();
            if self.gateways.iter().take(index).any(same) {
                return Err(format!(
                    "{gateway} is a second gateway of one kind: use one for IPv4 and one for IPv6"
                ));
            }
            if !self.parsed().flatten().any(|(address, _)| same(&address)) {
                return Err(format!(
                    "gateway {gateway} goes with an address of its kind, and there is none"
                ));
            }
        }
        match self.search.iter().find(|domain| !is_host_name(domain)) {
            Some(domain) => Err(format!("\"{}\" is no domain", domain.escape_debug())),
            None => Ok(()),
        }
    }
}

fn check_user_data(text: &str) -> Result<(), String> {
    if text.len() > USER_DATA_LEN_MAX {
        return Err(format!(
            "the user data has {} bytes: use at most {USER_DATA_LEN_MAX}, and `#include` with an address for more",
            text.len()
        ));
    }
    if text.contains('\0') {
        return Err("the user data has a zero byte: it is text".into());
    }
    match BEGINNINGS.iter().any(|known| text.starts_with(known)) {
        true => Ok(()),
        false => Err("cloud-init would pass over the user data: its first line must say what it is, as `#cloud-config` does or `#!/bin/sh`".into()),
    }
}

/// A line of `authorized_keys` without options. A private key is not repeated in the refusal.
fn check_key(key: &str) -> Result<(), String> {
    if key.contains("PRIVATE KEY") {
        return Err(
            "is a private key, which nobody else may have: give the one that ends in .pub".into(),
        );
    }
    if key.len() > SSH_KEY_LEN_MAX {
        return Err(format!(
            "has {} bytes: use at most {SSH_KEY_LEN_MAX}",
            key.len()
        ));
    }
    let mut words = key.split(' ');
    let kind = words.next().unwrap_or_default();
    let is_kind = ["ssh-", "ecdsa-", "sk-"]
        .iter()
        .any(|begins| kind.starts_with(begins));
    let is_blob = |blob: &str| {
        let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '+' | '/' | '=');
        blob.len() >= 16 && blob.chars().all(allowed)
    };
    match is_kind && words.next().is_some_and(is_blob) && !key.contains(is_no_yaml) {
        true => Ok(()),
        false => Err("is no public key: give one line as in authorized_keys, such as \"ssh-ed25519 AAAA... eve\"".into()),
    }
}

/// Whether readers of YAML refuse a document with this character, or take it for the end of a line: the guest would be told nothing at all.
fn is_no_yaml(character: char) -> bool {
    let is_apart = matches!(character, '\u{2028}' | '\u{2029}' | '\u{fffe}' | '\u{ffff}');
    is_apart || character.is_control()
}

/// Whether others could look it up: letters, digits and inner hyphens, with dots between.
fn is_host_name(text: &str) -> bool {
    let label = |label: &str| {
        let allowed = |b: u8| b.is_ascii_alphanumeric() || b == b'-';
        (1..=LABEL_LEN_MAX).contains(&label.len())
            && label.bytes().all(allowed)
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    text.len() <= HOST_LEN_MAX && text.split('.').all(label)
}

fn parse_address(text: &str) -> Option<(IpAddr, u8)> {
    let (address, length) = text.split_once('/')?;
    let address: IpAddr = address.parse().ok()?;
    let is_number = length.bytes().all(|byte| byte.is_ascii_digit());
    let length = length.parse().ok().filter(|_| is_number)?;
    let most = if address.is_ipv4() { 32 } else { 128 };
    let is_one = !address.is_unspecified() && !address.is_multicast();
    (is_one && (1..=most).contains(&length)).then_some((address, length))
}

impl VmSpec {
    /// What its guest is called in its seed.
    pub fn guest_name(&self) -> String {
        let given = self
            .cloud_init
            .as_ref()
            .and_then(|told| told.hostname.clone());
        given.unwrap_or_else(|| {
            let fits = |c: char| if c == '_' { '-' } else { c };
            let labels = self.name.as_str().split('.');
            let labels = labels.map(|label| label.chars().map(fits).collect::<String>());
            let labels = labels.map(|label| label.trim_matches('-').to_owned());
            let labels: Vec<String> = labels.filter(|label| !label.is_empty()).collect();
            labels.join(".")
        })
    }

    pub(super) fn check_cloud_init(&self) -> Result<(), InvalidVm> {
        let Some(told) = &self.cloud_init else {
            return Ok(());
        };
        let wrong = |why| InvalidVm(format!("cloud_init of VM '{}': {why}", self.name));
        told.check(self.nics.len()).map_err(wrong)
    }

    /// A seed is a disk that older hardware has no place for.
    pub(super) fn check_seed(&self) -> Result<(), InvalidVm> {
        match self.cloud_init.is_some() && self.hardware() < SEED_AND_AGENT {
            false => Ok(()),
            true => Err(InvalidVm(format!(
                "VM '{}' has [cloud_init], which there is from hardware version {SEED_AND_AGENT} on: update Godwit on every host, then set hardware = {SEED_AND_AGENT}",
                self.name
            ))),
        }
    }

    /// The description with the text of the file that it names for cloud-init.
    pub(super) fn with_files_read(
        mut self,
        read: impl FnOnce(&str) -> Result<String, String>,
    ) -> Result<Self, InvalidVm> {
        let Some(told) = &mut self.cloud_init else {
            return Ok(self);
        };
        let Some(file) = told.user_data_file.take() else {
            return Ok(self);
        };
        if told.user_data.is_some() {
            return Err(InvalidVm(
                "cloud_init has both `user_data` and `user_data_file`: give one of them".into(),
            ));
        }
        told.user_data = Some(read(&file).map_err(InvalidVm)?);
        Ok(self)
    }
}

#[cfg(test)]
#[path = "cloud_init_tests.rs"]
mod tests;
