//! Guests to test with: counters that prove every page, a Linux that serves Redis, and a Debian with PostgreSQL.
//!
//! Owns nothing: whoever starts a guest owns its QEMU, its memory and its disks. Refuses: a guest whose image was not made.

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
