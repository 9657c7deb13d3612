//! Identities and the CA as files in a directory: `ca.pem`, `ca.key`, `cert.pem`, `key.pem`.
//!
//! Keys are written with mode 0600 from the first byte on, through a temporary file that is synced and renamed.
//! Refuses: to overwrite a CA.

use crate::pki::{Authority, Identity, PkiError};
use godwit_store::read_text;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use zeroize::Zeroizing;

const PEM_LEN_MAX: u64 = 1 << 16;

/// Writes `bytes` durably under `path` with `mode`.
pub fn write_file(path: &Path, bytes: &[u8], mode: u32) -> Result<(), PkiError> {
    write_inner(path, bytes, mode).map_err(|source| PkiError::File {
        doing: "write",
        path: path.display().to_string(),
        source,
    })
}

fn write_inner(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    let temporary = path.with_extension("new");
    let _ = fs::remove_file(&temporary);
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(mode)
        .open(&temporary)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(&temporary, path)?;
    match path.parent() {
        Some(parent) => File::open(parent)?.sync_all(),
        None => Ok(()),
    }
}

fn read_file(path: &Path) -> Result<Zeroizing<String>, PkiError> {
    let read = read_text(path, PEM_LEN_MAX);
    let text = read.and_then(|text| text.ok_or_else(|| io::ErrorKind::NotFound.into()));
    text.map(Zeroizing::new).map_err(|source| PkiError::File {
        doing: "read",
        path: path.display().to_string(),
        source,
    })
}

impl Identity {
    /// Writes `cert.pem`, `key.pem` and `ca.pem` into a directory.
    pub fn save(&self, dir: &Path) -> Result<(), PkiError> {
        write_file(&dir.join("ca.pem"), self.ca_pem.as_bytes(), 0o644)?;
        write_file(&dir.join("key.pem"), self.key_pem.as_bytes(), 0o600)?;
        write_file(
            &dir.join("cert.pem"),
            self.certificate_pem.as_bytes(),
            0o644,
        )
    }

    /// Reads what [`Identity::save`] wrote.
    pub fn load(dir: &Path) -> Result<Self, PkiError> {
        let identity = Self {
            certificate_pem: read_file(&dir.join("cert.pem"))?.to_string(),
            key_pem: read_file(&dir.join("key.pem"))?,
            ca_pem: read_file(&dir.join("ca.pem"))?.to_string(),
        };
        identity.holder()?;
        identity.key()?;
        Ok(identity)
    }
}

impl Authority {
    /// Writes `ca.key` and `ca.pem` into a directory that has no CA yet.
    pub fn save(&self, dir: &Path) -> Result<(), PkiError> {
        let key = dir.join("ca.key");
        if key.exists() {
            return Err(PkiError::File {
                doing: "write",
                path: key.display().to_string(),
                source: io::ErrorKind::AlreadyExists.into(),
            });
        }
        write_file(
            &dir.join("ca.pem"),
            self.certificate_pem().as_bytes(),
            0o644,
        )?;
        write_file(&key, self.key_pem().as_bytes(), 0o600)
    }

    /// Reads what [`Authority::save`] wrote.
    pub fn load(dir: &Path) -> Result<Self, PkiError> {
        let certificate = read_file(&dir.join("ca.pem"))?.to_string();
        Self::from_pem(certificate, &read_file(&dir.join("ca.key"))?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pki::Role;
    use std::os::unix::fs::PermissionsExt as _;

    #[test]
    fn keys_are_for_their_owner_only_and_a_ca_is_never_overwritten() {
        let dir = tempfile::tempdir().unwrap();
        let ca = Authority::create(1_800_000_000).unwrap();
        ca.save(dir.path()).unwrap();
        let identity = ca.identity(&Role::Controller, 1_800_000_000).unwrap();
        identity.save(dir.path()).unwrap();
        for key in ["ca.key", "key.pem"] {
            let mode = fs::metadata(dir.path().join(key))
                .unwrap()
                .permissions()
                .mode();
            assert_eq!(mode & 0o777, 0o600, "{key}");
        }
        assert!(
            Authority::create(1_800_000_000)
                .unwrap()
                .save(dir.path())
                .is_err()
        );
        let again = Authority::load(dir.path()).unwrap();
        assert_eq!(again.fingerprint(), ca.fingerprint());
        let certificate = dir.path().join("cert.pem");
        let kept = fs::read(&certificate).unwrap();
        fs::remove_file(&certificate).unwrap();
        rustix::fs::mkfifoat(rustix::fs::CWD, &certificate, 0o600.into()).unwrap();
        let error = Identity::load(dir.path()).err().unwrap().to_string();
        assert!(
            error.contains("cert.pem") && error.contains("a named pipe"),
            "{error}"
        );
        fs::remove_file(&certificate).unwrap();
        fs::write(&certificate, kept).unwrap();
        let loaded = Identity::load(dir.path()).unwrap();
        assert_eq!(loaded.holder().unwrap(), identity.holder().unwrap());
    }
}
