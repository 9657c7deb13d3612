//! A planned renewal: this process becomes another program, which has its disks over QEMU's connections.
//!
//! The kernel puts the new program in the place of the old one (`execve`): the same process, in the same control group, with
//! the same log. Nothing of the old program is left then that could write an image, and nobody else comes between the two. All that
//! crosses is one letter, with the descriptors beside it, in a socket that the new program is told of on its command line: one that
//! does not know such a letter ends at once, and its connections with it. A death at any moment, a letter that is not
//! understood, a disk that does not come to rest in time: QEMU connects again, and what was under way stands in the in-flight area.
//!
//! Owns the letter. Refuses: a letter of another format, or that does not tell of what came with it; to go on in a program
//! that needs rights which the one before had given up.

use crate::disks::HAND_OVER_WAIT;
use crate::faults::{planted, reached};
use crate::harden::kept;
use crate::vm::Vm;
use anyhow::{Context as _, bail, ensure};
use godwit_qemu::inherited::{ignore_broken_pipes, inherited};
use godwit_vhost::{Handover, Told};
use rustix::io::FdFlags;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};
use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex};

/// The word on the command line before the descriptor's number.
const ARGUMENT: &str = "--handed";
/// Another one is not read.
const FORMAT: u32 = 1;
/// Longest letter, bytes: sixteen disks take a fifth of it.
const LETTER_MAX: usize = 128 << 10;
/// Most descriptors of one message, as the kernel has it.
const FDS_MAX: usize = 253;

/// What a program tells the one that takes its place.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Letter {
    format: u32,
    /// Of which QEMU of this VM the disks are.
    launch: u64,
    /// The rights that the program before had kept.
    rights: u64,
    disks: Vec<Enclosed>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Enclosed {
    /// Its place among the VM's disks.
    disk: usize,
    told: Told,
    /// How many of the descriptors are its.
    fds: usize,
}

/// The disks of a QEMU, by their places.
#[derive(Debug)]
pub(crate) struct HandedDisks {
    pub launch: u64,
    pub disks: Vec<(usize, Handover)>,
}

/// What a program before this one left, until somebody takes it. Clones are the same one.
#[derive(Debug, Clone, Default)]
pub(crate) struct Handed(Arc<Mutex<Option<HandedDisks>>>);

impl Handed {
    /// What came behind this descriptor. Refused where this program needs rights that cannot be gained any more: one that is
    /// started anew has them.
    pub(crate) fn received(number: Option<RawFd>) -> anyhow::Result<Self> {
        let Some(number) = number else {
            return Ok(Self::default());
        };
        let socket = inherited(number);
        let socket = socket.with_context(|| format!("descriptor {number} was not handed over"))?;
        let letter = read(socket.as_fd());
        reached("renewal.begun");
        match letter {
            Ok((rights, _)) if kept().bits() & !rights != 0 => bail!(
                "this version needs rights that the one before had given up: it has to be started anew"
            ),
            Ok((_, disks)) => Ok(Self(Arc::new(Mutex::new(Some(disks))))),
            Err(error) => {
                tracing::warn!(
                    error = format!("{error:#}"),
                    "what the program before handed over is not taken: QEMU connects again"
                );
                Ok(Self::default())
            }
        }
    }

    pub(crate) fn take(&self) -> Option<HandedDisks> {
        crate::adoption::lock(&self.0).take()
    }
}

fn read(socket: BorrowedFd<'_>) -> anyhow::Result<(u64, HandedDisks)> {
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut beside = RecvAncillaryBuffer::new(&mut space);
    let mut bytes = vec![0; LETTER_MAX];
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let got = rustix::net::recvmsg(
        socket,
        &mut [IoSliceMut::new(&mut bytes)],
        &mut beside,
        flags,
    );
    let mut fds: Vec<OwnedFd> = Vec::new();
    for message in beside.drain() {
        if let RecvAncillaryMessage::ScmRights(some) = message {
            fds.extend(some);
        }
    }
    let got = got.context("the letter cannot be read")?;
    let is_cut = got
        .flags
        .intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC);
    ensure!(!is_cut, "the letter is too long");
    bytes.truncate(got.bytes);
    understood(&bytes, fds)
}

/// What a letter tells of the descriptors beside it.
fn understood(letter: &[u8], fds: Vec<OwnedFd>) -> anyhow::Result<(u64, HandedDisks)> {
    let letter: Letter = serde_json::from_slice(letter).context("the letter is not understood")?;
    ensure!(
        letter.format == FORMAT,
        "it is a letter of format {}",
        letter.format
    );
    let (count, mut fds) = (fds.len(), fds.into_iter());
    let mut disks: Vec<(usize, Handover)> = Vec::new();
    for Enclosed {
        disk,
        told,
        fds: wanted,
    } in letter.disks
    {
        let own: Vec<OwnedFd> = fds.by_ref().take(wanted).collect();
        ensure!(
            own.len() == wanted,
            "{count} descriptors came, and it tells of more"
        );
        let is_new = disks.iter().all(|(other, _)| *other != disk);
        ensure!(is_new, "it tells of disk {disk} twice");
        disks.push((disk, Handover::of(told, own)));
    }
    ensure!(
        fds.next().is_none(),
        "{count} descriptors came, and it tells of fewer"
    );
    let launch = letter.launch;
    Ok((letter.rights, HandedDisks { launch, disks }))
}

