//! Where QEMU connects to a disk: a socket that is there while somebody would be heard, and only then.
//!
//! QEMU waits without end for the first answer to a connection, and nobody can command it meanwhile; a socket that is not
//! there it tries again.
//!
//! Who owns the state: the disk's thread; the path belongs to whoever opened it last. One that is closed late, since the disk
//! of a QEMU that is gone ends while the next one is served already, leaves the socket that has taken its place.

use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Instant;

use crate::Error;
use crate::disk::{AGAIN, Device, LISTENER};

/// A place for a socket.
#[derive(Debug)]
pub(crate) struct Listener {
    path: PathBuf,
    /// User, who may connect beside root, and group.
    owner: Option<(u32, u32)>,
    /// With the file that it is at its place.
    socket: Option<(UnixListener, File)>,
}

/// File system and inode.
type File = (u64, u64);

fn file_at(path: &Path) -> io::Result<File> {
    let found = fs::symlink_metadata(path)?;
    Ok((found.dev(), found.ino()))
}

impl Listener {
    /// Nobody is heard there yet.
    pub(crate) fn new(path: PathBuf, owner: Option<(u32, u32)>) -> Self {
        Self {
            path,
            owner,
            socket: None,
        }
    }

    pub(crate) fn is_open(&self) -> bool {
        self.socket.is_some()
    }

    /// Takes the place of whatever is there.
    pub(crate) fn open(&mut self) -> Result<BorrowedFd<'_>, Error> {
        let made = self.make().map_err(|source| Error::Listen {
            path: self.path.clone(),
            source,
        })?;
        let (socket, _) = &*self.socket.insert(made);
        Ok(socket.as_fd())
    }

    /// The name is there once its rights are.
    fn make(&self) -> io::Result<(UnixListener, File)> {
        let mut name = self.path.clone().into_os_string();
        name.push("~");
        let new = PathBuf::from(name);
        match fs::remove_file(&new) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let socket = UnixListener::bind(&new)?;
        socket.set_nonblocking(true)?;
        fs::set_permissions(&new, fs::Permissions::from_mode(0o600))?;
        if let Some((uid, gid)) = self.owner {
            std::os::unix::fs::lchown(&new, Some(uid), Some(gid))?;
        }
        let file = file_at(&new)?;
        fs::rename(&new, &self.path)?;
        Ok((socket, file))
    }

    pub(crate) fn accept(&self) -> io::Result<UnixStream> {
        let (socket, _) = self.socket.as_ref().ok_or(io::ErrorKind::WouldBlock)?;
        Ok(socket.accept()?.0)
    }

    /// Whoever comes now is refused at once.
    pub(crate) fn close(&mut self) {
        if let Some((_socket, file)) = self.socket.take()
            && file_at(&self.path).is_ok_and(|found| found == file)
        {
            let _ = fs::remove_file(&self.path);
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.close();
    }
}

impl Device {
    /// One front end at a time, and none while requests of an earlier one are under way.
    pub(crate) fn listen(&mut self) -> Result<(), Error> {
        let wanted = self.session.connection.is_none() && self.stack.under_way() == 0;
        if wanted && !self.listener.is_open() {
            let watched = self.stack.bottom.watch(self.listener.open()?, LISTENER);
            // Whoever connects to a socket that nobody hears waits without end.
            watched.inspect_err(|_| self.listener.close())?;
        } else if !wanted && self.listener.is_open() {
            self.end_listening();
        }
        Ok(())
    }

    fn end_listening(&mut self) {
        self.stack.bottom.unwatch(LISTENER);
        self.listener.close();
    }

    pub(crate) fn listen_or_try_again(&mut self) {
        let now = Instant::now();
        if self.listen_again.is_some_and(|at| at > now) {
            return;
        }
        self.listen_again = None;
        if let Err(error) = self.listen() {
            tracing::warn!(disk = self.name, %error, "QEMU cannot connect to its disk; this is tried again");
            self.listen_again = Some(now + AGAIN);
        }
    }

    pub(crate) fn accept(&mut self) {
        if self.session.connection.is_some() {
            return;
        }
        match self.listener.accept() {
            Ok(socket) => self.connect(socket),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(error) => {
                tracing::warn!(disk = self.name, %error, "QEMU's connection to its disk was not taken; this is tried again");
                self.end_listening();
                self.listen_again = Some(Instant::now() + AGAIN);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_stays_that_has_taken_the_place_of_one_that_is_closed_later() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk");
        let [mut former, mut next] = [(); 2].map(|()| Listener::new(path.clone(), None));
        former.open().unwrap();
        next.open().unwrap();
        former.close();
        UnixStream::connect(&path).unwrap();
        next.accept().unwrap();
        next.close();
        assert!(!path.exists());
    }
}
