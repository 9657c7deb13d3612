//! The bench: Godwit and QEMU's own migration in the same run, on the same guests, between the same two test hosts.
//!
//! Cells to measure are data (`cells.toml`, read by [`plan`]); each run of a system in a cell is a [`row::Row`]; medians are made
//! from rows alone ([`group`]), ratios and targets from these ([`judge`]), and so are the page and the pictures. Everything
//! that is started lies in a lab that ends with the process. It uses no product code: it drives the product by its command line, QEMU by
//! its control socket, and measures all systems from outside in the same way. Refuses: to call anything equal that it
//! has not compared.
#![forbid(unsafe_code)]

pub mod at_once;
pub mod bench;
pub mod cancelled;
pub mod client;
pub mod courses;
pub mod deltas;
pub mod estimate;
pub mod godwit;
pub mod group;
pub mod guest;
pub mod judge;
pub mod limits;
pub mod machine;
pub mod memory;
pub mod peer;
pub mod picture;
pub mod plan;
pub mod promises;
pub mod row;
pub mod stage;
pub mod storage;
pub mod system;
pub mod table;
pub mod tls;
pub mod usage;
