//! What a disk does when QEMU says something.
//!
//! Refuses queues that the disk does not have, rings that are too large, features that were not offered, and memory that is
//! not its guest's. A refusal ends the connection; QEMU then connects anew.

use std::os::fd::{AsFd, OwnedFd};

use godwit_guestmem::RegionPlace;
use godwit_guestmem::device_memory::device_memory;

use crate::block::{CONFIG, feature};
use crate::connection::Received;
use crate::disk::Device;
use crate::inflight::Inflight;
use crate::message::{
    ConfigPart, InflightArea, Message, QueueFd, Region, RingAddress, Vring, request,
};
use crate::queue::Queue;
use crate::ring::Place;
use crate::{Error, QUEUES_MAX};

/// Features of the protocol: several queues, a log of writes, answers on demand, a channel back, a configuration, requests
/// in flight. What is not here is never sent.
const PROTOCOL: u64 = 1 | 1 << 1 | 1 << 3 | 1 << 5 | 1 << 9 | 1 << 12;

impl Device {
    /// Carries out one message and answers it.
    pub(crate) fn carry_out(&mut self, received: Received) -> Result<(), Error> {
        let Received {
            request,
            wants_answer,
            message,
            fds,
        } = received;
        match message {
            Message::GetFeatures => self.number(request, self.guest.geometry.features()),
            Message::GetProtocolFeatures => self.number(request, PROTOCOL),
            Message::GetQueueNum => self.number(request, self.queues.len() as u64),
            Message::GetConfig(part) => self.tell_config(&part),
            Message::GetInflightFd(asked) => self.give_inflight(&asked),
            Message::GetVringBase(vring) => self.end_queue(&vring),
            // The log is for QEMU's own copy of guest memory. Ours does not go that way (`x-ignore-shared`), and what a device
            // writes is told to our tracker instead; so the log stays empty.
            Message::SetLogBase => self.answer(request, &[]),
            // A driver may ask for it; nothing in the configuration is for writing.
            Message::SetConfig(_) if wants_answer => self.number(request, 1),
            order => {
                self.obey_qemu(request, order, fds)?;
                match wants_answer {
                    true => self.number(request, 0),
                    false => Ok(()),
                }
            }
        }
    }

    /// What has no answer but that it was done.
    fn obey_qemu(&mut self, request: u32, order: Message, fds: Vec<OwnedFd>) -> Result<(), Error> {
        match order {
            Message::SetFeatures(features) => self.set_features(request, features)?,
            Message::SetProtocolFeatures(features) if features & !PROTOCOL != 0 => {
                return Err(refused(request, "it takes what was not offered"));
            }
            Message::SetMemTable(regions) => self.set_memory(regions, fds)?,
            Message::SetBackendReqFd => self.session.back_channel = fds.into_iter().next(),
            Message::SetInflightFd(told) => {
                let fd = fds.into_iter().next();
                let fd = fd.ok_or_else(|| refused(request, "nothing came with it"))?;
                self.guest.inflight = Some(Inflight::open(fd, &told)?);
            }
            Message::SetVringAddr(address) => self.set_place(&address)?,
            Message::SetVringNum(vring) => {
                // A guest's driver may choose one that is not served: its queue is broken when it begins.
                let size = u16::try_from(vring.value).unwrap_or(0);
                self.queue(vring.queue, request)?.size = size;
            }
            Message::SetVringBase(vring) => {
                let base = u16::try_from(vring.value);
                let base = base.map_err(|_| refused(request, "a ring has no such index"))?;
                self.queue(vring.queue, request)?.base = base;
            }
            Message::SetVringEnable(vring) => {
                self.queue(vring.queue, request)?.enabled = vring.value != 0;
            }
            Message::SetVringKick(QueueFd { queue, .. }) => {
                if self.queue(queue.into(), request)?.runs() {
                    return Err(refused(request, "the queue runs already"));
                }
                self.begin(queue.into(), fds.into_iter().next())?;
            }
            Message::SetVringCall(QueueFd { queue, .. }) => {
                let call = fds.into_iter().next();
                self.queue(queue.into(), request)?.set_call(call)?;
            }
            // To be obeyed by doing nothing; questions do not come here.
            _ => {}
        }
        Ok(())
    }

    pub(crate) fn set_features(&mut self, request: u32, features: u64) -> Result<(), Error> {
        if features & !self.guest.geometry.features() != 0 {
            return Err(refused(request, "it takes what was not offered"));
        }
        self.guest.features = features;
        self.guest.by_index = features & feature::EVENT_INDEX != 0;
        self.guest.durable = features & feature::FLUSH == 0;
        self.guest.enables = features & feature::PROTOCOL != 0;
        Ok(())
    }

