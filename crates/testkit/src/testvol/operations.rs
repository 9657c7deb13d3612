//! What each request does to the tree of a volume.
//!
//! Owns nothing. Refuses, with the error that the caller of the system call sees, what the tree refuses and all requests
//! that a volume does not know.

use std::time::Duration;

use super::Errno;
use super::attributes;
use super::content::{Content, PAGE_BYTES};
use super::protocol::{self, Answer, Fields, Request, opcode};
use super::serve::State;
use super::tree::{Body, Directory, Meta, Name, Node, ROOT, now};

/// Bytes that a volume without a limit says it has.
const CAPACITY: u64 = 64 << 30;

/// What a reader of a directory is shown: the names at the time when it was opened.
pub type Listing = Vec<(Name, u64, u32)>;

pub fn execute(state: &mut State, request: &Request) -> Result<Answer, Errno> {
    let mut fields = request.fields();
    let node = request.node;
    match request.opcode {
        opcode::INIT => Answer::init(request, state.is_direct),
        opcode::OPEN if state.is_direct => Ok(Answer::default().opened(true)),
        opcode::LOOKUP => {
            let found = state.tree.lookup(node, fields.text()?)?;
            tell(state, node, found)
        }
        opcode::GETATTR => Ok(Answer::default().node(node, state.tree.node(node)?)),
        opcode::SETATTR => set_attributes(state, node, &mut fields),
        opcode::READLINK => match &state.tree.node(node)?.body {
            Body::Link(target) => Ok(Answer(target.clone())),
            _ => Err(libc::EINVAL),
        },
        opcode::SYMLINK | opcode::MKNOD | opcode::MKDIR | opcode::CREATE => make(state, request),
        opcode::UNLINK | opcode::RMDIR => {
            state.tree.unlink(node, fields.text()?)?;
            Ok(Answer::default())
        }
        opcode::RENAME | opcode::RENAME2 => rename(state, request),
        opcode::LINK => {
            let linked = fields.u64()?;
            state.tree.link(linked, node, fields.text()?)?;
            tell(state, node, linked)
        }
        opcode::READ => {
            let (_handle, offset, bytes) = (fields.u64()?, fields.u64()?, fields.u32()?);
            state.counts.reads += 1;
            let content = state.tree.content_mut(node)?;
            let read = content.read(offset, bytes.into());
            state.counts.read_bytes += read.len() as u64;
            Ok(Answer(read))
        }
        opcode::WRITE => write(state, node, &mut fields),
        opcode::STATFS => Ok(statistics(state)),
        opcode::FSYNC | opcode::FSYNCDIR => {
            state.counts.syncs += 1;
            let (_handle, flags) = (fields.u64()?, fields.u32()?);
            let data_alone = flags & protocol::SYNC_DATA != 0;
            let synced = state.tree.sync(node, data_alone);
            synced.map(|()| Answer::default())
        }
        opcode::SETXATTR | opcode::GETXATTR | opcode::LISTXATTR | opcode::REMOVEXATTR
            if state.is_direct =>
        {
            attributes::execute(state, request)
        }
        opcode::OPENDIR => open_directory(state, node),
        opcode::READDIR => read_directory(state, &mut fields),
        opcode::RELEASEDIR => {
            state.listings.remove(&fields.u64()?);
            Ok(Answer::default())
        }
        opcode::RELEASE | opcode::DESTROY => Ok(Answer::default()),
        _ => Err(libc::ENOSYS),
    }
}

/// How many bytes a read or a write is about.
pub fn bytes(request: &Request) -> u64 {
    let mut fields = request.fields();
    let bytes = fields.bytes(16).and_then(|_| fields.u32());
    bytes.map_or(0, u64::from)
}

/// Takes note of what the kernel forgot; there is no answer to that.
pub fn forget(state: &mut State, request: &Request) -> Result<(), Errno> {
    let mut fields = request.fields();
    if request.opcode == opcode::FORGET {
        state.tree.forgotten(request.node, fields.u64()?);
        return Ok(());
    }
    let (count, _) = (fields.u32()?, fields.u32()?);
    for _ in 0..count {
        let (node, times) = (fields.u64()?, fields.u64()?);
        state.tree.forgotten(node, times);
    }
    Ok(())
}

fn tell(state: &mut State, directory: u64, number: u64) -> Result<Answer, Errno> {
    state.tree.told(number);
    let node = state.tree.node(number)?;
    Ok(Answer::default().entry(number, node, directory == ROOT))
}

fn make(state: &mut State, request: &Request) -> Result<Answer, Errno> {
    let mut fields = request.fields();
    let (mode, body) = match request.opcode {
        opcode::SYMLINK => (libc::S_IFLNK | 0o777, None),
        opcode::MKDIR => {
            let (mode, _umask) = (fields.u32()?, fields.u32()?);
            (
                mode | libc::S_IFDIR,
                Some(Body::Directory(Directory::default())),
            )
        }
        opcode::MKNOD => {
            let (mode, device) = (fields.u32()?, fields.u32()?);
            fields.bytes(8)?;
            (mode, Some(Body::Special(device)))
        }
        _ => {
            let (_flags, mode) = (fields.u32()?, fields.u32()?);
            fields.bytes(8)?;
            (mode | libc::S_IFREG, None)
        }
    };
    let name = fields.text()?;
    let body = match (mode & libc::S_IFMT, body) {
        (libc::S_IFLNK, _) => Body::Link(fields.text()?.to_vec()),
        (libc::S_IFREG, _) => Body::File(Content::default()),
        (_, body) => body.ok_or(libc::EINVAL)?,
    };
    let meta = Meta::new(mode, request.uid, request.gid);
    let number = state.tree.make(request.node, name, meta, body)?;
    let answer = tell(state, request.node, number)?;
    Ok(match request.opcode {
        opcode::CREATE => answer.opened(state.is_direct),
        _ => answer,
    })
}

