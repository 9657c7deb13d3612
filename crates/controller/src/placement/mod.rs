//! Where VMs go: the choice of a host for a start, what a move there would cost, and the emptying of hosts.
//!
//! `place` chooses by what hosts say of themselves and is pure, as `written` is, which knows where a start loses nothing; `forecast` asks hosts to measure and predicts; `drain`
//! moves VMs away from a host that is being emptied. Owns nothing: which hosts are being emptied and what was measured
//! lie in `drains` and `measured`, below all of these. Refuses: to move a VM by itself without a drain.

pub mod drain;
pub mod forecast;
pub mod place;
pub mod written;
