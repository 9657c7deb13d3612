//! Test hosts, guests, load and checkers.
//!
//! Nothing here uses the product's code, so that what checks the product cannot share its mistakes, and
//! nothing of the product links this crate.

pub mod disk_load;
pub mod file_system;
pub mod guest;
pub mod interrupt;
pub mod lab;
pub mod link;
pub mod load;
pub mod page;
pub mod qemu;
pub mod qmp;
pub mod report;
pub mod stage;
pub mod testvol;
pub mod touch;
