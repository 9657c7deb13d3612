//! A disk that goes on in another program, over the connection to QEMU that it has: what QEMU has said of it, and the
//! descriptors that came with that.
//!
//! Part of [`Device`]. A handover is made of copies while the disk stands still: from then on it hears nothing of QEMU, so that
//! every later word is for whoever goes on, and where nobody does it goes on itself. What was taken and not answered is in the
//! in-flight area, as after a kill.
//!
//! Refuses: to hand over a disk of which QEMU has said half a sentence or waits for an answer; and, taking one over, what would be
//! refused of QEMU itself.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use serde::{Deserialize, Serialize};

use crate::Error;
use crate::disk::Device;
use crate::inflight::Inflight;
use crate::message::{InflightArea, Region};
use crate::ring::Place;

/// What QEMU has said of a disk. Descriptors go beside it, in the order of the fields.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Told {
    /// Whether QEMU has said nothing over this connection.
    mute: bool,
    features: u64,
    regions: Vec<Region>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    inflight: Option<InflightArea>,
    back_channel: bool,
    /// Whether a sync has failed of which the guest has not heard.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    lost_sync: bool,
    queues: Vec<ToldQueue>,
}

/// What it has said of one queue.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ToldQueue {
    size: u16,
    /// The index of what is taken next.
    base: u16,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    place: Option<Place>,
    enabled: bool,
    runs: bool,
    kick: bool,
    call: bool,
}

/// A disk on its way to another program.
#[derive(Debug)]
pub struct Handover {
    told: Told,
    fds: Vec<OwnedFd>,
}

impl Handover {
    /// From what a program before this one said, and the descriptors beside that.
    pub fn of(told: Told, fds: Vec<OwnedFd>) -> Self {
        Self { told, fds }
    }

    /// As it is sent.
    pub fn into_parts(self) -> (Told, Vec<OwnedFd>) {
        (self.told, self.fds)
    }
}

impl Device {
    /// Copies of all that the connection is made of. QEMU is not heard any more from here on.
    pub(crate) fn hand_over(&mut self) -> Result<Handover, Error> {
        let busy = self.busy();
        let refused = |reason: &str| Err(refused(reason));
        if self.stands == 0 || !self.stack.is_idle() {
            return Err(busy);
        }
        let Some(connection) = &self.session.connection else {
            return refused("QEMU is not connected to it");
        };
        if self.session.ending.is_some() || !connection.is_between_messages() {
            return refused("QEMU is just speaking with it");
        }
        if self.guest.inflight.is_none() && self.queues.iter().any(|queue| queue.unanswered() > 0) {
            return refused("nothing says which of its requests are unanswered");
        }
        let mut fds = Fds::default();
        fds.push(connection)?;
        let inflight = self.guest.inflight.as_ref();
        inflight.map_or(Ok(()), |area| fds.push(area))?;
        self.session
            .back_channel
            .iter()
            .try_for_each(|fd| fds.push(fd))?;
        let mut queues = Vec::new();
        for queue in &self.queues {
            queue.kick.iter().try_for_each(|fd| fds.push(fd))?;
            queue.call.iter().try_for_each(|fd| fds.push(fd))?;
            queues.push(ToldQueue {
                size: queue.size,
                base: queue.next(),
                place: queue.place,
                enabled: queue.enabled,
                runs: queue.runs(),
                kick: queue.kick.is_some(),
                call: queue.call.is_some(),
            });
        }
        self.session.is_handed_over = true;
        let told = Told {
            mute: self.session.mute_since.is_some(),
            features: self.guest.features,
            regions: self.session.regions.clone(),
            inflight: inflight.map(Inflight::area),
            back_channel: self.session.back_channel.is_some(),
            lost_sync: self.lost_sync,
            queues,
        };
        if let Some(connection) = &mut self.session.connection {
            connection.leave(true);
        }
        Ok(Handover { told, fds: fds.0 })
    }

    /// Nobody else went on with it: what QEMU said meanwhile is heard.
    pub(crate) fn take_back(&mut self) {
        if let Some(connection) = &mut self.session.connection {
            connection.leave(false);
        }
        self.session.has_more_to_hear |= std::mem::take(&mut self.session.is_handed_over);
    }

    /// Goes on with a connection that another program had, as if QEMU had said all of it to this one.
    pub(crate) fn take_over(&mut self, handed: Handover) -> Result<(), Error> {
        let Handover { told, fds } = handed;
        // Whatever becomes of the connection.
        self.lost_sync |= told.lost_sync;
        let mut fds = fds.into_iter();
        let mut next = || fds.next().ok_or_else(|| refused("a descriptor is missing"));
        self.connect(UnixStream::from(next()?));
        if self.session.connection.is_none() {
            return Err(Error::Closed);
        }
        if !told.mute {
            self.session.mute_since = None;
        }
        self.set_features(0, told.features)?;
        self.set_memory(told.regions, Vec::new())?;
        if let Some(area) = &told.inflight {
            self.guest.inflight = Some(Inflight::open(next()?, area)?);
        }
        self.session.back_channel = match told.back_channel {
            true => Some(next()?),
            false => None,
        };
        for (number, told) in told.queues.into_iter().enumerate() {
            let kick = if told.kick { Some(next()?) } else { None };
            let call = if told.call { Some(next()?) } else { None };
            let queue = self.queues.get_mut(number);
            let queue = queue.ok_or_else(|| refused("it has more queues than the disk"))?;
            (queue.size, queue.base) = (told.size, told.base);
            (queue.place, queue.enabled) = (told.place, told.enabled);
            queue.set_call(call)?;
            if told.runs {
                self.begin(number, kick)?;
            }
        }
        match next() {
            Ok(_) => Err(refused(
                "descriptors came with it of which it does not tell",
            )),
            Err(_) => Ok(()),
        }
    }
}

#[derive(Default)]
struct Fds(Vec<OwnedFd>);

impl Fds {
    fn push(&mut self, fd: &impl AsFd) -> Result<(), Error> {
        let copied = fd.as_fd().try_clone_to_owned();
        let copied = copied.map_err(|error| Error::system("hand a disk over", error))?;
        self.0.push(copied);
        Ok(())
    }
}

fn refused(reason: &str) -> Error {
    Error::Handover {
        reason: reason.to_owned(),
    }
}
