//! The source's side of a migration.
//!
//! `driver` runs it, `precopy` is its iterations, `connections` a set of channels, `sender` one channel's thread, `pass`
//! the work they share, `routes` the ways to the destination, `ending` that nobody wants them any more, `hearing` what the
//! destination says, `events` what a set tells, `gauge` what the choice of streams looks at, `outgoing` what the whole
//! host sends.

pub(crate) mod connections;
pub(crate) mod driver;
mod ending;
mod events;
mod gauge;
mod hearing;
mod outgoing;
mod pass;
mod precopy;
pub(crate) mod routes;
mod sender;
mod unacked;
