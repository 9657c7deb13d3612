//! Identities and the CA as files in a directory: `ca.pem`, `ca.key`, `cert.pem`, `key.pem`.
//!
//! Keys are written with mode 0600 from the first byte on, through a temporary file that is synced and renamed. Where an
//! identity replaces another, key and certificate stand beside the old ones, as `next.key` and `next.pem`, before either
//! is renamed: a process that ends at any step leaves a pair that fits, the old one or the new one, and what is read is
//! the newest pair that fits. Refuses: to overwrite a CA.

use crate::pki::{Authority, Identity, PkiError, certificate_from_pem};
use godwit_store::read_text;
use rcgen::PublicKeyData as _;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use x509_parser::prelude::{FromDer as _, X509Certificate};
use zeroize::Zeroizing;

/// A key that is about to be the present one.
const NEXT_KEY: &str = "next.key";
/// A certificate that is about to be the present one.
const NEXT_CERTIFICATE: &str = "next.pem";
/// Locked by who replaces an identity.
const TURN: &str = "turn";
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
    let temporary = path.with_added_extension("new");
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
    let none = || io::Error::new(io::ErrorKind::NotFound, "no such file");
    let text = read.and_then(|text| text.ok_or_else(none));
    text.map(Zeroizing::new).map_err(|source| PkiError::File {
        doing: "read",
        path: path.display().to_string(),
        source,
    })
}

impl Identity {
    /// Writes `cert.pem`, `key.pem` and `ca.pem` into a directory, in place of what is there.
    pub fn save(&self, dir: &Path) -> Result<(), PkiError> {
        // An agent and a person's command may do so at the same time: their steps must not mix.
        let _turn = turn(dir)?;
        // What an earlier renewal left half done is ended first: its key is not to be written over before that.
        settle(dir)?;
        for step in self.steps() {
            take(dir, &step)?;
        }
        Ok(())
    }

    fn steps(&self) -> [Step<'_>; 5] {
        [
            Step::Write("ca.pem", &self.ca_pem, 0o644),
            Step::Write(NEXT_KEY, &self.key_pem, 0o600),
            Step::Write(NEXT_CERTIFICATE, &self.certificate_pem, 0o644),
            Step::Rename(NEXT_KEY, "key.pem"),
            Step::Rename(NEXT_CERTIFICATE, "cert.pem"),
        ]
    }

    /// Reads what [`Identity::save`] wrote.
    pub fn load(dir: &Path) -> Result<Self, PkiError> {
        let ca_pem = read_file(&dir.join("ca.pem"))?.to_string();
        if let Some((certificate_pem, key_pem, _)) = next_pair(dir) {
            return Ok(Self {
                certificate_pem,
                key_pem,
                ca_pem,
            });
        }
        let identity = Self {
            certificate_pem: read_file(&dir.join("cert.pem"))?.to_string(),
            key_pem: read_file(&dir.join("key.pem"))?,
            ca_pem,
        };
        identity.holder()?;
        if !fits(&identity.certificate_pem, &identity.key_pem) {
            return Err(PkiError::Certificate(format!(
                "{} is not for the key in {}",
                dir.join("cert.pem").display(),
                dir.join("key.pem").display()
            )));
        }
        Ok(identity)
    }
}

/// Waits for the turn to replace what is in a directory; it ends with the value.
fn turn(dir: &Path) -> Result<File, PkiError> {
    let path = dir.join(TURN);
    let mut options = OpenOptions::new();
    options.create(true).truncate(false).write(true).mode(0o600);
    let locked = options.open(&path).and_then(|file| {
        file.lock()?;
        Ok(file)
    });
    locked.map_err(|source| PkiError::File {
        doing: "lock",
        path: path.display().to_string(),
        source,
    })
}

/// One step of replacing an identity; each is durable before the next.
enum Step<'a> {
    Write(&'static str, &'a str, u32),
    Rename(&'static str, &'static str),
}

fn take(dir: &Path, step: &Step<'_>) -> Result<(), PkiError> {
    match step {
        Step::Write(name, text, mode) => write_file(&dir.join(name), text.as_bytes(), *mode),
        Step::Rename(from, to) => rename(dir, from, to),
    }
}

fn rename(dir: &Path, from: &str, to: &str) -> Result<(), PkiError> {
    let renamed = fs::rename(dir.join(from), dir.join(to));
    let synced = renamed.and_then(|()| File::open(dir)?.sync_all());
    synced.map_err(|source| PkiError::File {
        doing: "write",
        path: dir.join(to).display().to_string(),
        source,
    })
}

