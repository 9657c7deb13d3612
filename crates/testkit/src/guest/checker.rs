//! Checks a counter guest's RAM for lost, stale and misplaced pages.
//!
//! Reads only, from the RAM file of a *stopped* guest; knows nothing of how the RAM got there. See
//! [`crate::guest::counter`] for what the guest guarantees. The caller owns the file and the promise that
//! no vCPU runs: with a running guest the answer means nothing.

use std::io;
use std::os::unix::fs::FileExt;

use super::counter::{
    CONTROL_ADDRESS, CONTROL_MAGIC, COUNTER_OFFSET, NUMBER_OFFSET, PAGE_BYTES, Word,
};

/// The control block of a counter guest, as read from its RAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Control {
    /// 0 preparing, 1 counting, 2 acted.
    pub state: u32,
    /// Boots in this RAM.
    pub boots: u32,
    /// Full passes since the last boot.
    pub passes: u32,
    pub first_page: u32,
    /// One past the last counted page.
    pub end_page: u32,
}

/// What a good RAM looked like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Checked {
    pub control: Control,
    /// Pages already stepped in the pass that was interrupted.
    pub stepped_pages: u32,
}

/// Why a RAM is not right. Pages are guest page numbers.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckError {
    /// The file could not be read there.
    #[error("cannot read the RAM file at {offset:#x}: {source}")]
    Read { offset: u64, source: io::Error },
    /// No counter guest has started in this RAM.
    #[error("no counter guest has started in this RAM (magic {0:#010x})")]
    NotStarted(u32),
    /// The guest is still preparing its pages, which says nothing yet.
    #[error("the counter guest is still preparing its pages")]
    Preparing,
    /// The control block itself makes no sense.
    #[error("the control block is damaged: pages {first_page:#x} to {end_page:#x}")]
    Control {
        /// First counted page, as read.
        first_page: u32,
        end_page: u32,
    },
    /// Pages hold counters or numbers that no moment of the guest's run explains.
    #[error(
        "{count} wrong pages at pass {passes}, the first is {first}: \
         counter {counter}, allowed {passes} or one more in ascending order; number {number:#x}"
    )]
    WrongPages {
        count: u32,
        /// The pass the guest was in.
        passes: u32,
        first: u32,
        counter: u32,
        /// Its own number as stored in it.
        number: u32,
    },
}

/// Pages that a reading vCPU has read, 0 where there is none; from 0 on after 2^32. The guest may run.
pub fn reads(ram: &impl FileExt) -> Result<u32, CheckError> {
    let mut word = [0; 4];
    read(ram, Word::Reads.address(), &mut word)?;
    Ok(u32::from_le_bytes(word))
}

pub fn control(ram: &impl FileExt) -> Result<Control, CheckError> {
    let mut block = [0_u8; 64];
    read(ram, CONTROL_ADDRESS, &mut block)?;
    let word = |word: Word| le_word(&block, usize::from(word.offset()));
    if word(Word::Magic) != CONTROL_MAGIC {
        return Err(CheckError::NotStarted(word(Word::Magic)));
    }
    Ok(Control {
        state: word(Word::State),
        boots: word(Word::Boots),
        passes: word(Word::Passes),
        first_page: word(Word::FirstPage),
        end_page: word(Word::EndPage),
    })
}

/// Checks every counted page. Exactly one step from `passes + 1` down to `passes` is allowed.
pub fn check(ram: &impl FileExt) -> Result<Checked, CheckError> {
    let control = control(ram)?;
    let Control {
        first_page,
        end_page,
        ..
    } = control;
    if first_page == 0 || first_page >= end_page || end_page > 2047 * 256 {
        return Err(CheckError::Control {
            first_page,
            end_page,
        });
    }
    if control.state == 0 {
        return Err(CheckError::Preparing);
    }
    let mut walk = Walk {
        passes: control.passes,
        stepped_pages: 0,
        stepping: true,
        wrong: None,
        wrong_count: 0,
    };
    for_each_page(ram, first_page, end_page, |page, counter, number| {
        walk.see(page, counter, number)
    })?;
    walk.finish(control)
}

