//! Extended attributes of a volume's files: those of users.
//!
//! Owns nothing. Refuses all other names, and what is larger than its reader has room for.

use super::Errno;
use super::protocol::{Answer, Request, opcode};
use super::serve::State;

const OF_USERS: &[u8] = b"user.";
/// Most bytes of one, as on Linux.
const BYTES_MAX: usize = 64 << 10;

pub fn execute(state: &mut State, request: &Request) -> Result<Answer, Errno> {
    let mut fields = request.fields();
    let attributes = &mut state.tree.node_mut(request.node)?.meta.attributes;
    match request.opcode {
        opcode::SETXATTR => {
            let (bytes, flags) = (fields.u32()? as usize, fields.u32()? as i32);
            let name = of_users(fields.text()?)?;
            let value = fields.bytes(bytes)?;
            match attributes.contains_key(name) {
                true if flags & libc::XATTR_CREATE != 0 => return Err(libc::EEXIST),
                false if flags & libc::XATTR_REPLACE != 0 => return Err(libc::ENODATA),
                _ if bytes > BYTES_MAX => return Err(libc::E2BIG),
                _ => {}
            }
            attributes.insert(name.to_vec(), value.to_vec());
            Ok(Answer::default())
        }
        opcode::GETXATTR => {
            let (room, _) = (fields.u32()?, fields.u32()?);
            let name = of_users(fields.text()?)?;
            told(attributes.get(name).ok_or(libc::ENODATA)?, room)
        }
        opcode::LISTXATTR => {
            let (room, _) = (fields.u32()?, fields.u32()?);
            let names: Vec<u8> = attributes
                .keys()
                .flat_map(|name| [name, &b"\0"[..]].concat())
                .collect();
            told(&names, room)
        }
        _ => {
            let name = of_users(fields.text()?)?;
            attributes.remove(name).ok_or(libc::ENODATA)?;
            Ok(Answer::default())
        }
    }
}

fn of_users(name: &[u8]) -> Result<&[u8], Errno> {
    match name.starts_with(OF_USERS) {
        true => Ok(name),
        false => Err(libc::EOPNOTSUPP),
    }
}

/// The bytes; their number alone for whoever has no room.
fn told(bytes: &[u8], room: u32) -> Result<Answer, Errno> {
    match room {
        0 => Ok(Answer::default().u32(bytes.len() as u32).u32(0)),
        room if bytes.len() > room as usize => Err(libc::ERANGE),
        _ => Ok(Answer(bytes.to_vec())),
    }
}
