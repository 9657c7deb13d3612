//! How the source comes to its channels: at the start, and again after each link that was lost.
//!
//! Works on the driver's state. Refuses: to go on trying where the destination refuses this migration at the start.

use super::driver::{BARRIER_WAIT, Halt, SourceDriver, halt_of};
use godwit_migrate::protocol::ToSource;
use godwit_streams::source::{ConnectionSet, SetPlan, extents};
use godwit_transport::TransportError;
use godwit_types::migration::{not_reached, with_ways};
use std::time::{Duration, Instant};

/// For how long a lost link is tried again.
const RECONNECT_FOR: Duration = Duration::from_secs(60);
/// Pause between two tries.
const RECONNECT_PAUSE: Duration = Duration::from_secs(1);

impl SourceDriver {
    /// Makes a connection set. A link that is away is waited for, at the start as later; a destination that refuses this
    /// migration at the start is not.
    pub(super) fn connect(&mut self, first: bool) -> Result<ConnectionSet, Halt> {
        let began = Instant::now();
        loop {
            // A command that came meanwhile goes first.
            self.pause(Duration::ZERO)?;
            let reason = match self.connect_once(first) {
                Ok(set) => return Ok(set),
                Err(Halt::Lost(reason)) => reason,
                Err(halt) => return Err(halt),
            };
            self.pause(Duration::ZERO)?;
            if began.elapsed() >= RECONNECT_FOR {
                return Err(if first {
                    Halt::Failed(reason)
                } else {
                    Halt::Lost(reason)
                });
            }
            if first {
                let trouble = not_connected(began.elapsed(), &reason);
                self.parts.report.trouble(Some(trouble));
            }
            self.pause(RECONNECT_PAUSE)?;
        }
    }

    fn connect_once(&mut self, first: bool) -> Result<ConnectionSet, Halt> {
        let number = self.next_set;
        self.next_set = number
            .checked_add(1)
            .ok_or(Halt::Failed("too many lost links".into()))?;
        let plan = SetPlan {
            number,
            protocol: self.parts.protocol,
            spec: &self.parts.spec,
            routes: &self.parts.routes,
            ram: &self.parts.ram,
            tell: &self.own,
            ending: &self.ending,
            changes: self.parts.disks.as_ref().map(|disks| &disks.changes),
        };
        // A card without its address or a host without a core for a moment is a link that can be made again.
        let lost = |error| match error {
            TransportError::System { .. } => Halt::Lost(error.to_string()),
            // So ends who does not prove the migration's key.
            TransportError::HandshakeClosed { .. } if first => Halt::failed(error),
            TransportError::Connect { .. } | TransportError::HandshakeSilent { .. } if first => {
                let [from, to] = &self.parts.hosts;
                let ways = self.parts.routes.iter().map(|way| (way.from, way.to));
                Halt::Lost(not_reached(from, to, with_ways(error, ways)))
            }
            error => halt_of(error),
        };
        let mut set = ConnectionSet::open(&plan, &extents(&self.dirty)).map_err(lost)?;
        if let Err(halt) = self.wait_begun(&set) {
            if let Halt::Ended(Some(abort)) = &halt {
                // Whoever does not hear it learns it from the agents.
                let _ = set.control.send(abort);
            }
            set.abandon(&mut self.dirty);
            return Err(halt);
        }
        if let Err(error) = set.warm(&self.ending) {
            set.abandon(&mut self.dirty);
            return Err(halt_of(error));
        }
        self.variables_sent.clear();
        if let Err(halt) = self.send_variables(&set) {
            set.abandon(&mut self.dirty);
            return Err(halt);
        }
        self.parts.control.set(&set.control);
        let notes = set.take_notes();
        self.parts.report.update(|report| {
            report.streams = set.streams() as u32;
        });
        self.parts.report.note(notes);
        Ok(set)
    }

    fn wait_begun(&mut self, set: &ConnectionSet) -> Result<(), Halt> {
        let until = Instant::now() + BARRIER_WAIT;
        loop {
            if self.peer(set, until)? == (ToSource::Begun { set: set.number }) {
                self.rtt_s = set.rtt_s().min(1.0);
                return Ok(());
            }
        }
    }
}

/// What is told of a migration that waits for its first connection.
fn not_connected(waited: Duration, reason: &str) -> String {
    let (waited, limit) = (waited.as_secs(), RECONNECT_FOR.as_secs());
    format!("not connected after {waited} s, trying for {limit} s: {reason}")
}
