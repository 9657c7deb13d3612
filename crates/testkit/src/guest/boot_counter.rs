//! The second part of a guest that boots from a disk ([`super::boot_disk`]): between two rounds it steps some pages of memory, as
//! a counter guest does, so that one guest shows what is lost of its memory and what of its disk.
//!
//! The control block and the pages are those of [`super::counter`] in flat mode, and [`super::checker`] judges them. The processor
//! stays in real mode, which the firmware's calls need; a segment register gets the limit of protected mode for as long as pages
//! are stepped. Refuses nothing.

use super::asm::Asm;
use super::counter::{
    BOOT_ADDRESS, CONTROL_ADDRESS, CONTROL_MAGIC, COUNTER_OFFSET, CounterSpec, NUMBER_OFFSET,
    PAGE_BYTES, Word,
};

/// Where the program is, and with what segment the processor finds it there.
const ORIGIN: u32 = 0x7c00;
const SEGMENT: [u8; 2] = [0xc0, 0x07];
/// Pages that are stepped in a round.
const IN_A_ROUND: u16 = 2;
/// Of the control block: the address of the page that is stepped next.
const NEXT: u8 = 0x60;

/// Appends it, to be called at the label `step`.
pub(super) fn append(asm: &mut Asm, until_mib: u32) {
    let (first, end) = CounterSpec::flat(until_mib).pages();
    let address = |page: u32| page * PAGE_BYTES as u32;
    asm.label("step").op(&[0xfa]); // cli
    widen(asm);
    asm.op_imm32(&[0x66, 0xbd], CONTROL_ADDRESS as u32); // mov ebp, CONTROL
    flat(asm, &[0x83, 0x7d, Word::State.offset(), 0]); // cmp dword [ebp+state], 0
    asm.jump(0x75, "go"); // jne
    asm.op_offset16(&[0xea], "prepare").op(&SEGMENT); // jmp
    asm.label("go");
    flat(asm, &[0x8b, 0x75, NEXT]); // mov esi, [ebp+next]
    asm.op(&[0xb9]).op(&IN_A_ROUND.to_le_bytes()); // mov cx, pages
    asm.label("page");
    flat(asm, &[0xff, 0x46, COUNTER_OFFSET as u8]); // inc dword [esi+counter]
    asm.op_imm32(&[0x66, 0x81, 0xc6], PAGE_BYTES as u32); // add esi, 4096
    asm.op_imm32(&[0x66, 0x81, 0xfe], address(end)); // cmp esi, end
    asm.jump(0x75, "more"); // jne
    flat(asm, &[0xff, 0x45, Word::Passes.offset()]); // inc dword [ebp+passes]
    asm.op_imm32(&[0x66, 0xbe], address(first)); // mov esi, first
    asm.label("more").op(&[0x49]).jump(0x75, "page"); // dec cx; jnz
    flat(asm, &[0x89, 0x75, NEXT]); // mov [ebp+next], esi
    asm.op(&[0x31, 0xc0, 0x8e, 0xe0, 0xfb, 0xc3]); // xor ax, ax; mov fs, ax; sti; ret
    prepare(asm, (first, end), address);
    asm.label("gdt").op(&[0; 8]); // null
    asm.op(&[0xff, 0xff, 0, 0, 0, 0x92, 0xcf, 0]); // 08h: data, base 0, 4 GiB
    let table = asm.label("gdtr").op(&[15, 0]);
    table.op_address(&[], "gdt", ORIGIN);
}

/// FS reaches 4 GiB from here on, from 0.
fn widen(asm: &mut Asm) {
    asm.op_offset16(&[0x2e, 0x0f, 0x01, 0x16], "gdtr"); // lgdt cs:[gdtr]
    asm.op(&[0x0f, 0x20, 0xc0, 0x0c, 0x01, 0x0f, 0x22, 0xc0]); // mov eax, cr0; or al, 1; mov cr0, eax
    asm.op(&[0xbb, 0x08, 0x00, 0x8e, 0xe3]); // mov bx, 8; mov fs, bx
    asm.op(&[0x24, 0xfe, 0x0f, 0x22, 0xc0]); // and al, feh; mov cr0, eax
    asm.op(&[0x31, 0xdb, 0x8e, 0xe3]); // xor bx, bx; mov fs, bx
}

/// An instruction of 32-bit mode, whose memory is behind FS.
fn flat<'a>(asm: &'a mut Asm, bytes: &[u8]) -> &'a mut Asm {
    asm.op(&[0x64, 0x67, 0x66]).op(bytes)
}

/// mov dword [ebp+at], value
fn store(asm: &mut Asm, at: u8, value: u32) {
    flat(asm, &[0xc7, 0x45, at]).op(&value.to_le_bytes());
}

/// Once in each boot: the control block, and every page.
fn prepare(asm: &mut Asm, (first, end): (u32, u32), address: impl Fn(u32) -> u32) {
    let magic = CONTROL_MAGIC.to_le_bytes();
    asm.label("prepare");
    asm.op_imm32(&[0x66, 0xbb], BOOT_ADDRESS as u32); // mov ebx, BOOT
    flat(asm, &[0x81, 0x3b]).op(&magic); // cmp dword [ebx], MAGIC
    asm.jump(0x74, "again"); // je
    flat(asm, &[0xc7, 0x43, 0x04, 0, 0, 0, 0]); // mov dword [ebx+4], 0
    flat(asm, &[0xc7, 0x03]).op(&magic); // mov dword [ebx], MAGIC
    asm.label("again");
    flat(asm, &[0xff, 0x43, 0x04]); // inc dword [ebx+4]
    flat(asm, &[0x8b, 0x43, 0x04]); // mov eax, [ebx+4]
    flat(asm, &[0x89, 0x45, Word::Boots.offset()]); // mov [ebp+boots], eax
    store(asm, Word::Passes.offset(), 0);
    store(asm, Word::FirstPage.offset(), first);
    store(asm, Word::EndPage.offset(), end);
    store(asm, NEXT, address(first));
    asm.op_imm32(&[0x66, 0xbe], address(first)); // mov esi, first
    asm.op_imm32(&[0x66, 0xb8], first); // mov eax, its number
    asm.label("fill");
    flat(asm, &[0xc7, 0x46, COUNTER_OFFSET as u8, 0, 0, 0, 0]); // mov dword [esi+counter], 0
    flat(asm, &[0x89, 0x46, NUMBER_OFFSET as u8]); // mov [esi+number], eax
    asm.op(&[0x66, 0x40]); // inc eax
    asm.op_imm32(&[0x66, 0x81, 0xc6], PAGE_BYTES as u32); // add esi, 4096
    asm.op_imm32(&[0x66, 0x81, 0xfe], address(end)); // cmp esi, end
    asm.jump(0x75, "fill"); // jne
    store(asm, Word::Magic.offset(), CONTROL_MAGIC);
    store(asm, Word::State.offset(), 1);
    asm.op_offset16(&[0xea], "go").op(&SEGMENT); // jmp
}