/// A socket that holds the letter; nothing else comes out of it.
fn written(handed: HandedDisks) -> io::Result<OwnedFd> {
    let (mut disks, mut fds) = (Vec::new(), Vec::new());
    for (disk, handover) in handed.disks {
        if planted("renewal-hands-no-disk") {
            continue;
        }
        let (told, own) = handover.into_parts();
        let fds_of = own.len();
        disks.push(Enclosed {
            disk,
            told,
            fds: fds_of,
        });
        fds.extend(own);
    }
    let letter = Letter {
        format: FORMAT,
        launch: handed.launch,
        rights: kept().bits(),
        disks,
    };
    let letter = serde_json::to_vec(&letter)?;
    let kind = (
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
    );
    let (ours, theirs) = rustix::net::socketpair(kind.0, kind.1, kind.2, None)?;
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut beside = SendAncillaryBuffer::new(&mut space);
    let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
    if !fds.is_empty() && !beside.push(SendAncillaryMessage::ScmRights(&fds)) {
        return Err(io::Error::other("there are too many descriptors"));
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    let sent = rustix::net::sendmsg(&ours, &[IoSlice::new(&letter)], &mut beside, flags)?;
    match sent == letter.len() {
        true => Ok(theirs),
        false => Err(io::Error::other("the letter was cut")),
    }
}

/// The words after the program's name that this process was started with, without an earlier letter.
fn own_words() -> Vec<OsString> {
    let mut words: Vec<OsString> = std::env::args_os().skip(1).collect();
    if let Some(at) = words.iter().position(|word| word == ARGUMENT) {
        words.drain(at..words.len().min(at + 2));
    }
    words
}

/// Becomes that program; returns only if it does not.
fn become_program(program: &Path, handed: HandedDisks) -> io::Error {
    let socket = match written(handed) {
        Ok(socket) => socket,
        Err(error) => return error,
    };
    if let Err(error) = rustix::io::fcntl_setfd(&socket, FdFlags::empty()) {
        return error.into();
    }
    let mut command = Command::new(program);
    command.args(own_words()).arg(ARGUMENT);
    reached("renewal.handed");
    let error = command.arg(socket.as_raw_fd().to_string()).exec();
    // It was on its way to a program that might not.
    ignore_broken_pipes();
    error
}

impl Vm {
    /// Becomes the program that was asked for, if one was. Goes on as it was where that fails.
    pub(crate) fn renew(&mut self) {
        let Some(program) = self.renewal.take() else {
            return;
        };
        tracing::info!(program = %program.display(), "this process becomes another program");
        let why = match &self.hyper {
            None => become_program(
                &program,
                HandedDisks {
                    launch: 0,
                    disks: Vec::new(),
                },
            )
            .to_string(),
            Some(hyper) => {
                hyper.console.rest();
                // Their end would take long while the disks stand still.
                hyper.ram.leave_pages();
                let launch = hyper.identity.launch;
                let handed = hyper.disks.hand_over(HAND_OVER_WAIT, |disks| {
                    become_program(&program, HandedDisks { launch, disks })
                });
                handed.map_or_else(|why| why, |error| error.to_string())
            }
        };
        tracing::error!(program = %program.display(), why, "this process is not renewed: it goes on as it is");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told() -> Told {
        serde_json::from_str(
            r#"{"mute":false,"features":0,"regions":[],"back_channel":false,"queues":[]}"#,
        )
        .unwrap()
    }

    fn fd() -> OwnedFd {
        std::fs::File::open("/dev/null").unwrap().into()
    }

    fn handed(counts: &[usize]) -> HandedDisks {
        let disk = |(place, &count): (usize, &usize)| {
            (
                place,
                Handover::of(told(), (0..count).map(|_| fd()).collect()),
            )
        };
        HandedDisks {
            launch: 7,
            disks: counts.iter().enumerate().map(disk).collect(),
        }
    }

    #[test]
    fn a_letter_comes_as_it_was_sent_and_once() {
        let socket = written(handed(&[3, 0, 11])).unwrap();
        let (rights, disks) = read(socket.as_fd()).unwrap();
        assert_eq!((rights, disks.launch), (kept().bits(), 7));
        let parts = disks.disks.into_iter();
        let parts = parts.map(|(place, handover)| (place, handover.into_parts().1.len()));
        assert_eq!(parts.collect::<Vec<_>>(), [(0, 3), (1, 0), (2, 11)]);
        assert!(read(socket.as_fd()).is_err(), "nothing more comes");
    }

    #[test]
    fn more_descriptors_than_the_kernel_takes_are_refused_before_anything_is_sent() {
        assert!(written(handed(&[FDS_MAX + 1])).is_err());
    }

    #[test]
    fn a_letter_that_does_not_tell_of_what_came_with_it_is_refused() {
        let letter = |format: u32, disks: &[(usize, usize)]| {
            let disk = |&(disk, fds): &(usize, usize)| Enclosed {
                disk,
                told: told(),
                fds,
            };
            let (launch, rights) = (1, u64::MAX);
            let disks = disks.iter().map(disk).collect();
            serde_json::to_vec(&Letter {
                format,
                launch,
                rights,
                disks,
            })
            .unwrap()
        };
        let two = || vec![fd(), fd()];
        assert!(understood(&letter(1, &[(0, 1), (1, 1)]), two()).is_ok());
        for (format, disks) in [
            (2, &[(0, 2)][..]),
            (1, &[]),
            (1, &[(0, 1)]),
            (1, &[(0, 3)]),
            (1, &[(0, usize::MAX)]),
            (1, &[(0, 1), (0, 1)]),
        ] {
            assert!(
                understood(&letter(format, disks), two()).is_err(),
                "{disks:?}"
            );
        }
        let whole = letter(1, &[(0, 2)]);
        for len in 0..whole.len() {
            assert!(understood(&whole[..len], two()).is_err(), "{len}");
        }
    }
}
