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

/// The control channel of a migration: both sides speak the same one, the newest that both know.
pub const MIGRATION: Range = Range { min: 4, max: 7 };

/// From this version of [`MIGRATION`] on the text of the guest's serial console goes along.
pub const MIGRATION_WITH_CONSOLE: u32 = 5;

/// From this version of [`MIGRATION`] on a destination tells at once of changes of disks for which the guest waits, and carries out flushes.
pub const MIGRATION_WITH_AWAITED_CHANGES: u32 = 6;

/// From this version of [`MIGRATION`] on disks go along with their snapshots.
pub const MIGRATION_WITH_SNAPSHOTS: u32 = 7;

/// Header of every request between machines: from which to which version of [`PROTOCOL`] its sender speaks.
pub const PROTOCOL_HEADER: &str = "godwit-protocol";

/// The hardware versions of VMs whose command line this build can make.
pub const HARDWARE: Range = Range { min: 1, max: 3 };

/// Versions of a protocol that somebody speaks, from the oldest to the newest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
pub struct Range {
    pub min: u32,
    pub max: u32,
}

impl Range {
    /// Builds that said nothing of versions speak the first one.
    pub const FIRST: Self = Self { min: 1, max: 1 };

    pub const fn only(version: u32) -> Self {
        let (min, max) = (version, version);
        Self { min, max }
    }

    /// The newest version that both speak.
    pub fn common(self, other: Self) -> Option<u32> {
        let newest = self.max.min(other.max);
        (newest >= self.min && newest >= other.min).then_some(newest)
    }

    /// The text of [`PROTOCOL_HEADER`].
    pub fn header(self) -> String {
        format!("{}-{}", self.min, self.max)
    }

    /// Whether this version is spoken.
    pub fn contains(self, version: u32) -> bool {
        (self.min..=self.max).contains(&version)
    }
}

impl std::str::FromStr for Range {
    type Err = ();

    /// As [`Range::header`] writes it.
    fn from_str(text: &str) -> Result<Self, ()> {
        let (min, max) = text.split_once('-').ok_or(())?;
        let number = |text: &str| text.parse::<u32>().map_err(|_| ());
        let (min, max) = (number(min)?, number(max)?);
        (min <= max).then_some(Self { min, max }).ok_or(())
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
    /// What this build speaks.
    pub const fn here() -> Self {
        Self {
            protocol: PROTOCOL,
            migration: MIGRATION,
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

/// A program that runs: its version, and what it speaks.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
pub struct Build {
    pub version: String,
    #[serde(default)]
    pub speaks: Speaks,
}

impl Build {
    pub fn here() -> Self {
        Self {
            // Kept as a text in the program, where a person finds it, as does the test that makes an older one of it.
            version: std::hint::black_box(VERSION).into(),
            speaks: Speaks::here(),
        }
    }
}

/// Why two builds cannot migrate a VM between them, if they cannot: `source` is its VM process on `from`.
pub fn cannot_migrate(
    from: &HostName,
    source: &Build,
    to: &HostName,
    there: &Build,
) -> Option<String> {
    if source
        .speaks
        .migration
        .common(there.speaks.migration)
        .is_some()
    {
        return None;
    }
    let way_out = match source.speaks.migration.max < there.speaks.migration.min {
        true => format!(
            "install Godwit {} on host {from} and run 'godwit vm renew'",
            there.version
        ),
        false => format!("install Godwit {} on host {to}", source.version),
    };
    Some(format!(
        "the VM process on host {from}, Godwit {}, speaks migration protocol {}, and host {to}, Godwit {}, speaks {}: {way_out}",
        source.version, source.speaks.migration, there.version, there.speaks.migration
    ))
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
    fn a_header_is_read_as_it_is_written() {
        let range = Range { min: 2, max: 13 };
        assert_eq!(range.header().parse(), Ok(range));
        for bad in ["", "1", "2-1", "-1-2", "1-x", "1-2-3"] {
            assert_eq!(bad.parse::<Range>(), Err(()), "{bad}");
        }
    }

    #[test]
    fn a_source_that_is_too_old_is_renewed_and_a_destination_is_updated() {
        let [a, b] = ["a", "b"].map(|name| HostName::new(name).unwrap());
        let build = |version: &str, min, max| Build {
            version: version.into(),
            speaks: Speaks {
                migration: Range { min, max },
                ..Speaks::here()
            },
        };
        let said = |source, there| cannot_migrate(&a, &source, &b, &there);
        assert_eq!(said(build("1", 4, 5), build("2", 5, 6)), None);
        let old_source = said(build("1", 4, 5), build("3", 6, 7)).unwrap();
        assert!(
            old_source.contains("install Godwit 3 on host a and run 'godwit vm renew'"),
            "{old_source}"
        );
        let old_there = said(build("3", 6, 7), build("1", 4, 5)).unwrap();
        assert!(
            old_there.contains("install Godwit 3 on host b"),
            "{old_there}"
        );
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
