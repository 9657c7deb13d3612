//! Moves of disks: Godwit and QEMU's own block mirror in the same run, on the same volumes and under the same load.
//!
//! A cell ([`plan`]) says what the two volumes are like and what load there is; each run of a system in it is a [`row::Row`].
//! The load comes from the testkit, over the socket that every system serves alike, and the destination is held against its log
//! after a power cut of that volume. Volumes are the testkit's, in memory, of a stated model ([`model`]); what a move takes is
//! set against the bytes that both sides carry over their rate. Everything that is started lies in one machine of the lab and
//! ends with the process. Refuses: to call a move done whose destination it has not compared.

pub mod command;
mod guest;
mod methods;
pub mod model;
pub mod paper;
pub mod picture;
pub mod plan;
pub mod promises;
pub mod row;
mod run;
mod server;
mod sets;
mod site;
pub mod table;
