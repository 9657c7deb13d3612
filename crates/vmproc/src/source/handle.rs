//! The source's driver as the VM's thread holds it: what it is made of, what it is told, how it is ended.
//!
//! Owns the driver's thread. Refuses nothing: a command that comes too late is nobody's loss.

use super::driver::SourceDriver;
use super::steps::DriverInput;
use crate::console::Console;
use crate::disks::SourceDisks;
use crate::input::Tell;
use crate::shared_report::SharedReport;
use godwit_guestmem::{DirtyTracker, RamFile};
use godwit_migrate::protocol::ToDestination;
use godwit_qemu::allowance::SharedThrottle;
use godwit_qemu::machine::Machine;
use godwit_qemu::neighbours::Neighbours;
use godwit_qemu::save_gate::SaveGate;
use godwit_streams::ControlSlot;
use godwit_streams::source::{Ending, Route, TellDriver};
use godwit_types::{Generation, HostName};
use godwit_wire::Spec;
use std::fs::File;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};

/// What the VM's thread tells the driver.
#[derive(Debug)]
pub(crate) enum Command {
    /// The guest is stopped: send what is left.
    LastPages { attempt: Generation },
    /// Send the device state.
    DeviceState { attempt: Generation },
    /// The switchover is called off: leave the guest alone and wait for `GoOn` or `End`.
    CalledOff,
    /// After a switchover that was called off the guest runs again: go on, with new channels.
    GoOn,
    /// The migration is over here. If it is no success, this is what the destination is told, which may have heard it.
    End { abort: Option<ToDestination> },
}

/// Everything that a migration's source needs.
pub(crate) struct SourceParts {
    pub spec: Arc<Spec>,
    /// The version of the control channel.
    pub protocol: u32,
    pub routes: Vec<Route>,
    /// This host and the other one.
    pub hosts: [HostName; 2],
    pub ram: Arc<RamFile>,
    pub machine: Arc<Machine>,
    pub console: Arc<Console>,
    pub tracker: DirtyTracker,
    pub throttle: SharedThrottle,
    /// Whom the destination tells where the guest is.
    pub neighbours: Neighbours,
    pub save_gate: SaveGate,
    /// Of a guest with UEFI.
    pub variables: Option<Arc<File>>,
    pub report: SharedReport,
    /// Those that go along, if any do.
    pub disks: Option<SourceDisks>,
    /// Wait until the destination has allocated all of the guest's memory.
    pub prepare: bool,
    pub max_downtime_ms: u64,
    pub deadline_s: Option<u64>,
    pub cap_bytes_per_s: Option<f64>,
    /// Where a new set's control channel is put, so that the VM's thread can send on it.
    pub control: ControlSlot,
    pub news: Tell,
}

/// Tells the running driver what the VM's thread wants; only [`SourceHandle::end`] waits for it.
#[derive(Debug)]
pub(crate) struct SourceHandle {
    inputs: Sender<DriverInput>,
    ending: Ending,
    thread: std::thread::JoinHandle<()>,
}

impl SourceHandle {
    /// Lets the driver connect and copy.
    pub(crate) fn start(parts: SourceParts) -> std::io::Result<Self> {
        let (inputs, received) = channel();
        let ending = Ending::default();
        let (own, ended) = (inputs.clone(), ending.clone());
        let own: TellDriver = Arc::new(move |event| own.send(DriverInput::Set(event)).is_ok());
        let run = move || SourceDriver::new(parts, own, received, ended).run();
        let thread = std::thread::Builder::new()
            .name("source".into())
            .spawn(run)?;
        Ok(Self {
            inputs,
            ending,
            thread,
        })
    }

    /// Gives a command; one that comes too late is nobody's loss.
    pub(crate) fn command(&self, command: Command) {
        let _ = self.inputs.send(DriverInput::Command(command));
    }

    /// Ends the driver and waits until tracking is off.
    pub(crate) fn end(self, abort: Option<ToDestination>) {
        self.command(Command::End {
            abort: abort.clone(),
        });
        // Whoever sees this finds the command.
        self.ending.raise(abort);
        // A panic ends the process anyway.
        let _ = self.thread.join();
    }
}
