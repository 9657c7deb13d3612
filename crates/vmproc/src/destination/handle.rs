//! The destination's driver as the VM's thread holds it: what it is made of, what it is told, how it is ended.
//!
//! Owns the driver's thread. Refuses nothing: a command that comes too late is nobody's loss.

use super::driver::DestinationDriver;
use crate::input::Tell;
use crate::shared_report::SharedReport;
use crate::variables::Arriving;
use godwit_qemu::device_state::Incoming as DeviceStream;
use godwit_qemu::machine::Machine;
use godwit_streams::ControlSlot;
use godwit_streams::destination::{Arrivals, Disks, Memory};
use godwit_types::{ApiError, Generation};
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;

/// Writes down that all disks are here.
pub(crate) type KeepDisks = Box<dyn Fn(Generation) -> Result<(), ApiError> + Send>;

/// Hears that the source is connected, before anything of its disks is taken.
pub(crate) type BeginDisks = Box<dyn Fn() -> Result<(), ApiError> + Send>;

/// Hears of the disk at this place what it consists of, or, without that, that all below its top was sent; makes a place for it, or makes it durable.
pub(crate) type TakeLayers = Box<dyn Fn(u8, Option<&str>) -> Result<(), String> + Send>;

/// A QEMU that waits for its device state.
#[derive(Debug)]
pub(crate) struct WaitingQemu {
    pub machine: Arc<Machine>,
    pub stream: DeviceStream,
}

/// What the VM's thread tells the driver.
#[derive(Debug)]
pub(crate) enum Command {
    /// The migration is over here.
    End,
    /// The guest runs here: when the source closes the channels, that is the end and no loss.
    Linger,
}

/// What a driver is made of.
pub(crate) struct DestinationParts {
    pub arrivals: Arrivals,
    pub memory: Arc<Memory>,
    pub disks: Disks,
    /// Writes down that something of the disks may be here.
    pub begin_disks: BeginDisks,
    /// Writes down that all disks are here, for who holds the VM under this generation.
    pub keep_disks: KeepDisks,
    pub take_layers: TakeLayers,
    pub qemu: WaitingQemu,
    pub report: SharedReport,
    pub control: ControlSlot,
    /// Of a guest with UEFI.
    pub variables: Option<Arriving>,
    /// Allocate all of the guest's memory before anything comes.
    pub prepare: bool,
    pub cores: usize,
    pub news: Tell,
}

/// The running driver, as the VM's thread holds it.
#[derive(Debug)]
pub(crate) struct DestinationHandle {
    commands: Sender<Command>,
    thread: JoinHandle<()>,
}

impl DestinationHandle {
    /// Lets the driver wait for its source.
    pub(crate) fn start(parts: DestinationParts) -> std::io::Result<Self> {
        let (commands, received) = channel();
        let driver = DestinationDriver::new(parts, received);
        let thread = std::thread::Builder::new()
            .name("destination".into())
            .spawn(move || driver.run())?;
        Ok(Self { commands, thread })
    }

    /// The guest runs here; the driver ends when the source closes the channels.
    pub(crate) fn linger(&self) {
        let _ = self.commands.send(Command::Linger);
    }

    /// Ends the driver and waits until nothing writes guest memory any more.
    pub(crate) fn end(self) {
        let _ = self.commands.send(Command::End);
        // A panic ends the process anyway.
        let _ = self.thread.join();
    }
}
