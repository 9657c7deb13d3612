//! Everything that talks to an unmodified QEMU.
//!
//! Starts it as an unprivileged, sandboxed process with the guest stopped; takes it over after a restart; speaks its
//! machine protocol; saves and loads device state; slows its vCPUs; makes its taps and opens its disks; learns its guest's
//! addresses and announces it on the network.
//! Synchronous, on plain threads; every wait has a deadline. Refuses direct disk IO, balloons and whatever else would
//! make guest memory change unseen. Knows nothing of migration streams or of guest memory.

pub mod accel;
pub mod allowance;
pub mod announce;
mod bounds;
pub mod command_line;
pub mod console;
mod convert;
pub mod described;
pub mod device;
pub mod device_state;
pub mod disk;
pub mod disk_place;
pub mod freezing;
pub mod group;
pub mod guest_agent;
pub mod holding;
pub mod inherited;
pub mod launch;
pub mod layered;
pub mod machine;
pub mod make_disk;
pub mod mounted;
pub mod neighbours;
mod no_network;
pub mod on_ram;
mod only_files;
pub mod packet;
pub mod parent;
pub mod privileges;
pub mod process;
pub mod program;
pub mod qcow2;
pub mod qmp;
pub mod rate;
pub mod reserved;
pub mod rights;
pub mod save_gate;
pub mod scope;
pub mod seed;
mod seen;
pub mod stderr_log;
pub mod strays;
mod sync;
pub mod tap;
mod tap_guard;
mod text;
pub mod throttle;
pub mod trial;
pub mod uefi;
pub mod user;
pub mod voice;
mod whose;
