//! Disks over one common image: ours, and QEMU's qcow2 overlays with large clusters and with small parts of them, in the same run.
//!
//! A cell ([`plan`]) says how many disks there are, what their load writes and in which order; each run of a system in it is a [`row::Row`]: how fast it was,
//! how many bytes the kernel was given to write for those that the load wrote, and how much room they take. The load is the testkit's, over the socket
//! that both serve alike, and a fifth of it reads and compares. All lies on the machine's own storage. Refuses: to count a run that read anything wrong.

pub mod command;
mod plan;
mod row;
mod run;
mod server;
mod table;
