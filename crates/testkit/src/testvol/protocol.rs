//! The messages between the kernel and a volume: what `linux/fuse.h` says, as far as a volume speaks it.
//!
//! Owns nothing. Refuses messages that are shorter than they say.

use super::Errno;
use super::tree::{Meta, Node};

/// Longest write, and longest message beside its head.
pub const WRITE_BYTES: usize = 1 << 20;
const HEADER_BYTES: usize = 40;
/// How long the kernel may believe what it was told, where nobody else changes it.
const LONG_S: u64 = 3600;

const ASYNC_READ: u32 = 1 << 0;
const BIG_WRITES: u32 = 1 << 5;
const ASYNC_DIRECT_IO: u32 = 1 << 15;
const NO_OPEN_SUPPORT: u32 = 1 << 17;
const PARALLEL_DIROPS: u32 = 1 << 18;
const MAX_PAGES: u32 = 1 << 22;

/// Of an open file: no cache, and several writes at a time.
const DIRECT_IO: u32 = 1 << 0;
const PARALLEL_DIRECT_WRITES: u32 = 1 << 6;

pub mod opcode {
    pub const LOOKUP: u32 = 1;
    pub const FORGET: u32 = 2;
    pub const GETATTR: u32 = 3;
    pub const SETATTR: u32 = 4;
    pub const READLINK: u32 = 5;
    pub const SYMLINK: u32 = 6;
    pub const MKNOD: u32 = 8;
    pub const MKDIR: u32 = 9;
    pub const UNLINK: u32 = 10;
    pub const RMDIR: u32 = 11;
    pub const RENAME: u32 = 12;
    pub const LINK: u32 = 13;
    pub const OPEN: u32 = 14;
    pub const READ: u32 = 15;
    pub const WRITE: u32 = 16;
    pub const STATFS: u32 = 17;
    pub const RELEASE: u32 = 18;
    pub const FSYNC: u32 = 20;
    pub const SETXATTR: u32 = 21;
    pub const GETXATTR: u32 = 22;
    pub const LISTXATTR: u32 = 23;
    pub const REMOVEXATTR: u32 = 24;
    pub const FLUSH: u32 = 25;
    pub const INIT: u32 = 26;
    pub const OPENDIR: u32 = 27;
    pub const READDIR: u32 = 28;
    pub const RELEASEDIR: u32 = 29;
    pub const FSYNCDIR: u32 = 30;
    pub const CREATE: u32 = 35;
    pub const INTERRUPT: u32 = 36;
    pub const DESTROY: u32 = 38;
    pub const BATCH_FORGET: u32 = 42;
    pub const RENAME2: u32 = 45;
}

/// Of a sync: what is beside the data may be left out.
pub const SYNC_DATA: u32 = 1 << 0;

pub const SET_MODE: u32 = 1 << 0;
pub const SET_UID: u32 = 1 << 1;
pub const SET_GID: u32 = 1 << 2;
pub const SET_SIZE: u32 = 1 << 3;
pub const SET_ACCESSED: u32 = 1 << 4;
pub const SET_MODIFIED: u32 = 1 << 5;
pub const SET_ACCESSED_NOW: u32 = 1 << 7;
pub const SET_MODIFIED_NOW: u32 = 1 << 8;

#[derive(Debug)]
pub struct Request {
    pub opcode: u32,
    /// What the answer names it by.
    pub unique: u64,
    pub node: u64,
    pub uid: u32,
    pub gid: u32,
    pub body: Vec<u8>,
}

impl Request {
    pub fn parse(message: &[u8]) -> Option<Self> {
        let (head, body) = message.split_at_checked(HEADER_BYTES)?;
        let mut fields = Fields(head);
        let _length = fields.u32().ok()?;
        Some(Self {
            opcode: fields.u32().ok()?,
            unique: fields.u64().ok()?,
            node: fields.u64().ok()?,
            uid: fields.u32().ok()?,
            gid: fields.u32().ok()?,
            body: body.to_vec(),
        })
    }

    pub fn fields(&self) -> Fields<'_> {
        Fields(&self.body)
    }
}

