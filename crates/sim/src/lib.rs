//! A deterministic simulator of hosts, disks, processes, QEMUs and a network around the real ownership core.
//!
//! One seed is one world: three hosts, a controller, an operator and one VM that moves back and forth while
//! everything that can fail fails. First safety with all faults, then everything heals and liveness is
//! required. Invariants are checked after every step ([`check`](World::check)). Same seed, same run: there is
//! no clock, no thread and no randomness but the seed's. Refuses: to pass a seed that broke an invariant.
//!
//! What is modelled: records that are readable before they are durable; processes killed between any two
//! actions; a guest whose memory has a version, so that running stale state is seen; messages lost, doubled,
//! delayed and reordered; grants, surveys and a controller restored from an old database.
#![forbid(unsafe_code)]

mod actions;
mod check;
mod control;
mod coverage;
mod faults;
mod model;
mod rng;
mod run;
pub mod site;
mod streams;
mod world;

pub use coverage::Coverage;
pub use faults::Fault;
pub use run::{Options, Outcome, PlantName, run_seed};
pub use world::World;