/// A certificate that is about to replace the present one, with its key and the name of the file that has that. None
/// where there is none, or no key for it: it then counts for nothing.
fn next_pair(dir: &Path) -> Option<(String, Zeroizing<String>, &'static str)> {
    let certificate = read_file(&dir.join(NEXT_CERTIFICATE)).ok()?.to_string();
    for name in [NEXT_KEY, "key.pem"] {
        let Ok(key) = read_file(&dir.join(name)) else {
            continue;
        };
        if fits(&certificate, &key) {
            return Some((certificate, key, name));
        }
    }
    None
}

/// Ends a replacement that was begun.
fn settle(dir: &Path) -> Result<(), PkiError> {
    let Some((_, _, key)) = next_pair(dir) else {
        return Ok(());
    };
    if key == NEXT_KEY {
        rename(dir, NEXT_KEY, "key.pem")?;
    }
    rename(dir, NEXT_CERTIFICATE, "cert.pem")
}

/// Whether a certificate is for a key.
fn fits(certificate_pem: &str, key_pem: &str) -> bool {
    let key = rcgen::KeyPair::from_pem(key_pem);
    let certificate = certificate_from_pem(certificate_pem);
    let (Ok(key), Ok(der)) = (key, certificate) else {
        return false;
    };
    let parsed = X509Certificate::from_der(&der);
    parsed.is_ok_and(|(_, certificate)| {
        certificate.public_key().subject_public_key.data.as_ref() == key.der_bytes()
    })
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

    fn serial(dir: &Path) -> String {
        Identity::load(dir).unwrap().holder().unwrap().serial
    }

    #[test]
    fn a_renewal_that_ends_at_any_step_leaves_a_pair_that_fits() {
        let ca = Authority::create(1_800_000_000).unwrap();
        let identity = || ca.identity(&Role::Controller, 1_800_000_000).unwrap();
        let of = |identity: &Identity| identity.holder().unwrap().serial;
        let [old, new, newest] = [identity(), identity(), identity()];
        for taken in 0..=5 {
            let dir = tempfile::tempdir().unwrap();
            old.save(dir.path()).unwrap();
            for step in new.steps().iter().take(taken) {
                take(dir.path(), step).unwrap();
            }
            // Until the new certificate is there, the old one with its key is.
            let expected = if taken < 3 { &old } else { &new };
            assert_eq!(serial(dir.path()), of(expected), "after {taken} steps");
            // The next renewal may end at any step, too.
            for again in 0..=5 {
                settle(dir.path()).unwrap();
                for step in newest.steps().iter().take(again) {
                    take(dir.path(), step).unwrap();
                }
                let expected = if again < 3 { expected } else { &newest };
                assert_eq!(serial(dir.path()), of(expected), "{taken}, then {again}");
                expected.save(dir.path()).unwrap();
                assert_eq!(serial(dir.path()), of(expected));
            }
            let left = ["next.key", "next.pem"].map(|name| dir.path().join(name).exists());
            assert_eq!(left, [false, false]);
        }
    }

    #[test]
    fn two_who_replace_an_identity_at_the_same_time_leave_a_pair_that_fits() {
        let dir = tempfile::tempdir().unwrap();
        let ca = Authority::create(1_800_000_000).unwrap();
        let identities: Vec<Identity> = (0..8)
            .map(|_| ca.identity(&Role::Controller, 1_800_000_000).unwrap())
            .collect();
        std::thread::scope(|scope| {
            for identity in &identities {
                scope.spawn(|| (0..5).for_each(|_| identity.save(dir.path()).unwrap()));
            }
        });
        let left = serial(dir.path());
        assert!(
            identities
                .iter()
                .any(|it| it.holder().unwrap().serial == left)
        );
    }

    #[test]
    fn a_certificate_for_another_key_is_not_loaded() {
        let dir = tempfile::tempdir().unwrap();
        let ca = Authority::create(1_800_000_000).unwrap();
        let identity = || ca.identity(&Role::Controller, 1_800_000_000).unwrap();
        identity().save(dir.path()).unwrap();
        fs::write(dir.path().join("key.pem"), &*identity().key_pem).unwrap();
        let error = Identity::load(dir.path()).err().unwrap().to_string();
        assert!(error.contains("is not for the key"), "{error}");
    }

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
