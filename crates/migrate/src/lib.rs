//! The pure core of live migration: what is said, when to stop, and how it is accounted for.
//!
//! No sockets, files, clock or threads: the VM process drives it and the tests do too. Refuses: to decide who may run
//! the VM, which is crate `ownership`'s business alone.
#![forbid(unsafe_code)]

pub mod account;
pub mod addresses;
pub mod admission;
pub mod convergence;
pub mod curve;
pub mod governor;
pub mod ledger;
pub mod pause;
pub mod predict;
pub mod protocol;
pub mod rate;
pub mod records;
pub mod streams;
pub mod why;