fn rename(state: &mut State, request: &Request) -> Result<Answer, Errno> {
    let mut fields = request.fields();
    let target = fields.u64()?;
    let flags = match request.opcode {
        opcode::RENAME2 => {
            let (flags, _) = (fields.u32()?, fields.u32()?);
            flags
        }
        _ => 0,
    };
    if flags & !(libc::RENAME_EXCHANGE | libc::RENAME_NOREPLACE) != 0 {
        return Err(libc::EINVAL);
    }
    let (from, to) = (fields.text()?, fields.text()?);
    state
        .tree
        .rename((request.node, from), (target, to), flags)?;
    Ok(Answer::default())
}

fn write(state: &mut State, node: u64, fields: &mut Fields<'_>) -> Result<Answer, Errno> {
    let (_handle, offset, bytes) = (fields.u64()?, fields.u64()?, fields.u32()?);
    let (_kind, _owner) = (fields.u32()?, fields.u64()?);
    let (flags, _) = (fields.u32()?, fields.u32()?);
    let data = fields.bytes(bytes as usize)?;
    state.counts.writes += 1;
    state.tree.write(node, offset, data)?;
    state.counts.written_bytes += u64::from(bytes);
    // Of a write beside the cache the kernel leaves that to its file system.
    if flags & libc::O_DSYNC as u32 != 0 {
        if state.settings.fails.syncs {
            return Err(libc::EIO);
        }
        let content = state.tree.content_mut(node)?;
        content.sync_range(offset, bytes.into());
    }
    Ok(Answer::default().u32(bytes).u32(0))
}

fn set_attributes(state: &mut State, node: u64, fields: &mut Fields<'_>) -> Result<Answer, Errno> {
    let (valid, _) = (fields.u32()?, fields.u32()?);
    let (_handle, size, _owner) = (fields.u64()?, fields.u64()?, fields.u64()?);
    let seconds = [fields.u64()?, fields.u64()?, fields.u64()?];
    let nanos = [fields.u32()?, fields.u32()?, fields.u32()?];
    let (mode, _, uid, gid) = (fields.u32()?, fields.u32()?, fields.u32()?, fields.u32()?);
    let has = |what: u32| valid & what != 0;
    if has(protocol::SET_SIZE) {
        state.tree.content_mut(node)?.resize(size);
    }
    let given = |index: usize| {
        let (seconds, nanos): (Option<&u64>, Option<&u32>) = (seconds.get(index), nanos.get(index));
        Duration::new(
            seconds.copied().unwrap_or_default(),
            nanos.copied().unwrap_or_default().min(999_999_999),
        )
    };
    let meta = &mut state.tree.node_mut(node)?.meta;
    let now = now();
    meta.changed = now;
    if has(protocol::SET_MODE) {
        meta.mode = meta.mode & libc::S_IFMT | mode & !libc::S_IFMT;
    }
    if has(protocol::SET_UID) {
        meta.uid = uid;
    }
    if has(protocol::SET_GID) {
        meta.gid = gid;
    }
    if has(protocol::SET_ACCESSED_NOW) {
        meta.accessed = now;
    } else if has(protocol::SET_ACCESSED) {
        meta.accessed = given(0);
    }
    if has(protocol::SET_MODIFIED_NOW | protocol::SET_SIZE) {
        meta.modified = now;
    }
    if has(protocol::SET_MODIFIED) && !has(protocol::SET_MODIFIED_NOW) {
        meta.modified = given(1);
    }
    Ok(Answer::default().node(node, state.tree.node(node)?))
}

fn statistics(state: &State) -> Answer {
    let blocks = state.tree.capacity.unwrap_or(CAPACITY) / PAGE_BYTES;
    let free = blocks.saturating_sub(state.tree.used() / PAGE_BYTES);
    let answer = Answer::default().u64(blocks).u64(free).u64(free);
    let answer = answer.u64(blocks).u64(free).u32(PAGE_BYTES as u32).u32(255);
    let answer = answer.u32(PAGE_BYTES as u32);
    (0..7).fold(answer, |answer, _| answer.u32(0))
}

fn open_directory(state: &mut State, node: u64) -> Result<Answer, Errno> {
    let directory = state.tree.directory(node)?;
    let told = |number: &u64| {
        let node = state.tree.node(*number);
        node.map_or((0, 0), |node: &Node| (node.inode, node.meta.mode))
    };
    let (inode, _) = told(&node);
    let own = [b".".as_slice(), b".."].map(|name| (name.to_vec(), inode, libc::S_IFDIR));
    let names = directory.now.iter().map(|(name, number)| {
        let (inode, mode) = told(number);
        (name.clone(), inode, mode)
    });
    let listing: Listing = own.into_iter().chain(names).collect();
    state.last_listing += 1;
    state.listings.insert(state.last_listing, listing);
    Ok(Answer::default().u64(state.last_listing).u32(0).u32(0))
}

fn read_directory(state: &State, fields: &mut Fields<'_>) -> Result<Answer, Errno> {
    let (handle, offset, bytes) = (fields.u64()?, fields.u64()?, fields.u32()?);
    let listing = state.listings.get(&handle).ok_or(libc::EBADF)?;
    let mut answer = Answer::default();
    let left = listing.iter().enumerate().skip(offset as usize);
    for (index, (name, number, mode)) in left {
        if !answer.listed(*number, *mode, name, index as u64 + 1, bytes as usize) {
            break;
        }
    }
    Ok(answer)
}
