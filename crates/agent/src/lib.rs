//! The host agent: supervises this host's VM processes and serves the controller, other hosts and local people.
//!
//! Owns the supervision of VM processes (never the VMs), this host's configuration and its sockets. Refuses: to run
//! or move a VM itself; to decide who may run a VM; any caller whose certificate does not allow the call.
#![deny(unsafe_code)]

mod addresses;
mod agent;
mod answers;
mod api;
mod backoff;
mod boot;
mod boot_cases;
mod cancelled;
mod carrying;
mod check;
mod check_datastores;
mod check_groups;
mod check_host;
mod check_network;
mod check_qemu;
mod check_users;
mod closing;
mod closing_agent;
mod closing_alone;
pub mod config;
mod crowd;
mod crypto;
mod datastore_rooms;
mod datastores;
mod deleting;
mod disk_record;
mod evidence;
mod harden;
mod images;
mod keeping;
mod launch;
mod life;
mod link;
mod link_ways;
mod load;
mod looking;
mod making;
mod manager;
mod measure;
mod memory;
mod migrations;
mod pause;
mod preflight;
mod probe;
mod qemu_facts;
mod qemu_now;
mod qemu_trial;
mod records;
mod removed;
mod renew;
mod renewal;
mod reports;
mod resolve;
mod run;
mod scope;
mod seen;
mod site;
mod supervisor;
mod surveys;
#[allow(unsafe_code)]
mod sys;
mod system;
#[cfg(test)]
mod test_support;
mod users;
#[cfg(test)]
mod versions_tests;
mod vm_client;

pub use closing_alone::close_without_agent;
pub use harden::{harden, keep_memory_private};
pub use launch::{VM_PROCESS_FAILED, VmProgram};
pub use manager::host_is_shutting_down;
pub use run::{AgentError, check, on_record, run};
