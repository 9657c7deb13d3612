//! A guest that boots from its first disk, writes to each of its disks in every round, and does what a word in its memory says.
//!
//! Rounds, sectors and contents are those of [`boot_disk::sector`], on every disk alike, so that [`boot_disk::progress`] and
//! [`boot_disk::missing`] judge it. As that one it drives disks by the firmware's calls, and looks before it writes a sector again
//! whether that has what it wrote there last.

use anyhow::Result;
use godwit_testkit::guest::asm::{Asm, AsmError};
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

/// Where the word is.
const WORD: u64 = 0x7020;
/// As many sectors are written, one after the other in the order that this makes.
const PLACES: u32 = 8;
const SCATTER: u32 = 0x9e37_79b1;
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
    Ok(ram.write_all_at(&[deed as u8], WORD)?)
}

/// The boot sector of a guest with so many disks.
pub fn sector(disks: u8) -> Result<Vec<u8>, AsmError> {
    let mut asm = Asm::default();
    // Labels count from here: jmp 0x07c0:begin
    asm.op_offset16(&[0xea], "begin").op(&[0xc0, 0x07]);
    asm.label("begin")
        .op(&[0xfa, 0x31, 0xc0]) // cli; xor ax, ax
        .op(&[0x8e, 0xd8, 0x8e, 0xc0, 0x8e, 0xd0]) // mov ds, ax; mov es, ax; mov ss, ax
        .op(&[0xbc, 0x00, 0x7c, 0xfb, 0xfc]) // mov sp, 0x7c00; sti; cld
        .op(&[0x66, 0x31, 0xc0]) // xor eax, eax
        .op(&[0x66, 0xa3, 0x00, 0x70]) // mov [0x7000], eax: the round
        .op(&[0x66, 0xa3, 0x04, 0x70]) // mov [0x7004], eax: whether something is wrong
        .op(&[0x66, 0xa3, 0x20, 0x70]) // mov [0x7020], eax: the word
        // The packet of the firmware's calls: its size, one sector, where, and the sector's upper half.
        .op(&[0x66, 0xa3, 0x1c, 0x70]) // mov [0x701c], eax
        .op(&[0xc7, 0x06, 0x10, 0x70, 0x10, 0x00]) // mov word [0x7010], 16
        .op(&[0xc7, 0x06, 0x12, 0x70, 0x01, 0x00]) // mov word [0x7012], 1
        .op(&[0xc7, 0x06, 0x16, 0x70, 0x00, 0x00]); // mov word [0x7016], 0
    asm.label("round")
        .op(&[0x80, 0x3e, 0x20, 0x70, 0x00]) // cmp byte [0x7020], 0
        .jump(0x74, "works") // je
        .op_offset16(&[0xbb], "obeys")
        .op(&[0xff, 0xe3]); // mov bx, obeys; jmp bx
    asm.label("works")
        .op(&[0x66, 0xa1, 0x00, 0x70, 0x66, 0x40]) // mov eax, [0x7000]; inc eax
        .op(&[0x66, 0xa3, 0x0c, 0x70]) // mov [0x700c], eax
        .op(&[0xbf, 0x00, 0x80, 0xb9, 0x80, 0x00]) // mov di, 0x8000; mov cx, 128
        .op(&[0xf3, 0x66, 0xab]) // rep stosd
        .op_imm32(&[0x66, 0x69, 0xc0], SCATTER) // imul eax, eax, scatter
        .op_imm32(&[0x66, 0x25], PLACES - 1) // and eax, places - 1
        .op(&[0x66, 0x40]) // inc eax
        .op(&[0x66, 0xa3, 0x18, 0x70]) // mov [0x7018], eax: the sector
        .op(&[0xc6, 0x06, 0x08, 0x70, FIRST]) // mov byte [0x7008], the first disk
        .jump(0xeb, "disk"); // jmp
    asm.label("wrong")
        .op(&[0x66, 0xc7, 0x06, 0x04, 0x70, 1, 0, 0, 0]) // mov dword [0x7004], 1
        .op(&[0xf4, 0xeb, 0xfd]); // hlt; jmp to it
    a_disk(&mut asm, disks);
    obeys(&mut asm);
    asm.pad(510).op(&[0x55, 0xaa]);
    asm.finish()
}

/// The round's sector of one disk after the other.
fn a_disk(asm: &mut Asm, disks: u8) {
    asm.label("disk")
        .op(&[0x66, 0xa1, 0x0c, 0x70]) // mov eax, [0x700c]
        .op_imm32(&[0x66, 0x3d], PLACES) // cmp eax, places
        .jump(0x76, "write"); // jbe
    reads(asm);
    asm.op(&[0x66, 0xa1, 0x0c, 0x70]) // mov eax, [0x700c]
        .op_imm32(&[0x66, 0x2d], PLACES) // sub eax, places
        .op(&[0x66, 0x3b, 0x06, 0x00, 0x90]) // cmp eax, [0x9000]
        .jump(0x75, "wrong"); // jne
    asm.label("write")
        .op(&[0xc7, 0x06, 0x14, 0x70, 0x00, 0x80]) // mov word [0x7014], 0x8000
        .op(&[0xb8, 0x00, 0x43]); // mov ax, 0x4300: write
    calls(asm);
    reads(asm);
    asm.op(&[0xbe, 0x00, 0x80, 0xbf, 0x00, 0x90]) // mov si, 0x8000; mov di, 0x9000
        .op(&[0xb9, 0x80, 0x00, 0xf3, 0x66, 0xa7]) // mov cx, 128; repe cmpsd
        .jump(0x75, "wrong") // jne
        .op(&[0xfe, 0x06, 0x08, 0x70]) // inc byte [0x7008]
        .op(&[0x80, 0x3e, 0x08, 0x70, FIRST + disks]) // cmp byte [0x7008], behind the last disk
        .jump(0x75, "disk") // jne
        .op(&[0x66, 0xa1, 0x0c, 0x70]) // mov eax, [0x700c]
        .op(&[0x66, 0xa3, 0x00, 0x70]) // mov [0x7000], eax
        .op_offset16(&[0xbb], "round")
        .op(&[0xff, 0xe3]); // mov bx, round; jmp bx
}

fn reads(asm: &mut Asm) {
    asm.op(&[0xc7, 0x06, 0x14, 0x70, 0x00, 0x90]) // mov word [0x7014], 0x9000
        .op(&[0xb8, 0x00, 0x42]); // mov ax, 0x4200: read
    calls(asm);
}

/// The firmware carries the packet out.
fn calls(asm: &mut Asm) {
    asm.op(&[0xbe, 0x10, 0x70]) // mov si, 0x7010
        .op(&[0x8a, 0x16, 0x08, 0x70]) // mov dl, [0x7008]
        .op(&[0xcd, 0x13]) // int 0x13
        .jump(0x72, "wrong"); // jc
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
