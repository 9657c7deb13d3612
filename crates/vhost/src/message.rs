//! What QEMU says to a back end (`docs/interop/vhost-user.rst` of QEMU), as far as a disk is concerned.
//!
//! Pure: bytes in, a [`Message`] out. Refuses requests that were not offered, bodies of another length than their request
//! has, and counts of descriptors that do not go with it.

use serde::{Deserialize, Serialize};

use crate::Error;

/// Bytes of a header: request, flags and size of the body.
pub const HEADER: usize = 12;
/// Longest body that is taken; a table of eight regions and a configuration are shorter.
pub const BODY_MAX: usize = 1024;
/// Most descriptors with one message: those of a table of eight regions.
pub const FDS_MAX: usize = 8;
/// Most regions in a table, without the feature that allows for more.
pub const REGIONS_MAX: usize = 8;
/// Bytes of the configuration that one message may ask for.
pub const CONFIG_MAX: usize = 256;

const VERSION: u32 = 1;
const VERSION_BITS: u32 = 3;
const REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;

pub mod request {
    pub const GET_FEATURES: u32 = 1;
    pub const SET_FEATURES: u32 = 2;
    pub const SET_OWNER: u32 = 3;
    pub const RESET_OWNER: u32 = 4;
    pub const SET_MEM_TABLE: u32 = 5;
    pub const SET_LOG_BASE: u32 = 6;
    pub const SET_LOG_FD: u32 = 7;
    pub const SET_VRING_NUM: u32 = 8;
    pub const SET_VRING_ADDR: u32 = 9;
    pub const SET_VRING_BASE: u32 = 10;
    pub const GET_VRING_BASE: u32 = 11;
    pub const SET_VRING_KICK: u32 = 12;
    pub const SET_VRING_CALL: u32 = 13;
    pub const SET_VRING_ERR: u32 = 14;
    pub const GET_PROTOCOL_FEATURES: u32 = 15;
    pub const SET_PROTOCOL_FEATURES: u32 = 16;
    pub const GET_QUEUE_NUM: u32 = 17;
    pub const SET_VRING_ENABLE: u32 = 18;
    pub const SET_BACKEND_REQ_FD: u32 = 21;
    pub const GET_CONFIG: u32 = 24;
    pub const SET_CONFIG: u32 = 25;
    pub const GET_INFLIGHT_FD: u32 = 31;
    pub const SET_INFLIGHT_FD: u32 = 32;
    /// From the back end, on a channel of its own: the configuration has changed.
    pub const CONFIG_CHANGED: u32 = 2;
}

/// A message's first bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    pub request: u32,
    /// Whether an answer is wanted where the request has none of its own.
    pub wants_answer: bool,
    /// Bytes that follow.
    pub body: usize,
}

impl Header {
    /// Refuses another version, answers, and long bodies.
    pub fn decode(bytes: &[u8; HEADER]) -> Result<Self, Error> {
        let word = |at: usize| {
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        let (request, flags, size) = (word(0), word(4), word(8));
        if flags & VERSION_BITS != VERSION || flags & REPLY != 0 {
            return Err(refused(request, "it is no request of version 1"));
        }
        let body = usize::try_from(size).unwrap_or(usize::MAX);
        if body > BODY_MAX {
            return Err(refused(request, "it is too long"));
        }
        Ok(Self {
            request,
            wants_answer: flags & NEED_REPLY != 0,
            body,
        })
    }
}

/// An answer to a request, or (with `is_reply` false) a message of the back end's own.
pub fn encode(request: u32, is_reply: bool, body: &[u8]) -> Vec<u8> {
    let flags = VERSION | if is_reply { REPLY } else { 0 };
    let size = u32::try_from(body.len()).unwrap_or(u32::MAX);
    let mut bytes = Vec::with_capacity(HEADER + body.len());
    for word in [request, flags, size] {
        bytes.extend_from_slice(&word.to_le_bytes());
    }
    bytes.extend_from_slice(body);
    bytes
}

/// A part of the guest's memory, as QEMU has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Region {
    pub guest: u64,
    pub bytes: u64,
    /// Address in QEMU's own memory, by which it names rings.
    pub qemu: u64,
    /// Offset in the file that came with it.
    pub offset: u64,
}

/// A queue's number, and another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Vring {
    pub queue: u32,
    pub value: u32,
}

/// Where a ring is, in addresses of QEMU's own memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingAddress {
    pub queue: u32,
    pub descriptors: u64,
    pub used: u64,
    pub available: u64,
}

/// A piece of the configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConfigPart {
    pub offset: u32,
    pub size: u32,
    pub flags: u32,
}

/// A memory of requests under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct InflightArea {
    pub bytes: u64,
    pub offset: u64,
    pub queues: u16,
    pub queue_size: u16,
}

