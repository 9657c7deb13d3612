//! One seed from its first to its last step.
//!
//! Phase 1: the VM is created and moved about under faults. Phase 2: all heals, and the VM must run exactly
//! once, nobody in doubt. Phase 3: one more migration, without faults, must complete.

use crate::coverage::Coverage;
use crate::model::{HOSTS, Happening};
use crate::world::World;
use godwit_ownership::{Action, Event, HostRecord, Qemu, RecordError, VmCore};
use godwit_types::HostName;

/// Length of the faulty phase, in simulated milliseconds.
const FAULTY_MS: u64 = 12_000;
/// How long healing may take.
const HEALING_MS: u64 = 40_000;
/// How long the last migration may take.
const LAST_MOVE_MS: u64 = 3_000;

/// The name of a planted fault, if this build can plant any.
#[cfg(feature = "planted-faults")]
pub type PlantName = Option<godwit_ownership::plant::Plant>;
/// The name of a planted fault, if this build can plant any.
#[cfg(not(feature = "planted-faults"))]
pub type PlantName = Option<std::convert::Infallible>;

#[derive(Debug, Clone, Copy, Default)]
pub struct Options {
    /// A fault planted into every core.
    pub plant: PlantName,
    /// Keep a readable trace.
    pub trace: bool,
}

/// How a seed went.
#[derive(Debug)]
pub struct Outcome {
    /// The invariant that broke, if one did.
    pub violation: Option<String>,
    pub coverage: Coverage,
    /// Equal for equal runs.
    pub fingerprint: u64,
    /// The trace, if asked for.
    pub trace: Vec<String>,
}

pub fn run_seed(seed: u64, options: Options) -> Outcome {
    let Some(mut world) = World::new(seed, options.plant, options.trace) else {
        return Outcome {
            violation: Some("the world could not be made".to_owned()),
            coverage: Coverage::default(),
            fingerprint: 0,
            trace: Vec::new(),
        };
    };
    live(&mut world);
    Outcome {
        violation: world.violation.take(),
        fingerprint: world.fingerprint(),
        trace: world.take_trace(),
        coverage: world.coverage,
    }
}

fn live(world: &mut World) {
    create(world);
    world.is_faulty = true;
    world.after(1, Happening::ControllerTick);
    let end = world.now + FAULTY_MS;
    world.run_until(end);
    if world.violation.is_none() {
        heal(world);
    }
    if world.violation.is_none() {
        last_move(world);
    }
}

fn create(world: &mut World) {
    world.survey();
    world.run_until(100);
    world.command_everywhere(&Event::StartRequested);
    world.run_until(200);
}

fn heal(world: &mut World) {
    world.heal();
    let end = world.now + HEALING_MS;
    let mut found = Err("not healed".to_owned());
    while world.now < end && world.violation.is_none() {
        let next = world.now + 1000;
        world.run_until(next);
        if world.nobody_holds() {
            world.survey();
        }
        found = world.settled().map(|_| ());
        // Everything that was delayed is to arrive before the verdict.
        if found.is_ok() && world.now + HEALING_MS >= end + 10_000 {
            return;
        }
    }
    if let Err(what) = found {
        world.violated(what);
    }
}

fn last_move(world: &mut World) {
    let Ok(from) = world.settled() else {
        world.violated("not settled".to_owned());
        return;
    };
    let to = (from + 1) % HOSTS;
    world.begin(from, to);
    let end = world.now + LAST_MOVE_MS;
    world.run_until(end);
    match world.settled() {
        Ok(host) if host == to => {}
        Ok(host) => {
            let what = format!(
                "a migration without faults left the VM at {}",
                world.name(host)
            );
            world.violated(what);
        }
        Err(what) => world.violated(what),
    }
}

/// A core for a new process, with the fault that this run plants.
#[cfg(feature = "planted-faults")]
pub(crate) fn recover(
    record: HostRecord,
    host: HostName,
    qemu: Qemu,
    plant: PlantName,
) -> Result<(VmCore, Vec<Action>), RecordError> {
    VmCore::recover_planted(record, host, qemu, plant)
}

/// A core for a new process.
#[cfg(not(feature = "planted-faults"))]
pub(crate) fn recover(
    record: HostRecord,
    host: HostName,
    qemu: Qemu,
    _plant: PlantName,
) -> Result<(VmCore, Vec<Action>), RecordError> {
    VmCore::recover(record, host, qemu)
}
