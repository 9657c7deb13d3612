//! A guest that boots from its first disk, writes to each of its disks in every round, and does what a word in its memory says.
//!
//! Rounds, sectors and contents are those of the testkit's `boot_disk::sector`, on every disk alike, so that its `progress` and
//! `missing` judge it. It is made of the same parts ([`firmware`]), and looks before it writes a sector again whether that has
//! what it wrote there last.

use anyhow::Result;
use godwit_testkit::guest::asm::{Asm, AsmError};
use godwit_testkit::guest::firmware;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

/// Where the word is.
const WORD: u16 = 0x7020;
/// So many sectors are written.
const PLACES: u32 = 8;
/// The firmware's number of the first disk.
const FIRST: u8 = 0x80;

/// What a guest does by itself when it is told to, between two rounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Deed {
    Reset = 1,
    Panic = 2,
    PowerOff = 3,
}

/// Has the guest do that whose memory is in this file.
pub fn order(ram: &Path, deed: Deed) -> Result<()> {
    let ram = File::options().write(true).open(ram)?;
    Ok(ram.write_all_at(&[deed as u8], WORD.into())?)
}

/// The boot sector of a guest with so many disks.
pub fn sector(disks: u8) -> Result<Vec<u8>, AsmError> {
    let mut asm = Asm::default();
    firmware::begin(&mut asm);
    firmware::prepare(&mut asm, &[WORD]);
    asm.label("round")
        .op(&[0x80, 0x3e, 0x20, 0x70, 0x00]) // cmp byte [0x7020], 0
        .jump(0x74, "works"); // je
    firmware::go(&mut asm, "obeys");
    asm.label("works");
    firmware::next_round(&mut asm, PLACES);
    firmware::aim(&mut asm);
    asm.op(&[0xc6, 0x06, 0x08, 0x70, FIRST]) // mov byte [0x7008], the first disk
        .jump(0xeb, "disk"); // jmp
    firmware::wrong(&mut asm);
    a_disk(&mut asm, disks);
    obeys(&mut asm);
    firmware::sign(&mut asm);
    asm.finish()
}

/// The round's sector of one disk after the other.
fn a_disk(asm: &mut Asm, disks: u8) {
    asm.label("disk")
        .op(&[0x66, 0xa1, 0x0c, 0x70]) // mov eax, [0x700c]
        .op_imm32(&[0x66, 0x3d], PLACES) // cmp eax, places
        .jump(0x76, "write"); // jbe
    firmware::look_back(asm, PLACES, "wrong");
    asm.label("write");
    firmware::write_and_compare(asm, "wrong");
    asm.op(&[0xfe, 0x06, 0x08, 0x70]) // inc byte [0x7008]
        .op(&[0x80, 0x3e, 0x08, 0x70, FIRST + disks]) // cmp byte [0x7008], behind the last disk
        .jump(0x75, "disk"); // jne
    firmware::end_round(asm);
    firmware::go(asm, "round");
}

/// As the machine has it: ports of ACPI, of the chipset's reset and of pvpanic.
fn obeys(asm: &mut Asm) {
    asm.label("obeys").op(&[0xa0, 0x20, 0x70]); // mov al, [0x7020]
    asm.op(&[0x3c, Deed::Reset as u8]).jump(0x74, "reset"); // cmp al, 1; je
    asm.op(&[0x3c, Deed::Panic as u8]).jump(0x74, "panic"); // cmp al, 2; je
    asm.op(&[0xba, 0x04, 0x06, 0xb8, 0x00, 0x20, 0xef]) // mov dx, 604h; mov ax, 2000h; out dx, ax
        .jump(0xeb, "halt");
    asm.label("reset")
        .op(&[0xba, 0xf9, 0x0c, 0xb0, 0x02, 0xee]) // mov dx, CF9h; mov al, 2; out dx, al
        .op(&[0xb0, 0x06, 0xee]) // mov al, 6; out dx, al
        .jump(0xeb, "halt");
    asm.label("panic").op(&[0xba, 0x05, 0x05, 0xb0, 0x01, 0xee]); // mov dx, 505h; mov al, 1; out dx, al
    asm.label("halt").op(&[0xf4]).jump(0xeb, "halt"); // hlt; jmp
}
