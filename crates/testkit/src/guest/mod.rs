//! Guests to test with: counters that prove every page, a Linux that serves Redis, and a Debian with PostgreSQL.

pub mod asm;
mod boot_counter;
pub mod boot_disk;
pub mod checker;
pub mod counter;
pub mod cpio;
pub mod debian;
pub mod disk_ledger;
pub mod firmware;
pub mod linux;
pub mod uefi_program;
