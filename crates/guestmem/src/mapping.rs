//! Where in QEMU's address space guest RAM is mapped, read from `/proc/<pid>/maps`.
//!
//! What it refuses: a mapping that is private (its writes would not reach the file), that covers
//! only a part of the file, or that maps some page twice (writes through the second address would
//! not be seen). Several neighbouring areas, into which QEMU or the kernel may split the mapping,
//! are fine.
//!
//! A mapping comes with what devices of ours have written to the same memory, so that no tracker of
//! the one is blind to the other.

use std::ops::Range;
use std::sync::Arc;

use crate::{AtomicPageSet, Error, PAGE_SIZE, RamFile};

/// A stretch of guest RAM that is contiguous in QEMU's address space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// Address of its first page in QEMU.
    pub address: u64,
    /// Its first page in guest RAM.
    pub first_page: u64,
    pub page_count: u64,
}

impl Segment {
    /// Its pages in guest RAM.
    pub fn pages(&self) -> Range<u64> {
        self.first_page..self.first_page.saturating_add(self.page_count)
    }

    /// The addresses of those of `pages` that lie in this segment, or nothing.
    pub(crate) fn addresses(&self, pages: &Range<u64>) -> Option<Range<u64>> {
        let own = self.pages();
        let (start, end) = (pages.start.max(own.start), pages.end.min(own.end));
        (start < end).then(|| self.address_of(start)..self.address_of(end))
    }

    /// The pages of guest RAM at a range of addresses, cut to this segment.
    pub(crate) fn pages_at(&self, addresses: &Range<u64>) -> Range<u64> {
        self.page_at(addresses.start)
            ..self.page_at(addresses.end.saturating_add(PAGE_SIZE as u64 - 1))
    }

    fn address_of(&self, page: u64) -> u64 {
        let offset = page.saturating_sub(self.first_page) * PAGE_SIZE as u64;
        self.address.saturating_add(offset)
    }

    fn page_at(&self, address: u64) -> u64 {
        let offset = address.saturating_sub(self.address) / PAGE_SIZE as u64;
        self.first_page.saturating_add(offset.min(self.page_count))
    }
}

/// All of guest RAM in QEMU's address space, in the order of its pages.
#[derive(Debug, Clone)]
pub struct GuestMapping {
    segments: Vec<Segment>,
    page_count: u64,
    device_writes: Arc<AtomicPageSet>,
}

impl GuestMapping {
    /// Finds the mapping of `ram` in process `pid`. Needs the right to trace that process.
    pub fn find(pid: u32, ram: &RamFile) -> Result<Self, Error> {
        let (device, inode) = ram.identity()?;
        let maps = std::fs::read(format!("/proc/{pid}/maps"))
            .map_err(|source| Error::system("read QEMU's memory map", source))?;
        let areas = areas_of(&String::from_utf8_lossy(&maps), device, inode);
        let segments = segments(areas, ram.page_count());
        let segments = segments.map_err(|reason| Error::Mapping {
            pid,
            path: ram.path().to_owned(),
            reason,
        })?;
        Ok(Self::of(ram, segments))
    }

    /// A mapping of all of `ram` that the caller knows to begin at `address`.
    pub fn at(ram: &RamFile, address: u64) -> Self {
        let whole = Segment {
            address,
            first_page: 0,
            page_count: ram.page_count(),
        };
        Self::of(ram, vec![whole])
    }

    fn of(ram: &RamFile, segments: Vec<Segment>) -> Self {
        Self {
            segments,
            page_count: ram.page_count(),
            device_writes: Arc::clone(&ram.device_writes),
        }
    }

    /// Pages of the same memory that devices of this process have written.
    pub(crate) fn device_writes(&self) -> &AtomicPageSet {
        &self.device_writes
    }

    /// Pages of guest RAM.
    pub fn page_count(&self) -> u64 {
        self.page_count
    }

    /// Stretches that are contiguous in QEMU's address space, ascending by page.
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }
}

/// The stretches that these areas make; or why they are not all of guest RAM, once.
fn segments(mut areas: Vec<Area>, page_count: u64) -> Result<Vec<Segment>, &'static str> {
    if areas.is_empty() {
        return Err("the file is not mapped");
    }
    if areas.iter().any(|area| !area.shared) {
        return Err("the mapping is private, so QEMU's writes do not reach the file");
    }
    areas.sort_by_key(|area| area.segment.first_page);
    let mut segments: Vec<Segment> = Vec::new();
    let mut next_page = 0;
    for Area { segment, .. } in areas {
        match segment.first_page.cmp(&next_page) {
            std::cmp::Ordering::Less => return Err("a part of it is mapped twice"),
            std::cmp::Ordering::Greater => return Err("a part of it is not mapped"),
            std::cmp::Ordering::Equal => {}
        }
        next_page = segment.pages().end;
        join(&mut segments, segment);
    }
    if next_page != page_count {
        return Err("the mapping has another size than the file");
    }
    Ok(segments)
}

