//! The sending side: a set of channels, and what is sent on them.
//!
//! `connections` is the set, `maker` makes its channels, `sender` is one channel's thread, `pass` the work they share,
//! `changes` what disks send, `change_lanes` the channels for that and `awaited` what a guest waits for, `unacked` what may have to be sent again, `routes` the ways to the destination, `ending` that nobody wants them any
//! more, `hearing` what the destination says, `events` what a set tells its driver, `gauge` what the choice of streams
//! looks at, `outgoing` what the whole host sends.

mod awaited;
mod change_lanes;
mod changes;
mod connections;
mod ending;
mod events;
mod gauge;
mod hearing;
mod maker;
mod outgoing;
mod pass;
mod routes;
mod sender;
mod unacked;

pub use changes::Changes;
pub use connections::{ConnectionSet, SetPlan, extents};
pub use ending::Ending;
pub use events::{FromPeer, Happened, SetEvent, TellDriver};
pub use hearing::Seat;
pub use pass::Pass;
pub use routes::{Reached, Route, reach, routes};
pub use sender::{PassEnd, PassFigures, SendError};
