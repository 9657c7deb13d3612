//! Identifiers and the generation number: small values that must never be mixed up.
//!
//! Owns nothing. Refuses: names that could escape a directory, a shell or a log line.

use serde::{Deserialize, Serialize};
use std::fmt;

/// Longest name of a VM, host or port group, in bytes.
pub const NAME_LEN_MAX: usize = 63;

/// Why a name or an identifier was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "'{}' is not a valid name: use 1 to 63 of a-z, A-Z, 0-9, '-', '_' and '.', beginning with a letter or digit",
    shown(.0)
)]
pub struct InvalidName(pub String);

/// As much of what is no name as a name may have, without what would begin a line or move a terminal's cursor.
fn shown(text: &str) -> String {
    let mut shown: String = text
        .chars()
        .take(NAME_LEN_MAX)
        .flat_map(char::escape_debug)
        .collect();
    if text.chars().nth(NAME_LEN_MAX).is_some() {
        shown.push_str("...");
    }
    shown
}

/// Whether `text` may be used as a name: it ends up in paths, unit names and log lines.
pub fn is_valid_name(text: &str) -> bool {
    let bytes = text.as_bytes();
    bytes.first().is_some_and(u8::is_ascii_alphanumeric)
        && bytes.len() <= NAME_LEN_MAX
        && bytes
            .iter()
            .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
}

macro_rules! name_type {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(String);

        impl $name {
            /// Checks and wraps a name.
            pub fn new(text: impl Into<String>) -> Result<Self, InvalidName> {
                let text = text.into();
                if is_valid_name(&text) { Ok(Self(text)) } else { Err(InvalidName(text)) }
            }

            /// The name as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl TryFrom<String> for $name {
            type Error = InvalidName;
            fn try_from(text: String) -> Result<Self, InvalidName> {
                Self::new(text)
            }
        }

        impl From<$name> for String {
            fn from(name: $name) -> String {
                name.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl std::str::FromStr for $name {
            type Err = InvalidName;
            fn from_str(text: &str) -> Result<Self, InvalidName> {
                Self::new(text)
            }
        }
    };
}

name_type!(
    /// A VM's name, unique in one controller and stable over its life; also its directory's name on a host.
    VmName
);
name_type!(
    /// A host's name, unique in one controller.
    HostName
);
name_type!(
    /// A port group: the name under which hosts offer a bridge to VMs.
    PortGroup
);
name_type!(
    /// A datastore: a place for disks, by this name on each host that has it.
    DatastoreName
);
name_type!(
    /// One migration, the same text on both hosts and at the controller.
    MigrationId
);
name_type!(
    /// A snapshot of a VM's disks, unique in the VM.
    SnapshotName
);

/// How often the right to run a VM has changed hands. Generation 1 is made when the VM is created;
/// every handover adds one, and no host ever goes back.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, Default,
)]
#[serde(transparent)]
pub struct Generation(pub u64);

impl Generation {
    /// The generation after this one; `None` when the counter is exhausted.
    pub fn next(self) -> Option<Self> {
        self.0.checked_add(1).map(Self)
    }
}

impl fmt::Display for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}
