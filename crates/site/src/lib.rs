//! Who may hold which VM, on a whole site: what the controller knows and grants, and what a host does before it boots
//! what nobody asked it to boot.
//!
//! Pure: no file, socket, clock or thread. The controller owns a [`Book`], each agent a [`HostSite`]; the simulator links
//! both. Crate `ownership` decides for one VM at one host; this crate decides what is said to those hosts, and what their
//! answers mean together. Refuses: a grant without a survey ([`Free`] is made by nothing else), to take silence for a no,
//! and to let a restored controller or a host's old copy act on what they remember.
//!
//! # The rules
//!
//! 1. **May-hold set.** Each VM has the set of hosts that may hold it. A host enters it, durably, before it is named in a
//!    grant or in a migration's permission. It leaves by its own durable no to a survey that began afterwards, or by a
//!    person's word that it is off, together with the grant that this word made possible.
//! 2. **A no binds.** A survey has a level above every generation that was ever granted. A host that holds nothing makes
//!    the level durable before it answers, and from then on refuses every grant and permission at or below it.
//! 3. **A grant follows a survey** of every member of the set, and expects the level of that survey: one that was
//!    overtaken by another is void.
//! 4. **Silence is not a no.** A member that does not answer makes the VM unreachable, never stopped.
//! 5. **The order of words.** Each word of a controller has a stamp, an epoch and a number. Hosts keep the highest and
//!    refuse lower ones. A controller that meets a higher one than its own works on an old copy of its database: it grants
//!    nothing until every host that it knows or that any record names was read whole or fenced, then takes a new epoch.
//! 6. **Boot.** A host that would boot a VM that no request asked for asks first, and hears out a controller that answers.
//!    Without one, an answer that is at least as new as what it knows itself of that VM is enough, or the answers of all
//!    hosts that it knows.
//! 7. **Lives.** A host that acknowledged a word and does not know it later stands on an old copy of its disk; another
//!    machine than the table names is a clone. Neither's no counts.
//! 8. **What hosts tell is bounded**: epochs, numbers and generations far beyond all that was said are not believed, nor
//!    hosts that were never enrolled, but by a controller on an old copy, and by that one not without number.
//!
//! # What is not promised
//!
//! While the controller is away, a host whose disk went back to an old copy, or that was truly said to be off, boots what
//! its record says if all the neighbours that answer it missed everything since. A person's false word ("that host is off") can let a VM run twice until
//! that host is heard; it is shown then.
#![forbid(unsafe_code)]

mod answer;
mod book;
mod boot;
mod claim;
mod gift;
mod grant;
mod hear;
mod images;
mod machines;
pub mod plant;
mod refusal;
mod resolve;
mod show;
mod strangers;
mod takeover;
mod unwritten;

pub use book::{Book, Entry, Granted, HostRow, NotBegun, Ran, Row};
pub use boot::{Answerer, HostSite, Judged, LONE_HOST_WAITS_S, Stale};
pub use claim::claim_of;
pub use gift::{KeptGift, SinceGift};
pub use grant::{Deletion, Free, Grant, Permission, Survey, Surveyed};
pub use hear::{Heard, News, Ticket};
pub use refusal::Refusal;
pub use show::{Copy, Twice, Whereabouts};
pub use strangers::Names;
pub use takeover::Takeover;
pub use unwritten::Batch;
