//! What images say that disks are made from, which may come from strangers.
//!
//! Owns nothing.

use super::Decisions;
use crate::outcome::{self, Outcome};
use godwit_qemu::qcow2::{CHAIN_MAX, Format, Found, HEAD_MAX, Kind, format_of, walk};
use std::cell::Cell;
use std::path::Path;

/// Bytes of a seed's head, in which all of it is.
const HEAD: usize = 112;

fn check(format: &Format) {
    if let Some(backing) = format.backing() {
        let name = &backing.name;
        assert!(!name.is_empty() && name.len() <= 1023);
        assert!(!name.chars().any(char::is_control), "no path: {name:?}");
        let first = name.split('/').next().unwrap_or_default();
        assert!(!first.contains(':'), "another address: {name:?}");
    }
}

pub fn head(input: &[u8]) -> Outcome {
    match format_of(input) {
        Err(why) => outcome::of(why),
        Ok(format) => {
            check(&format);
            let below = format.backing().map(|backing| backing.kind);
            outcome::of(match (format, below) {
                (Format::Raw, _) => "raw",
                (Format::Qcow2(_), None) => "alone",
                (Format::Qcow2(_), Some(Kind::Raw)) => "over a raw one",
                (Format::Qcow2(_), Some(Kind::Qcow2)) => "over another one",
            })
        }
    }
}

/// As QEMU makes it, over a file of this name and format.
fn image(below: Option<(&str, &str)>) -> Vec<u8> {
    let mut head = vec![0; HEAD];
    let mut put = |at: usize, bytes: &[u8]| head[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, b"QFI\xfb\0\0\0\x03");
    put(20, &16u32.to_be_bytes());
    put(24, &(20u64 << 30).to_be_bytes());
    put(100, &(HEAD as u32).to_be_bytes());
    let Some((name, format)) = below else {
        head.extend([0; 8]);
        return head;
    };
    let at = HEAD + 8 + format.len().next_multiple_of(8) + 8;
    put(8, &(at as u64).to_be_bytes());
    put(16, &(name.len() as u32).to_be_bytes());
    head.extend(0xe279_2acau32.to_be_bytes());
    head.extend((format.len() as u32).to_be_bytes());
    head.extend(format.as_bytes());
    head.resize(at, 0);
    head.extend(name.as_bytes());
    head
}

pub fn head_seeds() -> Vec<Vec<u8>> {
    let below = [None, Some(("base.raw", "raw")), Some(("/srv/a", "qcow2"))];
    below.into_iter().map(image).collect()
}

/// The images of an input, each with a byte before it that tells how many times 16 bytes it has.
fn images(input: &[u8]) -> Vec<&[u8]> {
    let mut decisions = Decisions(input);
    let mut images = Vec::new();
    while !decisions.is_over() {
        let length = usize::from(decisions.byte()) * 16;
        let (image, rest) = decisions.0.split_at(length.min(decisions.0.len()));
        decisions.0 = rest;
        images.push(image);
    }
    images
}

/// Each file is called by its number; the last byte of a name tells it.
pub fn chain(input: &[u8]) -> Outcome {
    let images = images(input);
    let opened = Cell::new(0);
    let open = |path: &Path| -> Result<Found<usize>, String> {
        opened.set(opened.get() + 1);
        let last = path.as_os_str().as_encoded_bytes().last();
        let at = last.map_or(0, |last| usize::from(last.wrapping_sub(b'0')));
        let image = images.get(at).ok_or("it is not there")?;
        Ok(Found {
            file: at,
            identity: (1, at as u64),
            head: image.iter().copied().take(HEAD_MAX).collect(),
        })
    };
    let top = Path::new("/srv/0");
    let walked = open(top).and_then(|found| walk(top, found, open));
    match walked {
        // What is said of a head is told apart by the other target.
        Err(_) => outcome::of("refused") + opened.get(),
        Ok(chain) => {
            assert!(!chain.is_empty() && chain.len() <= CHAIN_MAX, "too long");
            for (number, link) in chain.iter().enumerate() {
                check(&link.format);
                let above = number.checked_sub(1).map(|above| &chain[above]);
                let told = above.map(|above| above.format.backing().map(|backing| backing.kind));
                assert!(told.is_none_or(|told| told == Some(link.format.kind())));
                let others = chain.iter().filter(|other| other.file == link.file);
                assert_eq!(others.count(), 1, "a file lies over itself");
            }
            assert!(
                chain
                    .last()
                    .is_some_and(|last| last.format.backing().is_none())
            );
            outcome::of("read") + chain.len() as u64
        }
    }
}

pub fn chain_seeds() -> Vec<Vec<u8>> {
    let of = |images: &[Vec<u8>]| {
        let mut seed = Vec::new();
        for image in images {
            let length = image.len().div_ceil(16);
            seed.push(length as u8);
            seed.extend(image);
            seed.resize(seed.len() + length * 16 - image.len(), 0);
        }
        seed
    };
    let over = |name| image(Some((name, "qcow2")));
    vec![
        of(&[image(None)]),
        of(&[over("1"), over("../srv/2"), image(None)]),
        of(&[over("1"), image(Some(("2", "raw"))), vec![0; 16]]),
        of(&[over("1"), over("0")]),
    ]
}
