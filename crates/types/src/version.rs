//! Which versions of Godwit speak with each other, and how two find out.
//!
//! Pure. Refuses: two ranges without a number in common.

use crate::ids::HostName;
use serde::{Deserialize, Serialize};
use std::fmt;
use utoipa::ToSchema;

/// The version of this build.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// What machines and processes say to each other outside of a migration's control channel: raised with every word whose
/// meaning changes, or that must not be overlooked.
pub const PROTOCOL: Range = Range { min: 1, max: 1 };

/// The hardware versions of VMs whose command line this build can make.
pub const HARDWARE: Range = Range { min: 1, max: 1 };

/// Versions of a protocol that somebody speaks, from the oldest to the newest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
pub struct Range {
    /// The oldest.
    pub min: u32,
    /// The newest.
    pub max: u32,
}

impl Range {
    /// Builds that said nothing of versions speak the first one.
    pub const FIRST: Self = Self { min: 1, max: 1 };

    /// One version alone.
    pub const fn only(version: u32) -> Self {
        let (min, max) = (version, version);
        Self { min, max }
    }

    /// The newest version that both speak.
    pub fn common(self, other: Self) -> Option<u32> {
        let newest = self.max.min(other.max);
        (newest >= self.min && newest >= other.min).then_some(newest)
    }

    /// Whether this version is spoken.
    pub fn contains(self, version: u32) -> bool {
        (self.min..=self.max).contains(&version)
    }
}

impl fmt::Display for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.min == self.max {
            true => write!(f, "{}", self.max),
            false => write!(f, "{} to {}", self.min, self.max),
        }
    }
}

/// What a build says of itself, in every status.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
pub struct Speaks {
    /// Its messages to other machines and processes.
    pub protocol: Range,
    /// The control channel of its migrations.
    pub migration: Range,
    /// The hardware versions of VMs that it runs.
    pub hardware: Range,
}

impl Speaks {
    /// This build, whose migrations have these versions.
    pub fn here(migration: Range) -> Self {
        Self {
            protocol: PROTOCOL,
            migration,
            hardware: HARDWARE,
        }
    }
}

impl Default for Speaks {
    /// A build that said nothing: all its versions are those before any was said.
    fn default() -> Self {
        Self {
            protocol: Range::FIRST,
            migration: Range::only(4),
            hardware: Range::FIRST,
        }
    }
}

/// Why this build and a host's do not work together, if they do not.
pub fn stranger(host: &HostName, version: &str, theirs: Range) -> Option<String> {
    if PROTOCOL.common(theirs).is_some() {
        return None;
    }
    let older = match theirs.max < PROTOCOL.min {
        true => format!("install Godwit {VERSION} on host {host}"),
        false => "update the controller first".to_owned(),
    };
    Some(format!(
        "host {host} runs Godwit {version}, which speaks protocol {theirs}, and this controller, Godwit {VERSION}, speaks {PROTOCOL}: {older}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_version_that_both_speak_is_agreed_on() {
        let range = |min, max| Range { min, max };
        assert_eq!(range(1, 3).common(range(2, 5)), Some(3));
        assert_eq!(range(2, 5).common(range(1, 3)), Some(3));
        assert_eq!(range(1, 1).common(range(2, 5)), None);
        assert_eq!(range(4, 5).common(range(2, 3)), None);
    }

    #[test]
    fn who_is_too_old_is_told_what_to_install() {
        let host = HostName::new("b").unwrap();
        let why = |range| stranger(&host, "9", range);
        assert_eq!(why(PROTOCOL), None);
        let newer = why(Range { min: 8, max: 9 }).unwrap();
        assert!(newer.contains("protocol 8 to 9") && newer.contains("update the controller"));
        let older = why(Range { min: 0, max: 0 }).unwrap();
        assert!(older.contains("on host b"), "{older}");
    }
}