/// What is left of a message.
pub struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    pub fn bytes(&mut self, count: usize) -> Result<&'a [u8], Errno> {
        let (taken, rest) = self.0.split_at_checked(count).ok_or(libc::EINVAL)?;
        self.0 = rest;
        Ok(taken)
    }

    pub fn u32(&mut self) -> Result<u32, Errno> {
        let word = self.bytes(4)?.try_into().map_err(|_| libc::EINVAL)?;
        Ok(u32::from_ne_bytes(word))
    }

    pub fn u64(&mut self) -> Result<u64, Errno> {
        let word = self.bytes(8)?.try_into().map_err(|_| libc::EINVAL)?;
        Ok(u64::from_ne_bytes(word))
    }

    /// A text that ends with a zero byte.
    pub fn text(&mut self) -> Result<&'a [u8], Errno> {
        let end = self.0.iter().position(|byte| *byte == 0);
        let text = self.bytes(end.ok_or(libc::EINVAL)?)?;
        self.bytes(1)?;
        Ok(text)
    }
}

#[derive(Default)]
pub struct Answer(pub Vec<u8>);

impl Answer {
    pub fn u16(mut self, value: u16) -> Self {
        self.0.extend(value.to_ne_bytes());
        self
    }

    pub fn u32(mut self, value: u32) -> Self {
        self.0.extend(value.to_ne_bytes());
        self
    }

    pub fn u64(mut self, value: u64) -> Self {
        self.0.extend(value.to_ne_bytes());
        self
    }

    /// What the kernel and a volume agree on: whole pages and big writes, no writes kept back, no locks.
    pub fn init(kernel: &Request, is_direct: bool) -> Result<Self, Errno> {
        let mut fields = kernel.fields();
        let (_major, _minor) = (fields.u32()?, fields.u32()?);
        let (read_ahead, offered) = (fields.u32()?, fields.u32()?);
        let wanted = ASYNC_READ | BIG_WRITES | PARALLEL_DIROPS | MAX_PAGES;
        let wanted = match is_direct {
            true => wanted | ASYNC_DIRECT_IO,
            false => wanted | NO_OPEN_SUPPORT,
        };
        let answer = Self::default().u32(7).u32(31).u32(read_ahead);
        let answer = answer.u32(offered & wanted).u16(64).u16(48);
        let answer = answer.u32(WRITE_BYTES as u32).u32(1).u16(256).u16(0);
        Ok((0..8).fold(answer, |answer, _| answer.u32(0)))
    }

    /// An open file, with a handle that means nothing.
    pub fn opened(self, is_direct: bool) -> Self {
        let flags = match is_direct {
            true => DIRECT_IO | PARALLEL_DIRECT_WRITES,
            false => 0,
        };
        self.u64(0).u32(flags).u32(0)
    }

    /// A node that was found or made in a directory. Names in the top directory are asked for each time, since a power
    /// cut changes what they mean; below them it changes the nodes.
    pub fn entry(self, number: u64, node: &Node, in_root: bool) -> Self {
        let believe = if in_root { 0 } else { LONG_S };
        let answer = self.u64(number).u64(0).u64(believe).u64(LONG_S);
        answer.u32(0).u32(0).attributes(node)
    }

    /// A node's attributes alone.
    pub fn node(self, number: u64, node: &Node) -> Self {
        let believe = if number == super::tree::ROOT {
            0
        } else {
            LONG_S
        };
        self.u64(believe).u32(0).u32(0).attributes(node)
    }

    fn attributes(self, node: &Node) -> Self {
        let Meta {
            mode,
            uid,
            gid,
            accessed,
            modified,
            changed,
            ..
        } = node.meta;
        let times = [accessed, modified, changed];
        let answer = self.u64(node.inode).u64(node.size()).u64(node.pages() * 8);
        let answer = times.iter().fold(answer, |a, time| a.u64(time.as_secs()));
        let answer = times
            .iter()
            .fold(answer, |a, time| a.u32(time.subsec_nanos()));
        let device = match node.body {
            super::tree::Body::Special(device) => device,
            _ => 0,
        };
        let answer = answer.u32(mode).u32(node.links).u32(uid).u32(gid);
        answer.u32(device).u32(4096).u32(0)
    }

    /// One name of a listing, if it fits into so many bytes; `next` is where a reader goes on after it.
    pub fn listed(&mut self, number: u64, mode: u32, name: &[u8], next: u64, limit: usize) -> bool {
        let length = (24 + name.len()).next_multiple_of(8);
        if self.0.len() + length > limit {
            return false;
        }
        let end = self.0.len() + length;
        let answer = std::mem::take(self).u64(number).u64(next);
        *self = answer.u32(name.len() as u32).u32((mode >> 12) & 15);
        self.0.extend(name);
        self.0.resize(end, 0);
        true
    }
}
