//! The receiving side: channels that come, and guest memory that fills.
//!
//! `arrivals` are the channels that prove themselves, `channels` those of one connection set and their barrier, `held` is
//! what came behind that, `changes` are the channels of disks, `receiver` is one data channel's thread, `progress` how far it has come, `memory` where its pages
//! go.

mod arrivals;
mod changes;
mod channels;
mod held;
mod memory;
mod progress;
mod receiver;

pub use arrivals::{Arrivals, turn_away};
pub use changes::{ChangeChannels, Disks, TellApplied, tell_on};
pub use channels::{Channels, Shares};
pub use held::Held;
pub use memory::{Memory, empty};
pub use progress::End;
