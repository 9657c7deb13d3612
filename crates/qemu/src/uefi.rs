//! UEFI as the host's distribution has it: the firmware's program and the empty variables that go with it.
//!
//! Owns nothing. A guest runs the program from memory of its own, which moves with it, so two hosts need not have the same
//! build, but memory of the same lengths. Refuses: files that are none, and lengths that make no flash memory. Secure boot is not
//! for these machines: they have no SMM, and a program that wants it does not start in them.

use godwit_types::host_api::UefiSizes;
use rustix::fs::{Mode, OFlags, open};
use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

/// Most bytes of program and variables together, as QEMU has it.
pub const FLASH_MAX: u64 = 8 << 20;
/// Their lengths are multiples of this.
const SECTOR: u64 = 4096;

/// Where distributions have the two files: Debian and Ubuntu, Fedora and its kin, Arch, openSUSE.
const PLACES: [(&str, &str); 6] = [
    (
        "/usr/share/OVMF/OVMF_CODE_4M.fd",
        "/usr/share/OVMF/OVMF_VARS_4M.fd",
    ),
    (
        "/usr/share/edk2/ovmf/OVMF_CODE.fd",
        "/usr/share/edk2/ovmf/OVMF_VARS.fd",
    ),
    (
        "/usr/share/edk2/x64/OVMF_CODE.4m.fd",
        "/usr/share/edk2/x64/OVMF_VARS.4m.fd",
    ),
    (
        "/usr/share/qemu/ovmf-x86_64-4m-code.bin",
        "/usr/share/qemu/ovmf-x86_64-4m-vars.bin",
    ),
    (
        "/usr/share/OVMF/OVMF_CODE.fd",
        "/usr/share/OVMF/OVMF_VARS.fd",
    ),
    (
        "/usr/share/qemu/edk2-x86_64-code.fd",
        "/usr/share/qemu/edk2-i386-vars.fd",
    ),
];

/// Why a host has no UEFI for its guests.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UefiError {
    /// Nowhere where it is looked for.
    #[error(
        "it has no UEFI firmware: install it (package ovmf, edk2-ovmf or qemu-ovmf-x86_64), or name its files with uefi_code and uefi_variables in host.toml"
    )]
    Missing,
    #[error("its UEFI firmware {path} cannot be read: {source}")]
    Io {
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    #[error("its UEFI firmware {path} is no regular file")]
    Kind { path: PathBuf },
    /// QEMU would not start with it.
    #[error(
        "its UEFI firmware ({code} with {code_bytes} bytes and {variables} with {variables_bytes}) is no raw image for flash memory: each must be of whole 4096 bytes, and both together at most 8 MiB"
    )]
    Length {
        code: PathBuf,
        code_bytes: u64,
        variables: PathBuf,
        variables_bytes: u64,
    },
}

/// A host's UEFI, open.
#[derive(Debug)]
pub struct Uefi {
    pub code: File,
    /// What a new VM's variables are made from.
    empty: File,
    pub sizes: UefiSizes,
}

impl Uefi {
    /// Opens what is configured; where nothing is, what a distribution has.
    pub fn open(code: &str, variables: &str) -> Result<Self, UefiError> {
        match (code.is_empty(), variables.is_empty()) {
            (true, true) => {
                let there = |(code, variables): &(&str, &str)| {
                    Path::new(code).exists() && Path::new(variables).exists()
                };
                let (code, variables) = PLACES.into_iter().find(there).ok_or(UefiError::Missing)?;
                Self::at(Path::new(code), Path::new(variables))
            }
            _ => Self::at(Path::new(code), Path::new(variables)),
        }
    }

    fn at(code: &Path, variables: &Path) -> Result<Self, UefiError> {
        let ((program, code_bytes), (empty, variables_bytes)) =
            (open_image(code)?, open_image(variables)?);
        let fits = |bytes: u64| bytes > 0 && bytes.is_multiple_of(SECTOR) && bytes <= FLASH_MAX;
        if !fits(code_bytes) || !fits(variables_bytes) || code_bytes + variables_bytes > FLASH_MAX {
            return Err(UefiError::Length {
                code: code.to_owned(),
                code_bytes,
                variables: variables.to_owned(),
                variables_bytes,
            });
        }
        Ok(Self {
            code: program,
            empty,
            sizes: UefiSizes {
                code: code_bytes,
                variables: variables_bytes,
            },
        })
    }

    /// The variables of a VM that has none.
    pub fn empty_variables(&self) -> io::Result<Vec<u8>> {
        let mut content = Vec::new();
        (&self.empty)
            .take(self.sizes.variables)
            .read_to_end(&mut content)?;
        match content.len() as u64 == self.sizes.variables {
            true => Ok(content),
            false => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
}

/// A pipe must not hold the caller up.
fn open_image(path: &Path) -> Result<(File, u64), UefiError> {
    let failed = |source| UefiError::Io {
        path: path.to_owned(),
        source,
    };
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
    let file = open(path, flags, Mode::empty()).map_err(|errno| failed(errno.into()))?;
    let file = File::from(file);
    let found = file.metadata().map_err(failed)?;
    match found.is_file() {
        true => Ok((file, found.len())),
        false => Err(UefiError::Kind {
            path: path.to_owned(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(lengths: [u64; 2]) -> (tempfile::TempDir, String, String) {
        let dir = tempfile::tempdir().unwrap();
        let paths = ["code", "variables"].map(|name| dir.path().join(name));
        for (path, length) in paths.iter().zip(lengths) {
            File::create(path).unwrap().set_len(length).unwrap();
        }
        let [code, variables] = paths.map(|path| path.display().to_string());
        (dir, code, variables)
    }

    #[test]
    fn what_makes_no_flash_memory_is_refused_and_named() {
        let (_dir, code, variables) = files([8192, 4096]);
        let uefi = Uefi::open(&code, &variables).unwrap();
        assert_eq!((uefi.sizes.code, uefi.sizes.variables), (8192, 4096));
        assert_eq!(uefi.empty_variables().unwrap(), [0; 4096]);
        for lengths in [
            [0, 4096],
            [8192, 100],
            [8 << 20, 4096],
            [u64::from(u32::MAX), 4096],
        ] {
            let (_dir, code, variables) = files(lengths);
            let refusal = Uefi::open(&code, &variables).unwrap_err().to_string();
            assert!(
                refusal.contains(&code) && refusal.contains("4096"),
                "{refusal}"
            );
        }
    }

    #[test]
    fn what_is_not_there_or_is_no_file_is_named() {
        let (dir, code, variables) = files([8192, 4096]);
        let gone = dir.path().join("gone").display().to_string();
        let refusal = Uefi::open(&gone, &variables).unwrap_err().to_string();
        assert!(refusal.contains(&gone), "{refusal}");
        let refusal = Uefi::open(&code, "/dev/null").unwrap_err().to_string();
        assert!(
            refusal.contains("/dev/null is no regular file"),
            "{refusal}"
        );
    }
}
