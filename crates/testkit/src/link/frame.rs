//! Frames as a TAP device hands them over: a virtio header, then an Ethernet frame, which may stand for several packets.
//!
//! Pure: tells how many packets of the wire a frame is, and cuts a run of them out again. The owner of the bytes is the
//! caller. It refuses frames that are shorter than their headers say and large packets of other protocols than TCP, which
//! the devices are not told to hand over.

use std::ops::Range;

use super::model::Train;

/// Bytes of the virtio header in front of each frame.
pub const VIRTIO_HEADER_BYTES: usize = 10;

const ETHERNET_BYTES: usize = 14;
const NEEDS_CHECKSUM: u8 = 1;
const LARGE_NONE: u8 = 0;
const LARGE_TCP4: u8 = 1;
const LARGE_TCP6: u8 = 4;
/// Set beside the type when the packet carries a congestion mark.
const LARGE_ECN: u8 = 0x80;
const TCP_FIN_PSH: u8 = 0x09;
const TCP_CWR: u8 = 0x80;

/// A frame with its virtio header, and where its parts are.
pub struct Frame {
    bytes: Vec<u8>,
    /// Offsets from the start of the virtio header; zero for a frame that is one packet.
    ip: usize,
    tcp: usize,
    payload: usize,
    payload_per_packet: usize,
}

impl Frame {
    /// Takes a frame apart as far as needed; none if it makes no sense.
    pub fn parse(bytes: &[u8]) -> Option<(Train, Self)> {
        if bytes.len() < VIRTIO_HEADER_BYTES + ETHERNET_BYTES {
            return None;
        }
        match bytes[1] & !LARGE_ECN {
            LARGE_NONE => Some(Self::single(bytes)),
            LARGE_TCP4 | LARGE_TCP6 => Self::large(bytes),
            _ => None,
        }
    }

    fn single(bytes: &[u8]) -> (Train, Self) {
        let frame = Self {
            bytes: bytes.to_vec(),
            ip: 0,
            tcp: 0,
            payload: 0,
            payload_per_packet: 0,
        };
        let length = bytes.len() - VIRTIO_HEADER_BYTES;
        (Train::single(length as u32), frame)
    }

    fn large(bytes: &[u8]) -> Option<(Train, Self)> {
        let vlan = word(bytes, VIRTIO_HEADER_BYTES + 12)? == 0x8100;
        let ip = VIRTIO_HEADER_BYTES + ETHERNET_BYTES + if vlan { 4 } else { 0 };
        let version = bytes.get(ip)? >> 4;
        let is_four = bytes[1] & !LARGE_ECN == LARGE_TCP4;
        let tcp = VIRTIO_HEADER_BYTES + usize::from(native_word(bytes, 6)?);
        let header_bytes = if is_four { 20 } else { 40 };
        if version != if is_four { 4 } else { 6 } || tcp < ip + header_bytes {
            return None;
        }
        // Without it the checksum is complete and would have to be made anew for each run.
        if bytes[0] & NEEDS_CHECKSUM == 0 {
            return None;
        }
        let tcp_bytes = usize::from(bytes.get(tcp + 12)? >> 4) * 4;
        let (payload, per_packet) = (tcp + tcp_bytes, usize::from(native_word(bytes, 4)?));
        let payload_bytes = bytes.len().checked_sub(payload)?;
        if tcp_bytes < 20 || payload_bytes == 0 || per_packet == 0 {
            return None;
        }
        let packets = payload_bytes.div_ceil(per_packet);
        let headers = payload - VIRTIO_HEADER_BYTES;
        let last = payload_bytes - (packets - 1) * per_packet;
        let train = Train {
            packets: u16::try_from(packets).ok()?,
            full_bytes: (headers + per_packet.min(payload_bytes)) as u32,
            last_bytes: (headers + last) as u32,
        };
        let frame = Self {
            bytes: bytes.to_vec(),
            ip,
            tcp,
            payload,
            payload_per_packet: per_packet,
        };
        Some((train, frame))
    }

