//! A deterministic simulator of a whole site around the code that ships: `godwit-site`'s book and hosts, and an
//! ownership core per VM and host.
//!
//! One seed is one world: three to five hosts, one to four VMs (40 in one of a hundred), one controller or two, people.
//! Everything that can fail fails; then all heals, people do what they are shown, and each VM must run exactly once.
//! Refuses: to pass a seed that broke an invariant. What is exempt is counted, by its ground.

mod along;
mod came;
mod check;
mod controller;
mod copies;
mod coverage;
mod disk_plant;
mod faults;
mod host;
mod images;
mod jobs;
mod lies;
mod migrate;
mod model;
mod moves;
mod own_disk;
mod own_files;
mod own_notes;
mod people;
mod process;
mod run;
mod second;
mod told;
mod world;

pub use coverage::{DiskCase, SiteCoverage};
pub use disk_plant::DiskPlant;
pub use faults::SiteFault;
pub use model::Exempt;
pub use run::{SiteOptions, SiteOutcome, SitePlant, run_site_seed};
