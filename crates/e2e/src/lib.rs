//! Real-QEMU cases: VM processes as they are, on two "hosts" that share nothing but the loopback.
//!
//! The harness plays the agent's part in the plainest way: it starts VM processes, restarts them when they die and
//! carries ownership messages. Checkers come from the testkit and use no product code.
#![forbid(unsafe_code)]

pub mod deaths;
pub mod guests;
pub mod host;
pub mod obedient;
pub mod pair;
pub mod peers;
pub mod person;
pub mod relay;
pub mod small_ram;
pub mod soak;
pub mod stack;
pub mod verdict;

pub use host::Host;
pub use pair::Pair;