/// A descriptor for a queue may come, or be taken away.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueFd {
    pub queue: u8,
    /// Whether a descriptor came with it.
    pub given: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Message {
    GetFeatures,
    SetFeatures(u64),
    /// Nothing to be done.
    Owner,
    SetMemTable(Vec<Region>),
    SetLogBase,
    SetLogFd,
    SetVringNum(Vring),
    SetVringAddr(RingAddress),
    SetVringBase(Vring),
    GetVringBase(Vring),
    SetVringKick(QueueFd),
    SetVringCall(QueueFd),
    SetVringErr(QueueFd),
    GetProtocolFeatures,
    SetProtocolFeatures(u64),
    GetQueueNum,
    SetVringEnable(Vring),
    SetBackendReqFd,
    GetConfig(ConfigPart),
    SetConfig(ConfigPart),
    GetInflightFd(InflightArea),
    SetInflightFd(InflightArea),
}

/// Reads a body that came with so many descriptors.
pub fn decode(request: u32, body: &[u8], fds: usize) -> Result<Message, Error> {
    let mut reader = Reader { request, body };
    let message = message(&mut reader, fds)?;
    if !reader.body.is_empty() {
        return Err(refused(request, "its body is too long"));
    }
    let wanted = match &message {
        Message::SetMemTable(regions) => regions.len(),
        Message::SetLogBase
        | Message::SetLogFd
        | Message::SetBackendReqFd
        | Message::SetInflightFd(_) => 1,
        Message::SetVringKick(fd) | Message::SetVringCall(fd) | Message::SetVringErr(fd) => {
            usize::from(fd.given)
        }
        _ => 0,
    };
    if fds != wanted {
        let reason = format!("{fds} descriptors came with it instead of {wanted}");
        return Err(refused(request, &reason));
    }
    Ok(message)
}

fn message(reader: &mut Reader<'_>, fds: usize) -> Result<Message, Error> {
    Ok(match reader.request {
        request::GET_FEATURES => Message::GetFeatures,
        request::SET_FEATURES => Message::SetFeatures(reader.u64()?),
        request::SET_OWNER | request::RESET_OWNER => Message::Owner,
        request::SET_MEM_TABLE => Message::SetMemTable(reader.regions()?),
        request::SET_LOG_BASE => {
            reader.u64()?;
            reader.u64()?;
            Message::SetLogBase
        }
        request::SET_LOG_FD => Message::SetLogFd,
        request::SET_VRING_NUM => Message::SetVringNum(reader.vring()?),
        request::SET_VRING_ADDR => Message::SetVringAddr(reader.ring_address()?),
        request::SET_VRING_BASE => Message::SetVringBase(reader.vring()?),
        request::GET_VRING_BASE => Message::GetVringBase(reader.vring()?),
        request::SET_VRING_KICK => Message::SetVringKick(reader.queue_fd()?),
        request::SET_VRING_CALL => Message::SetVringCall(reader.queue_fd()?),
        request::SET_VRING_ERR => Message::SetVringErr(reader.queue_fd()?),
        request::GET_PROTOCOL_FEATURES => Message::GetProtocolFeatures,
        request::SET_PROTOCOL_FEATURES => Message::SetProtocolFeatures(reader.u64()?),
        request::GET_QUEUE_NUM => Message::GetQueueNum,
        request::SET_VRING_ENABLE => Message::SetVringEnable(reader.vring()?),
        request::SET_BACKEND_REQ_FD => Message::SetBackendReqFd,
        request::GET_CONFIG => Message::GetConfig(reader.config()?),
        request::SET_CONFIG => Message::SetConfig(reader.config()?),
        request::GET_INFLIGHT_FD => Message::GetInflightFd(reader.inflight()?),
        request::SET_INFLIGHT_FD => Message::SetInflightFd(reader.inflight()?),
        other => {
            let reason = format!("it was not offered ({fds} descriptors came with it)");
            return Err(refused(other, &reason));
        }
    })
}

fn refused(request: u32, reason: &str) -> Error {
    Error::Message {
        request,
        reason: reason.to_owned(),
    }
}

