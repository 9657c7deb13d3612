//! What guests share that a PC's firmware boots from a disk's first sector and that drive disks by the firmware's calls alone:
//! how they begin, and the parts of a round.
//!
//! A round writes one sector full of its number, reads it back, and compares; the number is then left in memory. The processor
//! stays in real mode. Labels count from the first sector's beginning. Where a call fails, or what was read is not as it should
//! be, a part goes to a label of the program's own, which must be within a short jump. Refuses nothing: [`Asm`] refuses what is too long or too far.
//!
//! | address | what is there |
//! |---|---|
//! | 7000h | the last round that ended well |
//! | 7004h | not 0 once something is wrong |
//! | 7008h | the firmware's number of the disk |
//! | 700Ch | the round that is under way |
//! | 7010h | the disk address packet: its size, one sector, where in memory (7014h), which sector (7018h) |
//! | 8000h | the sector to write |
//! | 9000h | the sector that was read |

use super::asm::Asm;

pub const SECTOR: usize = 512;
/// Odd, so that as many rounds as there are places write each of them once.
pub const SCATTER: u32 = 0x9e37_79b1;

/// Segments, a stack, and interrupts.
pub fn begin(asm: &mut Asm) {
    // Labels count from here: jmp 0x07c0:begin
    asm.op_offset16(&[0xea], "begin").op(&[0xc0, 0x07]);
    asm.label("begin")
        .op(&[0xfa, 0x31, 0xc0]) // cli; xor ax, ax
        .op(&[0x8e, 0xd8, 0x8e, 0xc0, 0x8e, 0xd0]) // mov ds, ax; mov es, ax; mov ss, ax
        .op(&[0xbc, 0x00, 0x7c, 0xfb, 0xfc]); // mov sp, 0x7c00; sti; cld
}

/// No round has ended, nothing is wrong, the packet is of one sector; these words are 0, too. EAX is 0 behind it.
pub fn prepare(asm: &mut Asm, words: &[u16]) {
    asm.op(&[0x66, 0x31, 0xc0]) // xor eax, eax
        .op(&[0x66, 0xa3, 0x00, 0x70]) // mov [0x7000], eax
        .op(&[0x66, 0xa3, 0x04, 0x70]); // mov [0x7004], eax
    for word in words {
        asm.op(&[0x66, 0xa3]).op(&word.to_le_bytes()); // mov [word], eax
    }
    asm.op(&[0x66, 0xa3, 0x1c, 0x70]) // mov [0x701c], eax
        .op(&[0xc7, 0x06, 0x10, 0x70, 0x10, 0x00]) // mov word [0x7010], 16
        .op(&[0xc7, 0x06, 0x12, 0x70, 0x01, 0x00]) // mov word [0x7012], 1
        .op(&[0xc7, 0x06, 0x16, 0x70, 0x00, 0x00]); // mov word [0x7016], 0
}

/// The guest says at the label `wrong` that something is wrong, and stops.
pub fn wrong(asm: &mut Asm) {
    asm.label("wrong")
        .op(&[0x66, 0xc7, 0x06, 0x04, 0x70, 1, 0, 0, 0]) // mov dword [0x7004], 1
        .op(&[0xf4, 0xeb, 0xfd]); // hlt; jmp to it
}

/// Begins the next round: the sector to write has its number, and EAX says which of the places that is.
pub fn next_round(asm: &mut Asm, places: u32) {
    asm.op(&[0x66, 0xa1, 0x00, 0x70, 0x66, 0x40]) // mov eax, [0x7000]; inc eax
        .op(&[0x66, 0xa3, 0x0c, 0x70]) // mov [0x700c], eax
        .op(&[0xbf, 0x00, 0x80, 0xb9, 0x80, 0x00]) // mov di, 0x8000; mov cx, 128
        .op(&[0xf3, 0x66, 0xab]) // rep stosd
        .op_imm32(&[0x66, 0x69, 0xc0], SCATTER) // imul eax, eax, scatter
        .op_imm32(&[0x66, 0x25], places - 1); // and eax, places - 1
}

/// The packet is of the sector that is so many behind the first place's, as EAX says.
pub fn aim(asm: &mut Asm) {
    asm.op(&[0x66, 0x40]) // inc eax
        .op(&[0x66, 0xa3, 0x18, 0x70]); // mov [0x7018], eax
}

/// The sector must have what was written there as many rounds ago as there are places.
pub fn look_back(asm: &mut Asm, places: u32, otherwise: &'static str) {
    read(asm, otherwise);
    asm.op(&[0x66, 0xa1, 0x0c, 0x70]) // mov eax, [0x700c]
        .op_imm32(&[0x66, 0x2d], places) // sub eax, places
        .op(&[0x66, 0x3b, 0x06, 0x00, 0x90]) // cmp eax, [0x9000]
        .jump(0x75, otherwise); // jne
}

/// Writes the sector, reads it back, and compares.
pub fn write_and_compare(asm: &mut Asm, otherwise: &'static str) {
    write(asm, 0x8000, otherwise);
    read(asm, otherwise);
    asm.op(&[0xbe, 0x00, 0x80, 0xbf, 0x00, 0x90]) // mov si, 0x8000; mov di, 0x9000
        .op(&[0xb9, 0x80, 0x00, 0xf3, 0x66, 0xa7]) // mov cx, 128; repe cmpsd
        .jump(0x75, otherwise); // jne
}

/// The round has ended well.
pub fn end_round(asm: &mut Asm) {
    asm.op(&[0x66, 0xa1, 0x0c, 0x70]) // mov eax, [0x700c]
        .op(&[0x66, 0xa3, 0x00, 0x70]); // mov [0x7000], eax
}

fn read(asm: &mut Asm, otherwise: &'static str) {
    asm.op(&[0xc7, 0x06, 0x14, 0x70, 0x00, 0x90]) // mov word [0x7014], 0x9000
        .op(&[0xb8, 0x00, 0x42]); // mov ax, 0x4200: read
    call(asm, otherwise);
}

/// Writes the sector at this address.
pub fn write(asm: &mut Asm, from: u16, otherwise: &'static str) {
    asm.op(&[0xc7, 0x06, 0x14, 0x70])
        .op(&from.to_le_bytes()) // mov word [0x7014], from
        .op(&[0xb8, 0x00, 0x43]); // mov ax, 0x4300: write
    call(asm, otherwise);
}

/// The firmware carries the packet out as AX says: INT 13h.
pub fn call(asm: &mut Asm, otherwise: &'static str) {
    asm.op(&[0xbe, 0x10, 0x70]) // mov si, 0x7010
        .op(&[0x8a, 0x16, 0x08, 0x70]) // mov dl, [0x7008]
        .op(&[0xcd, 0x13]) // int 0x13
        .jump(0x72, otherwise); // jc
}

/// A jump that reaches everything.
pub fn go(asm: &mut Asm, label: &'static str) {
    asm.op_offset16(&[0xbb], label).op(&[0xff, 0xe3]); // mov bx, label; jmp bx
}

/// Ends the first sector as firmware wants it.
pub fn sign(asm: &mut Asm) {
    asm.pad(SECTOR - 2).op(&[0x55, 0xaa]);
}
