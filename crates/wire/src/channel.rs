//! Which stream a record belongs to and which way it travels.
//!
//! Owns nothing: that an id is never used twice within a migration is the caller's promise, kept by counting sets.

use std::fmt;

/// Index that stands for the control channel of a connection set.
const CONTROL_INDEX: u16 = u16::MAX;
/// Channels for changes of disks have indices from here on.
const CHANGES: u16 = 0x4000;

/// One connection of a migration. The high half counts the connection sets (a channel that is made again gets a new
/// set), the low half numbers the channels of one. Never used twice in one migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ChannelId(pub u32);

impl ChannelId {
    /// The data channel `index` of connection set `set`; `None` for the index reserved for control.
    pub fn data(set: u16, index: u16) -> Option<Self> {
        (index != CONTROL_INDEX).then(|| Self::join(set, index))
    }

    /// The channel `index` for changes of disks of connection set `set`; `None` where there can be no such channel.
    pub fn changes(set: u16, index: u16) -> Option<Self> {
        (index < CHANGES).then(|| Self::join(set, CHANGES + index))
    }

    /// The control channel of connection set `set`.
    pub fn control(set: u16) -> Self {
        Self::join(set, CONTROL_INDEX)
    }

    fn join(set: u16, index: u16) -> Self {
        Self(u32::from(set) << 16 | u32::from(index))
    }

    /// The connection set it belongs to.
    pub fn set(self) -> u16 {
        let [_, _, low, high] = self.0.to_le_bytes();
        u16::from_le_bytes([low, high])
    }

    /// Its number within the connection set.
    pub fn index(self) -> u16 {
        let [low, high, _, _] = self.0.to_le_bytes();
        u16::from_le_bytes([low, high])
    }

    /// Its number among the channels for changes of disks, if it is one.
    pub fn changes_index(self) -> Option<usize> {
        let index = self.index().checked_sub(CHANGES)?;
        (index < CHANGES).then_some(usize::from(index))
    }

    /// Whether it carries control messages and no guest pages.
    pub fn is_control(self) -> bool {
        self.index() == CONTROL_INDEX
    }
}

impl fmt::Display for ChannelId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_control() {
            write!(f, "{}.control", self.set())
        } else {
            write!(f, "{}.{}", self.set(), self.index())
        }
    }
}

/// Who sent a record: each direction of a connection has keys and counters of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Direction {
    /// From the side that connected.
    ClientToServer,
    /// From the side that listened.
    ServerToClient,
}

impl Direction {
    pub(crate) fn code(self) -> u8 {
        match self {
            Self::ClientToServer => 1,
            Self::ServerToClient => 2,
        }
    }
}
