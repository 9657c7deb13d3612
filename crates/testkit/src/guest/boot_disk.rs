//! A guest that boots from a disk by the firmware's own calls, and works with it for ever.
//!
//! The boot sector writes one of some sectors with a number that grows, reads it back, compares, and leaves the number in
//! memory; where something is wrong it leaves that instead and stops. Before it writes a sector again it looks whether that has what it wrote
//! there last, so that no write is overwritten that was lost meanwhile. It knows nothing of virtio: the firmware drives the disk,
//! and asks for no flushes, so that each write is durable once it is answered.

use super::asm::{Asm, AsmError};
use super::boot_counter;
use super::firmware::{self, SCATTER, SECTOR};
use std::io;
use std::os::unix::fs::FileExt;

/// Where the number of the last round is in guest memory, and behind it whether something was wrong.
const ROUND: u64 = 0x7000;

/// Which sectors the guest writes, and with what number it begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spread {
    /// Places that are written, a power of two. The first one is the second sector.
    pub places: u32,
    /// Sectors from one place to the next, a power of two.
    pub apart: u32,
    /// Whether each boot is a life of its own: its rounds have numbers of its own ([`LIFE`]), and the boot sector says which
    /// life was the last.
    pub has_lives: bool,
    /// Up to how many MiB the guest steps pages of its memory between two rounds ([`super::boot_counter`]); none without. The program
    /// for that is behind the first place, so that places are at least four sectors apart.
    pub counts_until_mib: Option<u32>,
}

/// Rounds of one life have numbers from this on, times the life's number.
pub const LIFE: u32 = 1 << 20;
/// Where the boot sector has the last life's first number.
pub(super) const LAST_LIFE: usize = 0x1f8;
/// The sector in which the rest of the program is.
pub(super) const REST: usize = 2;

/// The second sector to the ninth.
const NARROW: Spread = Spread {
    places: 8,
    apart: 1,
    has_lives: false,
    counts_until_mib: None,
};

/// How far the guest has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Rounds that ended well.
    pub round: u32,
    /// Whether a call failed, or what was read is not what was written.
    pub is_wrong: bool,
}

/// Reads that from the guest's memory.
pub fn progress(ram: &impl FileExt) -> io::Result<Progress> {
    let mut bytes = [0; 8];
    ram.read_exact_at(&mut bytes, ROUND)?;
    let [a, b, c, d, wrong @ ..] = bytes;
    Ok(Progress {
        round: u32::from_le_bytes([a, b, c, d]),
        is_wrong: wrong != [0; 4],
    })
}

/// One of the last seven rounds up to this one that the disk does not have as it was written, if there is any. The eighth
/// sector may be under way.
pub fn missing(disk: &impl FileExt, round: u32) -> io::Result<Option<u32>> {
    for earlier in round.saturating_sub(NARROW.places - 2)..=round {
        let at = NARROW.offset(NARROW.place(earlier));
        let expected = content(earlier);
        let mut seen = vec![0; expected.len()];
        disk.read_exact_at(&mut seen, at)?;
        if seen != expected {
            return Ok(Some(earlier));
        }
    }
    Ok(None)
}

/// What a round writes into its sector.
pub(super) fn content(round: u32) -> Vec<u8> {
    round.to_le_bytes().repeat(SECTOR / 4)
}

/// The boot sector of a guest that writes the second sector to the ninth.
pub fn sector() -> Result<Vec<u8>, AsmError> {
    NARROW.sector()
}

impl Spread {
    /// Which of the places a round writes.
    pub fn place(&self, round: u32) -> u32 {
        round.wrapping_mul(SCATTER) & (self.places - 1)
    }

    /// Where a place is on the disk, in bytes.
    pub fn offset(&self, place: u32) -> u64 {
        (1 + u64::from(place) * u64::from(self.apart)) * SECTOR as u64
    }

    /// The boot sector of a guest that writes these.
    pub fn sector(&self) -> Result<Vec<u8>, AsmError> {
        let mut program = program(self)?;
        program.truncate(SECTOR);
        Ok(program)
    }

    /// What the guest finds in sector [`REST`], if it needs that.
    pub(super) fn rest(&self) -> Result<Option<Vec<u8>>, AsmError> {
        let rest = program(self)?.split_off(SECTOR);
        Ok((!rest.is_empty()).then_some(rest))
    }
}

