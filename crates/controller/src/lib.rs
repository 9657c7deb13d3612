//! The controller: inventory, placement, and the recording of who may take which VM, for people and scripts.
//!
//! Owns the database, the CA and what hosts said last. It is not on the switchover path: hosts hand a VM over between
//! themselves, and this learns from them where each VM is, also after it was away. Refuses: to command anything by
//! itself; to grant a generation that is not above every one ever seen; to keep or log a migration's secret.
#![forbid(unsafe_code)]

mod api;
mod app;
mod audit;
mod bounds;
mod certificates;
mod certificates_store;
mod config;
mod console;
mod drains;
mod error;
mod former;
mod hosts;
mod macs;
mod measured;
mod metrics;
mod migrate;
mod moving;
mod operators;
mod placement;
mod preflight;
mod reconcile;
mod removed;
mod resolve;
mod run;
mod secret;
mod site;
mod site_store;
mod state;
mod store;
mod survey;
mod taken_over;
mod takeover;
mod turns;
mod typists;
mod uids;
mod unread;
mod vms;
mod watch;

pub use api::openapi;
pub use config::ControllerConfig;
pub use error::ControllerError;
pub use run::{Controller, Initialised, init, run};