/// State of one ascending walk over the pages.
struct Walk {
    passes: u32,
    stepped_pages: u32,
    stepping: bool,
    wrong: Option<(u32, u32, u32)>,
    wrong_count: u32,
}

impl Walk {
    fn see(&mut self, page: u32, counter: u32, number: u32) {
        let good_counter = if self.stepping && counter == self.passes.wrapping_add(1) {
            self.stepped_pages += 1;
            true
        } else {
            self.stepping &= counter != self.passes;
            counter == self.passes
        };
        if !good_counter || number != page {
            self.wrong.get_or_insert((page, counter, number));
            self.wrong_count += 1;
        }
    }

    fn finish(self, control: Control) -> Result<Checked, CheckError> {
        match self.wrong {
            None => Ok(Checked {
                control,
                stepped_pages: self.stepped_pages,
            }),
            Some((first, counter, number)) => {
                let (count, passes) = (self.wrong_count, self.passes);
                Err(CheckError::WrongPages {
                    count,
                    passes,
                    first,
                    counter,
                    number,
                })
            }
        }
    }
}

/// Reads in chunks of 1 MiB and gives each page's counter and number.
fn for_each_page(
    ram: &impl FileExt,
    first_page: u32,
    end_page: u32,
    mut see: impl FnMut(u32, u32, u32),
) -> Result<(), CheckError> {
    let mut buffer = vec![0_u8; 1 << 20];
    let mut page = first_page;
    while page < end_page {
        let pages = (end_page - page).min(256);
        let chunk = &mut buffer[..pages as usize * PAGE_BYTES as usize];
        read(ram, u64::from(page) * PAGE_BYTES, chunk)?;
        for (index, bytes) in chunk.chunks_exact(PAGE_BYTES as usize).enumerate() {
            let number = le_word(bytes, NUMBER_OFFSET as usize);
            see(
                page + index as u32,
                le_word(bytes, COUNTER_OFFSET as usize),
                number,
            );
        }
        page += pages;
    }
    Ok(())
}

fn read(ram: &impl FileExt, offset: u64, into: &mut [u8]) -> Result<(), CheckError> {
    ram.read_exact_at(into, offset)
        .map_err(|source| CheckError::Read { offset, source })
}

fn le_word(bytes: &[u8], at: usize) -> u32 {
    bytes
        .get(at..at + 4)
        .and_then(|word| word.try_into().ok())
        .map_or(0, u32::from_le_bytes)
}