    fn queue(&mut self, number: u32, request: u32) -> Result<&mut Queue, Error> {
        let index = usize::try_from(number).unwrap_or(usize::MAX);
        self.queues.get_mut(index).ok_or_else(|| Error::Message {
            request,
            reason: format!("the disk has no queue {number}"),
        })
    }

    fn answer(&self, request: u32, body: &[u8]) -> Result<(), Error> {
        match &self.session.connection {
            Some(connection) => connection.answer(request, body, None),
            None => Err(Error::Closed),
        }
    }

    fn number(&self, request: u32, number: u64) -> Result<(), Error> {
        self.answer(request, &number.to_le_bytes())
    }

    /// Bytes beyond the configuration are zero.
    fn tell_config(&self, part: &ConfigPart) -> Result<(), Error> {
        let config = self.guest.geometry.config();
        let start = usize::try_from(part.offset).unwrap_or(CONFIG).min(CONFIG);
        let mut bytes = config[start..].to_vec();
        bytes.resize(usize::try_from(part.size).unwrap_or(0), 0);
        let mut body = [part.offset, part.size, part.flags]
            .map(u32::to_le_bytes)
            .concat();
        body.extend_from_slice(&bytes);
        self.answer(request::GET_CONFIG, &body)
    }

    fn give_inflight(&mut self, asked: &InflightArea) -> Result<(), Error> {
        if usize::from(asked.queues) < self.queues.len() || asked.queues > QUEUES_MAX {
            return Err(Error::Message {
                request: request::GET_INFLIGHT_FD,
                reason: format!("it is for {} queues of {}", asked.queues, self.queues.len()),
            });
        }
        let made = Inflight::create(asked.queues)?;
        let told = made.told(asked.queue_size);
        let mut body = [told.bytes, told.offset].map(u64::to_le_bytes).concat();
        body.extend(
            [told.queues, told.queue_size]
                .map(u16::to_le_bytes)
                .concat(),
        );
        // A compiler's padding, which QEMU has in its structure.
        body.extend([0; 4]);
        let connection = self.session.connection.as_ref().ok_or(Error::Closed)?;
        connection.answer(request::GET_INFLIGHT_FD, &body, Some(made.as_fd()))?;
        self.guest.inflight = Some(made);
        Ok(())
    }

    /// The answer comes once nothing of the queue is under way.
    fn end_queue(&mut self, vring: &Vring) -> Result<(), Error> {
        let request = request::GET_VRING_BASE;
        if self.session.ending.is_some() {
            return Err(Error::Message {
                request,
                reason: "another queue is just being ended".to_owned(),
            });
        }
        self.queue(vring.queue, request)?.ending = true;
        self.session.ending = Some(vring.queue);
        Ok(())
    }

    /// Every region must be of the file that this guest's memory is.
    pub(crate) fn set_memory(
        &mut self,
        regions: Vec<Region>,
        fds: Vec<OwnedFd>,
    ) -> Result<(), Error> {
        let refused = |reason: String| Error::Message {
            request: request::SET_MEM_TABLE,
            reason,
        };
        let ours = self.guest.ram.identity()?;
        for fd in &fds {
            let stat = rustix::fs::fstat(fd.as_fd());
            let stat = stat.map_err(|error| Error::system("examine guest memory", error))?;
            if (stat.st_dev, stat.st_ino) != ours {
                return Err(refused("it is not the memory of this guest".to_owned()));
            }
        }
        let places: Vec<RegionPlace> = regions
            .iter()
            .map(|region| RegionPlace {
                guest: region.guest,
                offset: region.offset,
                bytes: region.bytes,
            })
            .collect();
        self.guest.memory = device_memory(&self.guest.ram, &places)?;
        self.session.regions = regions;
        Ok(())
    }

    fn set_place(&mut self, address: &RingAddress) -> Result<(), Error> {
        // A guest's driver may choose a place that is no memory: its queue is broken when it begins.
        let guest = |qemu: u64| {
            self.session.regions.iter().find_map(|region| {
                let inside = qemu.checked_sub(region.qemu)?;
                (inside < region.bytes).then(|| region.guest.saturating_add(inside))
            })
        };
        let ends = [address.descriptors, address.available, address.used].map(guest);
        let place = match ends {
            [Some(descriptors), Some(available), Some(used)] => Some(Place {
                size: 0,
                descriptors,
                available,
                used,
            }),
            _ => None,
        };
        self.queue(address.queue, request::SET_VRING_ADDR)?.place = place;
        Ok(())
    }
}

fn refused(request: u32, reason: &str) -> Error {
    Error::Message {
        request,
        reason: reason.to_owned(),
    }
}
