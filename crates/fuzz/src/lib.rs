//! Fuzzing of every decoder that reads what somebody else wrote, on stable Rust and the same each time.
//!
//! One table ([`targets::all`]) names the decoders. Each has seeds made from valid input; [`mutate`] damages them, and
//! an input that reaches an outcome not seen before (another error, another kind of message) joins the corpus: coverage
//! by what a decoder says instead of by instrumentation. A target panics when something is accepted that must not be;
//! [`engine`] catches that, makes the input smaller and keeps it. A canary with a planted bug shows that all this finds
//! anything at all.
//!
//! Owns the files below its work directory. Refuses: real randomness (the seed is an argument), so that a finding is
//! there again tomorrow. Not seen from here: races, and memory that is reserved but below [`engine::GROWTH_MAX_MIB`].
#![forbid(unsafe_code)]

pub mod engine;
pub mod mutate;
pub mod outcome;
pub mod rng;
pub mod targets;