    fn packets(&self) -> usize {
        match self.payload_per_packet {
            0 => 1,
            each => (self.bytes.len() - self.payload).div_ceil(each),
        }
    }

    /// These packets of it as one frame: its own bytes if that is all of it, else written into `scratch`.
    pub fn run<'a>(&'a self, packets: Range<u16>, scratch: &'a mut Vec<u8>) -> &'a [u8] {
        let (first, end) = (usize::from(packets.start), usize::from(packets.end));
        if first == 0 && end == self.packets() {
            return &self.bytes;
        }
        let each = self.payload_per_packet;
        let data = &self.bytes[self.payload..];
        let data = &data[first * each..data.len().min(end * each)];
        scratch.clear();
        scratch.extend_from_slice(&self.bytes[..self.payload]);
        scratch.extend_from_slice(data);
        self.fix_virtio(scratch, end - first);
        self.fix_ip(scratch, first);
        self.fix_tcp(scratch, first, end);
        scratch
    }

    fn fix_virtio(&self, frame: &mut [u8], packets: usize) {
        let headers = (self.payload - VIRTIO_HEADER_BYTES) as u16;
        frame[2..4].copy_from_slice(&headers.to_ne_bytes());
        if packets == 1 {
            frame[1] = LARGE_NONE;
            frame[4..6].fill(0);
        }
    }

    /// Length, and for IPv4 number and checksum, as a network card sets them when it cuts a large packet.
    fn fix_ip(&self, frame: &mut [u8], first: usize) {
        let length = frame.len() - self.ip;
        let ip = &mut frame[self.ip..self.tcp];
        if ip[0] >> 4 == 6 {
            ip[4..6].copy_from_slice(&((length - 40) as u16).to_be_bytes());
            return;
        }
        ip[2..4].copy_from_slice(&(length as u16).to_be_bytes());
        let number = u16::from_be_bytes([ip[4], ip[5]]).wrapping_add(first as u16);
        ip[4..6].copy_from_slice(&number.to_be_bytes());
        ip[10..12].fill(0);
        let checksum = !ones_sum(ip);
        ip[10..12].copy_from_slice(&checksum.to_be_bytes());
    }

    /// Sequence number, flags, and the part of the checksum that the sender has summed up so far.
    fn fix_tcp(&self, frame: &mut [u8], first: usize, end: usize) {
        let (old_length, new_length) = (self.bytes.len() - self.tcp, frame.len() - self.tcp);
        let is_last = end == self.packets();
        let tcp = &mut frame[self.tcp..];
        let skipped = (first * self.payload_per_packet) as u32;
        let sequence = u32::from_be_bytes([tcp[4], tcp[5], tcp[6], tcp[7]]).wrapping_add(skipped);
        tcp[4..8].copy_from_slice(&sequence.to_be_bytes());
        if !is_last {
            tcp[13] &= !TCP_FIN_PSH;
        }
        if first > 0 {
            tcp[13] &= !TCP_CWR;
        }
        let sum = u32::from(u16::from_be_bytes([tcp[16], tcp[17]]));
        let sum = fold(sum + u32::from(!(old_length as u16)) + new_length as u32);
        tcp[16..18].copy_from_slice(&sum.to_be_bytes());
    }
}

fn word(bytes: &[u8], at: usize) -> Option<u16> {
    let pair = bytes.get(at..at + 2)?;
    Some(u16::from_be_bytes([pair[0], pair[1]]))
}

fn native_word(bytes: &[u8], at: usize) -> Option<u16> {
    let pair = bytes.get(at..at + 2)?;
    Some(u16::from_ne_bytes([pair[0], pair[1]]))
}

/// The ones' complement sum of big-endian words.
fn ones_sum(bytes: &[u8]) -> u16 {
    let low = |pair: &[u8]| pair.get(1).copied().unwrap_or(0);
    let words = bytes
        .chunks(2)
        .map(|pair| u32::from(u16::from_be_bytes([pair[0], low(pair)])));
    fold(words.sum())
}

fn fold(mut sum: u32) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

#[cfg(test)]
#[path = "frame_tests.rs"]
mod tests;