/// Takes numbers from the front of a body.
struct Reader<'a> {
    request: u32,
    body: &'a [u8],
}

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], Error> {
        let short = || refused(self.request, "its body is too short");
        let (first, rest) = self.body.split_first_chunk::<N>().ok_or_else(short)?;
        self.body = rest;
        Ok(*first)
    }

    fn u16(&mut self) -> Result<u16, Error> {
        Ok(u16::from_le_bytes(self.take()?))
    }

    fn u32(&mut self) -> Result<u32, Error> {
        Ok(u32::from_le_bytes(self.take()?))
    }

    fn u64(&mut self) -> Result<u64, Error> {
        Ok(u64::from_le_bytes(self.take()?))
    }

    fn vring(&mut self) -> Result<Vring, Error> {
        Ok(Vring {
            queue: self.u32()?,
            value: self.u32()?,
        })
    }

    fn regions(&mut self) -> Result<Vec<Region>, Error> {
        let count = self.u32()? as usize;
        self.u32()?;
        if count > REGIONS_MAX {
            return Err(refused(self.request, "it has more than eight regions"));
        }
        (0..count)
            .map(|_| {
                Ok(Region {
                    guest: self.u64()?,
                    bytes: self.u64()?,
                    qemu: self.u64()?,
                    offset: self.u64()?,
                })
            })
            .collect()
    }

    /// The address of a log of writes to the ring is passed over: nobody reads that log (see [`Message::SetLogBase`]).
    fn ring_address(&mut self) -> Result<RingAddress, Error> {
        let queue = self.u32()?;
        self.u32()?;
        let address = RingAddress {
            queue,
            descriptors: self.u64()?,
            used: self.u64()?,
            available: self.u64()?,
        };
        self.u64()?;
        Ok(address)
    }

    /// The lowest eight bits are the queue, the ninth says that no descriptor came.
    fn queue_fd(&mut self) -> Result<QueueFd, Error> {
        let value = self.u64()?;
        if value > 0x1ff {
            return Err(refused(self.request, "it names no queue"));
        }
        Ok(QueueFd {
            queue: value as u8,
            given: value & 0x100 == 0,
        })
    }

    /// The bytes themselves follow, also where they are only asked for.
    fn config(&mut self) -> Result<ConfigPart, Error> {
        let part = ConfigPart {
            offset: self.u32()?,
            size: self.u32()?,
            flags: self.u32()?,
        };
        let size = usize::try_from(part.size).unwrap_or(usize::MAX);
        if size > CONFIG_MAX || size != self.body.len() {
            return Err(refused(self.request, "its size is not what it says"));
        }
        self.body = &[];
        Ok(part)
    }

    fn inflight(&mut self) -> Result<InflightArea, Error> {
        let area = InflightArea {
            bytes: self.u64()?,
            offset: self.u64()?,
            queues: self.u16()?,
            queue_size: self.u16()?,
        };
        // A compiler's padding, which some front ends send.
        if self.body.len() == 4 {
            self.u32()?;
        }
        Ok(area)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(words: &[u64]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    #[test]
    fn a_header_of_another_version_an_answer_and_a_long_body_are_refused() {
        let header = |flags: u32, size: u32| {
            let mut bytes = [0; HEADER];
            bytes[0] = 11;
            bytes[4..8].copy_from_slice(&flags.to_le_bytes());
            bytes[8..].copy_from_slice(&size.to_le_bytes());
            Header::decode(&bytes)
        };
        let good = header(1 | NEED_REPLY, 8).unwrap();
        assert_eq!((good.request, good.wants_answer, good.body), (11, true, 8));
        for (flags, size) in [(0, 8), (2, 8), (1 | REPLY, 8), (1, 1025), (1, u32::MAX)] {
            assert!(header(flags, size).is_err(), "{flags} {size}");
        }
    }

    #[test]
    fn a_table_of_regions_comes_with_as_many_descriptors() {
        let table = words(&[1, 0, 1 << 20, 0x7f00_0000_0000, 4096]);
        let region = Region {
            guest: 0,
            bytes: 1 << 20,
            qemu: 0x7f00_0000_0000,
            offset: 4096,
        };
        let read = decode(request::SET_MEM_TABLE, &table, 1).unwrap();
        assert_eq!(read, Message::SetMemTable(vec![region]));
        assert!(decode(request::SET_MEM_TABLE, &table, 0).is_err());
        assert!(decode(request::SET_MEM_TABLE, &table, 2).is_err());
        assert!(decode(request::SET_MEM_TABLE, &table[..32], 1).is_err());
        assert!(decode(request::SET_MEM_TABLE, &words(&[2, 0, 0, 0, 0]), 2).is_err());
        assert!(decode(request::SET_MEM_TABLE, &words(&[u64::MAX]), 8).is_err());
    }

    #[test]
    fn a_queues_descriptor_is_there_or_said_not_to_be() {
        let kick = |value: u64, fds| decode(request::SET_VRING_KICK, &value.to_le_bytes(), fds);
        let given = |given| Message::SetVringKick(QueueFd { queue: 3, given });
        assert_eq!(kick(3, 1).unwrap(), given(true));
        assert_eq!(kick(0x103, 0).unwrap(), given(false));
        assert!(kick(3, 0).is_err() && kick(0x103, 1).is_err() && kick(0x203, 1).is_err());
    }

    #[test]
    fn what_was_not_offered_is_refused() {
        for request in [0, 19, 20, 22, 26, 28, 33, 40, 41, u32::MAX] {
            assert!(decode(request, &[], 0).is_err(), "{request}");
        }
    }

    #[test]
    fn a_part_of_the_configuration_has_the_size_that_it_says() {
        let part = |size: u32, bytes: usize| {
            let mut body = [0, size, 0].map(u32::to_le_bytes).concat();
            body.resize(12 + bytes, 0);
            decode(request::GET_CONFIG, &body, 0)
        };
        assert!(part(60, 60).is_ok());
        assert!(part(60, 59).is_err() && part(61, 60).is_err() && part(257, 257).is_err());
    }
}
