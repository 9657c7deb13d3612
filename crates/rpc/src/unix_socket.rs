//! The local socket of a program: made so that it is never open to more people than it is for.
//!
//! Owns the file in the file system while its program runs. Refuses a place where another program answers.

use std::io;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use tokio::net::UnixListener;

/// The group whose members may use a local socket.
const GROUP: &str = "godwit";

/// Binds a Unix socket with mode 0660 and group `godwit` where that exists. A socket that a dead process left is
/// replaced; one that answers is not. Must be called within a tokio runtime.
pub fn bind_unix(path: &Path) -> io::Result<UnixListener> {
    if std::os::unix::net::UnixStream::connect(path).is_ok() {
        return Err(io::ErrorKind::AddrInUse.into());
    }
    // A directory that others may pass through: the socket's own mode says who may connect.
    if let Some(directory) = path.parent() {
        std::os::unix::fs::DirBuilderExt::mode(std::fs::DirBuilder::new().recursive(true), 0o755)
            .create(directory)?;
    }
    // Bound under another name and renamed, so that it never can be opened before its mode is set.
    let temporary = path.with_extension("new");
    let _ = std::fs::remove_file(&temporary);
    let listener = UnixListener::bind(&temporary)?;
    std::fs::set_permissions(&temporary, std::fs::Permissions::from_mode(0o660))?;
    if let Some(group) = group_id(GROUP) {
        std::os::unix::fs::chown(&temporary, None, Some(group))?;
    }
    std::fs::rename(&temporary, path)?;
    Ok(listener)
}

/// A Unix socket that was bound here: a program that ends leaves none that nobody listens on.
#[derive(Debug)]
pub struct OwnSocket {
    path: PathBuf,
    identity: Option<(u64, u64)>,
}

impl OwnSocket {
    /// The one that lies at `path` now.
    pub fn of(path: PathBuf) -> Self {
        let identity = identity(&path);
        Self { path, identity }
    }

    /// Takes it away, unless another program's lies there by now.
    pub fn remove(self) {
        if self.identity.is_none() || self.identity != identity(&self.path) {
            return;
        }
        if let Err(error) = std::fs::remove_file(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "a socket that nobody listens on is left behind");
        }
    }
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    let found = std::fs::symlink_metadata(path).ok()?;
    Some((found.dev(), found.ino()))
}

fn group_id(name: &str) -> Option<u32> {
    let groups = std::fs::read_to_string("/etc/group").ok()?;
    groups.lines().find_map(|line| {
        let mut fields = line.split(':');
        (fields.next() == Some(name)).then(|| fields.nth(1)?.parse().ok())?
    })
}