/// Compares two RAM files byte for byte, a page at a time; gives the numbers of the first 16 pages that differ
/// and how many differ in all. A length difference is an error. Both guests must be stopped.
pub fn compare(left: &std::fs::File, right: &std::fs::File) -> io::Result<(Vec<u64>, u64)> {
    let length = left.metadata()?.len();
    if length != right.metadata()?.len() {
        return Err(io::Error::other("the RAM files differ in length"));
    }
    let (mut a, mut b) = (vec![0_u8; 1 << 20], vec![0_u8; 1 << 20]);
    let (mut shown, mut count, mut offset) = (Vec::new(), 0, 0);
    while offset < length {
        let chunk = (length - offset).min(1 << 20) as usize;
        left.read_exact_at(&mut a[..chunk], offset)?;
        right.read_exact_at(&mut b[..chunk], offset)?;
        let page_bytes = PAGE_BYTES as usize;
        let pages = a[..chunk]
            .chunks(page_bytes)
            .zip(b[..chunk].chunks(page_bytes));
        for (index, _) in pages.enumerate().filter(|(_, (x, y))| x != y) {
            count += 1;
            if shown.len() < 16 {
                shown.push(offset / PAGE_BYTES + index as u64);
            }
        }
        offset += chunk as u64;
    }
    Ok((shown, count))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Seek, SeekFrom, Write};

    const FIRST: u32 = 256;
    const END: u32 = 1024;

    /// RAM as a guest leaves it that was stopped with `stepped` pages done in pass `passes`.
    fn ram(passes: u32, stepped: u32) -> std::fs::File {
        let mut file = tempfile::tempfile().unwrap();
        file.set_len(u64::from(END) * PAGE_BYTES).unwrap();
        for (word, value) in [
            (Word::Magic, CONTROL_MAGIC),
            (Word::State, 1),
            (Word::Boots, 1),
            (Word::Passes, passes),
            (Word::FirstPage, FIRST),
            (Word::EndPage, END),
        ] {
            put(&mut file, word.address(), value);
        }
        for page in FIRST..END {
            let counter = if page < FIRST + stepped {
                passes.wrapping_add(1)
            } else {
                passes
            };
            put(
                &mut file,
                u64::from(page) * PAGE_BYTES + COUNTER_OFFSET,
                counter,
            );
            put(
                &mut file,
                u64::from(page) * PAGE_BYTES + NUMBER_OFFSET,
                page,
            );
        }
        file
    }

    fn put(file: &mut std::fs::File, at: u64, value: u32) {
        file.seek(SeekFrom::Start(at)).unwrap();
        file.write_all(&value.to_le_bytes()).unwrap();
    }

    #[test]
    fn every_moment_of_a_pass_is_right() {
        for stepped in [0, 1, 100, END - FIRST] {
            for passes in [0, 5, u32::MAX] {
                assert_eq!(check(&ram(passes, stepped)).unwrap().stepped_pages, stepped);
            }
        }
    }

    #[test]
    fn a_stale_a_lost_and_a_misplaced_page_are_found() {
        let damage: [(u32, u64, u32); 5] = [
            (300, COUNTER_OFFSET, 9),  // one pass behind, among the stepped
            (900, COUNTER_OFFSET, 9),  // one pass behind, among the others
            (900, COUNTER_OFFSET, 11), // a second step down
            (700, COUNTER_OFFSET, 0),  // never arrived
            (700, NUMBER_OFFSET, 701), // another page's content
        ];
        for (page, offset, value) in damage {
            let mut file = ram(10, 200);
            put(&mut file, u64::from(page) * PAGE_BYTES + offset, value);
            match check(&file) {
                Err(CheckError::WrongPages {
                    count: 1, first, ..
                }) => assert_eq!(first, page),
                other => panic!("page {page} at {offset} = {value}: {other:?}"),
            }
        }
    }

    #[test]
    fn a_stale_control_block_is_found() {
        let mut file = ram(10, 200);
        put(&mut file, Word::Passes.address(), 9);
        assert!(matches!(check(&file), Err(CheckError::WrongPages { .. })));
    }

    #[test]
    fn ram_without_a_guest_or_with_a_damaged_block_is_refused() {
        let empty = tempfile::tempfile().unwrap();
        assert!(matches!(check(&empty), Err(CheckError::Read { .. })));
        empty.set_len(16 << 20).unwrap();
        assert!(matches!(check(&empty), Err(CheckError::NotStarted(0))));
        let mut damaged = ram(1, 0);
        put(&mut damaged, Word::EndPage.address(), u32::MAX);
        assert!(matches!(check(&damaged), Err(CheckError::Control { .. })));
    }

    #[test]
    fn compare_names_the_pages_that_differ() {
        let (left, mut right) = (ram(1, 0), ram(1, 0));
        assert_eq!(compare(&left, &right).unwrap(), (vec![], 0));
        put(&mut right, 333 * PAGE_BYTES + 4092, 1);
        assert_eq!(compare(&left, &right).unwrap(), (vec![333], 1));
        right.set_len(PAGE_BYTES).unwrap();
        assert!(compare(&left, &right).is_err());
    }
}