/// All that runs, a sector behind the other as it is in memory.
fn program(spread: &Spread) -> Result<Vec<u8>, AsmError> {
    let mut asm = Asm::default();
    firmware::begin(&mut asm);
    asm.op(&[0x88, 0x16, 0x08, 0x70]); // mov [0x7008], dl: the drive
    firmware::prepare(&mut asm, &[]);
    if spread.has_lives {
        begin_a_life(&mut asm);
    }
    if spread.counts_until_mib.is_some() {
        load_the_rest(&mut asm);
    }
    asm.jump(0xeb, "round"); // jmp
    firmware::wrong(&mut asm);
    asm.label("round");
    firmware::next_round(&mut asm, spread.places);
    asm.op(&[0x66, 0xc1, 0xe0, spread.apart.ilog2() as u8]); // shl eax, log2 of apart
    firmware::aim(&mut asm);
    asm.op_offset16(&[0xbb], "look_back").op(&[0xff, 0xd3]); // mov bx, look_back; call bx
    firmware::write_and_compare(&mut asm, "wrong");
    firmware::end_round(&mut asm);
    if spread.counts_until_mib.is_some() {
        asm.op_offset16(&[0xbb], "step").op(&[0xff, 0xd3]); // mov bx, step; call bx
    }
    asm.jump(0xeb, "round"); // jmp
    look_back(&mut asm, spread.places);
    firmware::sign(&mut asm);
    if let Some(until_mib) = spread.counts_until_mib {
        boot_counter::append(&mut asm, until_mib);
        asm.pad(2 * SECTOR);
    }
    asm.finish()
}

/// Looks back once this life has come so far that it wrote the place before.
fn look_back(asm: &mut Asm, places: u32) {
    asm.label("look_back")
        .op(&[0x66, 0xa1, 0x0c, 0x70]) // mov eax, [0x700c]
        .op_imm32(&[0x66, 0x25], LIFE - 1) // and eax, the rounds of a life
        .op_imm32(&[0x66, 0x3d], places) // cmp eax, places
        .jump(0x76, "seen"); // jbe
    firmware::look_back(asm, places, "lost");
    asm.label("seen").op(&[0xc3]); // ret
    // Too far for a short jump.
    asm.label("lost");
    firmware::go(asm, "wrong");
}

/// The rest of the program comes behind the first sector in memory.
fn load_the_rest(asm: &mut Asm) {
    asm.op(&[0xc7, 0x06, 0x14, 0x70, 0x00, 0x7e]) // mov word [0x7014], 0x7e00
        .op_imm32(&[0x66, 0xc7, 0x06, 0x18, 0x70], REST as u32) // mov dword [0x7018], the sector
        .op(&[0xb8, 0x00, 0x42]); // mov ax, 0x4200: read
    firmware::call(asm, "wrong");
}

/// The next life's number is written where the next one finds it, and its rounds begin after that.
fn begin_a_life(asm: &mut Asm) {
    let at = (0x7c00 + LAST_LIFE as u16).to_le_bytes();
    asm.op(&[0x66, 0xa3, 0x18, 0x70]) // mov [0x7018], eax: the sector, which is the first
        .op(&[0x66, 0xa1, at[0], at[1]]) // mov eax, [the last life]
        .op_imm32(&[0x66, 0x05], LIFE) // add eax, a life
        .op(&[0x66, 0xa3, at[0], at[1]]); // mov [the last life], eax
    firmware::write(asm, 0x7c00, "wrong");
    asm.op(&[0x66, 0xa1, at[0], at[1]]) // mov eax, [the last life]
        .op(&[0x66, 0xa3, 0x00, 0x70]); // mov [0x7000], eax
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn it_is_one_sector_that_firmware_boots() {
        let sector = sector().unwrap();
        assert_eq!((sector.len(), &sector[510..]), (SECTOR, &[0x55, 0xaa][..]));
        let with_lives = Spread {
            has_lives: true,
            ..NARROW
        };
        assert!(with_lives.rest().unwrap().is_none());
        let sector = with_lives.sector().unwrap();
        assert_eq!(sector[LAST_LIFE..510], [0; 510 - LAST_LIFE]);
    }

    #[test]
    fn one_that_counts_pages_is_two_sectors_and_leaves_the_life_its_place() {
        let counting = Spread {
            places: 8,
            apart: 4,
            has_lives: true,
            counts_until_mib: Some(28),
        };
        let sector = counting.sector().unwrap();
        assert_eq!((sector.len(), &sector[510..]), (SECTOR, &[0x55, 0xaa][..]));
        assert_eq!(sector[LAST_LIFE..510], [0; 510 - LAST_LIFE]);
        assert_eq!(
            counting.rest().unwrap().map(|rest| rest.len()),
            Some(SECTOR)
        );
    }

    #[test]
    fn as_many_rounds_as_there_are_places_write_each_of_them_once() {
        let spread = Spread {
            places: 256,
            apart: 128,
            has_lives: true,
            counts_until_mib: None,
        };
        let written: BTreeSet<u32> = (1000..1256).map(|round| spread.place(round)).collect();
        assert_eq!(written.len(), 256);
        assert_eq!(spread.offset(255), (1 + 255 * 128) * 512);
    }
}