/// Appends a segment, joined to the last one where the addresses continue.
fn join(segments: &mut Vec<Segment>, next: Segment) {
    match segments.last_mut() {
        Some(last) if last.address_of(next.first_page) == next.address => {
            last.page_count = last.page_count.saturating_add(next.page_count);
        }
        _ => segments.push(next),
    }
}

/// One line of `/proc/<pid>/maps` that maps the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Area {
    segment: Segment,
    shared: bool,
}

fn areas_of(maps: &str, device: u64, inode: u64) -> Vec<Area> {
    let wanted = (rustix::fs::major(device), rustix::fs::minor(device), inode);
    maps.lines()
        .filter_map(parse_line)
        .filter(|(identity, _)| *identity == wanted)
        .map(|(_, area)| area)
        .collect()
}

/// Reads `start-end perms offset major:minor inode [path]`.
fn parse_line(line: &str) -> Option<((u32, u32, u64), Area)> {
    let mut fields = line.split_ascii_whitespace();
    let (start, end) = fields.next()?.split_once('-')?;
    let (start, end) = (hex(start)?, hex(end)?);
    let shared = fields.next()?.as_bytes().get(3) == Some(&b's');
    let offset = hex(fields.next()?)?;
    let (major, minor) = fields.next()?.split_once(':')?;
    let major = u32::from_str_radix(major, 16).ok()?;
    let minor = u32::from_str_radix(minor, 16).ok()?;
    let inode = fields.next()?.parse().ok()?;
    let segment = Segment {
        address: start,
        first_page: offset / PAGE_SIZE as u64,
        page_count: end.checked_sub(start)? / PAGE_SIZE as u64,
    };
    Some(((major, minor, inode), Area { segment, shared }))
}

fn hex(text: &str) -> Option<u64> {
    u64::from_str_radix(text, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const INODE: u64 = 77;

    fn find(lines: &[&str], page_count: u64) -> Result<Vec<Segment>, &'static str> {
        let device = rustix::fs::makedev(0, 0x1a);
        let maps = lines.join("\n");
        segments(areas_of(&maps, device, INODE), page_count)
    }

    #[test]
    fn split_areas_are_joined_and_strangers_left_out() {
        let found = find(
            &[
                "55d0c0000000-55d0c0001000 r--p 00000000 fe:00 77 /usr/bin/other device",
                "7f0000200000-7f0000600000 rw-s 00200000 00:1a 77 /mem/a b",
                "7f0000000000-7f0000200000 rw-s 00000000 00:1a 77 /mem/a b",
                "7f0000600000-7f0000601000 rw-s 00000000 00:1a 78 /mem/else",
                "garbage",
                "7f00-",
            ],
            1536,
        );
        let whole = Segment {
            address: 0x7f00_0000_0000,
            first_page: 0,
            page_count: 1536,
        };
        assert_eq!(found, Ok(vec![whole]));
    }

    #[test]
    fn pieces_at_distant_addresses_stay_apart() {
        let lines = [
            "7f0000000000-7f0000200000 rw-s 00000000 00:1a 77 /mem",
            "7e0000000000-7e0000200000 rw-s 00200000 00:1a 77 /mem",
        ];
        let found = find(&lines, 1024).expect("both halves are mapped");
        let [low, high] = found.as_slice() else {
            panic!("two segments expected: {found:?}");
        };
        assert_eq!((low.pages(), high.pages()), (0..512, 512..1024));
        assert_eq!(
            low.addresses(&(500..600)),
            Some(0x7f00_001f_4000..0x7f00_0020_0000)
        );
        assert_eq!(
            high.addresses(&(500..600)),
            Some(0x7e00_0000_0000..0x7e00_0005_8000)
        );
        assert_eq!(high.addresses(&(0..512)), None);
        assert_eq!(
            high.pages_at(&(0x7e00_0000_1000..0x7e00_0000_3000)),
            513..515
        );
        assert_eq!(high.pages_at(&(0..u64::MAX)), 512..1024);
    }

    #[test]
    fn what_cannot_be_tracked_is_refused_with_its_reason() {
        let whole = "7f0000000000-7f0000400000 rw-s 00000000 00:1a 77 /mem";
        let cases: [(&[&str], &str); 5] = [
            (&[], "not mapped"),
            (
                &["7f0000000000-7f0000400000 rw-p 00000000 00:1a 77 /mem"],
                "private",
            ),
            (
                &[
                    whole,
                    "7e0000000000-7e0000200000 rw-s 00000000 00:1a 77 /mem",
                ],
                "twice",
            ),
            (
                &["7f0000000000-7f0000200000 rw-s 00200000 00:1a 77 /mem"],
                "a part of it is not",
            ),
            (
                &["7f0000000000-7f0000200000 rw-s 00000000 00:1a 77 /mem"],
                "another size",
            ),
        ];
        for (lines, reason) in cases {
            let error = find(lines, 1024).expect_err("must be refused");
            assert!(error.contains(reason), "{error}");
        }
    }
}
