//! The counter guests: kernels of a few hundred bytes that step a counter in every page for ever.
//!
//! QEMU starts them with `-kernel`, like any Linux: the file is a boot protocol older than 2.00,
//! whose set-up sector runs in real mode at 9020:0000. Pages are stepped in ascending order, and a
//! pass counter after each full pass, so a copy of the RAM is right exactly if the pages up to some
//! point hold `passes + 1` and all others hold `passes`: one lost or stale page shows
//! (see [`crate::guest::checker`]).
//!
//! Two kinds. [`Mode::Real`] never leaves real mode and counts in pages 0x20..0x80, which works on
//! processors whose KVM runs nothing else. [`Mode::Flat`] enters 32-bit mode without paging and counts from
//! page 257 (just above 1 MiB) up to a limit below 2 GiB, where guest-physical addresses equal offsets in the RAM file.
//!
//! Layout while running (little-endian `u32` words at guest-physical [`CONTROL_ADDRESS`]): see [`Word`].
//! Each counted page holds its counter at offset 0 and its own page number at offset 8, so a
//! page that was put in the wrong place shows as well.

use super::asm::{Asm, AsmError};

pub const PAGE_BYTES: u64 = 4096;
/// Guest-physical address of the control words; also their offset in the RAM file.
pub const CONTROL_ADDRESS: u64 = 0x8_0000;
/// Guest-physical address of the boot record: magic and number of boots. The firmware clears the memory
/// below 640 KiB at every reset; this address is the first that it leaves alone and real mode still reaches.
pub const BOOT_ADDRESS: u64 = 0x10_0000;
/// Offset of a page's counter within the page.
pub const COUNTER_OFFSET: u64 = 0;
/// Offset of a page's own number within the page.
pub const NUMBER_OFFSET: u64 = 8;
/// First word of the control block once the guest has started ("GWC1").
pub const CONTROL_MAGIC: u32 = u32::from_le_bytes(*b"GWC1");

const SETUP_SECTORS: usize = 4;
const CODE_OFFSET: usize = 0x200;
const CODE_LINEAR: u32 = 0x9_0200;
/// Where the parameters sit in the file; QEMU writes only to 0x20..0x24 of such an old header.
const PARAMETERS_OFFSET: usize = 0x40;
const PARAMETERS_LINEAR: u32 = 0x9_0040;
/// Where the second vCPU's program begins, from the code's.
const READER_OFFSET: u8 = 2;
/// Local interrupt controller: the register by which one vCPU wakes the others, and what to write there.
const APIC_COMMAND_ADDRESS: u32 = 0xFEE0_0300;
const APIC_INIT_OTHERS: u32 = 0x000C_4500;
/// They begin in real mode at the file's first byte, page 90h.
const APIC_START_OTHERS: u32 = 0x000C_4690;
const PARAMETERS_MAGIC: u32 = u32::from_le_bytes(*b"GWP1");

/// The words of the control block, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Word {
    /// [`CONTROL_MAGIC`] once the guest has started.
    Magic,
    /// 0 while pages are being prepared, 1 while counting, 2 after the action was taken.
    State,
    /// How often the guest has booted in this RAM (kept at [`BOOT_ADDRESS`], copied here).
    Boots,
    /// Full passes since the last boot (wraps).
    Passes,
    FirstPage,
    /// One past the last counted page.
    EndPage,
    /// [`Action`] as a number.
    Action,
    /// The action is taken on the first boot when `Passes` reaches this; 0 is never.
    ActionAtPasses,
    /// Idle loop turns after each page: slows the dirtying.
    Spin,
    /// Whether a second vCPU reads.
    Reader,
    /// Pages that it has read (wraps); in a cache line of its own.
    Reads = 16,
}

impl Word {
    /// Guest-physical address of the word; also its offset in the RAM file.
    pub fn address(self) -> u64 {
        CONTROL_ADDRESS + u64::from(self.offset())
    }

    /// Bytes from the start of the control block.
    pub fn offset(self) -> u8 {
        self as u8 * 4
    }
}

/// What the guest does by itself when its pass counter reaches a number, on its first boot only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u32)]
pub enum Action {
    #[default]
    None,
    /// Powers off by ACPI (q35 with SeaBIOS: port 0x604).
    PowerOff,
    /// Resets by port 0xCF9; after the reboot it counts for ever.
    Reset,
    /// Reports a panic (needs `-device pvpanic`), then halts.
    Panic,
}

/// Which mode the processor counts in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Real mode; pages 0x20..0x80 whatever the limit says.
    Real,
    /// 32-bit protected mode without paging; pages from 1 MiB and 4 KiB to the limit.
    Flat,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CounterSpec {
    pub mode: Mode,
    /// End of the counted memory for [`Mode::Flat`], 2 to 2047 MiB and at most the guest's RAM.
    pub until_mib: u32,
    /// What to do at `action_at_passes`.
    pub action: Action,
    /// Pass at which the action is taken; 0 is never.
    pub action_at_passes: u32,
    /// Idle loop turns after each page.
    pub spin: u32,
    /// A second vCPU reads the counted pages for ever ([`Mode::Flat`]; the machine must have that vCPU).
    pub reader: bool,
}

impl CounterSpec {
    /// Counts for ever in real mode.
    pub fn real() -> Self {
        Self {
            mode: Mode::Real,
            until_mib: 0,
            action: Action::None,
            action_at_passes: 0,
            spin: 0,
            reader: false,
        }
    }

    /// Counts for ever from just above 1 MiB up to `until_mib`.
    pub fn flat(until_mib: u32) -> Self {
        Self {
            mode: Mode::Flat,
            until_mib,
            ..Self::real()
        }
    }

    /// The same guest with an action when its pass counter reaches `passes`.
    pub fn then(self, action: Action, passes: u32) -> Self {
        Self {
            action,
            action_at_passes: passes,
            ..self
        }
    }

    /// The same guest, slower by `spin` idle turns a page.
    pub fn slowed(self, spin: u32) -> Self {
        Self { spin, ..self }
    }

    /// The same guest with a second vCPU that only reads.
    pub fn with_reader(self) -> Self {
        Self {
            reader: true,
            ..self
        }
    }

    /// Counted pages: first, and one past the last.
    pub fn pages(&self) -> (u32, u32) {
        match self.mode {
            Mode::Real => (0x20, 0x80),
            Mode::Flat => (0x101, self.until_mib.saturating_mul(256)),
        }
    }
}

/// Why a counter guest was not built.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum CounterError {
    /// The limit is outside what 32-bit addresses below the PCI hole reach.
    #[error("a counter guest counts up to between 2 and 2047 MiB, not {0} MiB")]
    Limit(u32),
    /// The file to patch is not one of ours.
    #[error("not a counter guest: no parameter block at offset {PARAMETERS_OFFSET:#x}")]
    Foreign,
    /// The built-in program does not assemble.
    #[error("the counter program does not assemble: {0}")]
    Program(#[from] AsmError),
}

pub fn build(spec: &CounterSpec) -> Result<Vec<u8>, CounterError> {
    let code = match spec.mode {
        Mode::Real => real_program()?,
        Mode::Flat => flat_program()?,
    };
    let set_up_bytes = (SETUP_SECTORS + 1) * 512;
    let mut file = vec![0_u8; CODE_OFFSET];
    file[0x1F1] = SETUP_SECTORS as u8;
    file[0x1FE..0x200].copy_from_slice(&[0x55, 0xAA]);
    file[PARAMETERS_OFFSET..PARAMETERS_OFFSET + 4].copy_from_slice(&PARAMETERS_MAGIC.to_le_bytes());
    file.extend_from_slice(&code);
    // The loader wants a kernel part after the set-up sectors; nothing ever runs it.
    file.resize(set_up_bytes + 512, 0);
    // A second vCPU wakes at the beginning of the file: jmp 9020h:READER_OFFSET
    file[..5].copy_from_slice(&[0xEA, READER_OFFSET, 0x00, 0x20, 0x90]);
    patch(&mut file, spec)?;
    Ok(file)
}

/// Rewrites the parameters of a built kernel file; the mode cannot be changed.
pub fn patch(file: &mut [u8], spec: &CounterSpec) -> Result<(), CounterError> {
    if spec.mode == Mode::Flat && !(2..=2047).contains(&spec.until_mib) {
        return Err(CounterError::Limit(spec.until_mib));
    }
    let block = file
        .get_mut(PARAMETERS_OFFSET..PARAMETERS_OFFSET + 4 + COPIED.len() * 4)
        .ok_or(CounterError::Foreign)?;
    if block[..4] != PARAMETERS_MAGIC.to_le_bytes() {
        return Err(CounterError::Foreign);
    }
    let (first, end) = spec.pages();
    let words = [
        first,
        end,
        spec.action as u32,
        spec.action_at_passes,
        spec.spin,
        u32::from(spec.reader),
    ];
    for (slot, word) in block[4..].chunks_exact_mut(4).zip(words) {
        slot.copy_from_slice(&word.to_le_bytes());
    }
    Ok(())
}

/// The parameter words in file order and the control words they become.
const COPIED: [Word; 6] = [
    Word::FirstPage,
    Word::EndPage,
    Word::Action,
    Word::ActionAtPasses,
    Word::Spin,
    Word::Reader,
];

/// Real mode: CS = 9020h, DS = 9000h at entry; FS stays at the control block, BX walks segments.
fn real_program() -> Result<Vec<u8>, AsmError> {
    let mut asm = Asm::default();
    asm.op(&[0xFA, 0xFC]); // cli; cld
    asm.op(&[0xB8, 0x00, 0x80, 0x8E, 0xE0]); // mov ax, 8000h; mov fs, ax
    real_boot_count(&mut asm);
    real_store(&mut asm, Word::State, 0);
    real_store(&mut asm, Word::Magic, CONTROL_MAGIC);
    real_store(&mut asm, Word::Passes, 0);
    for (index, word) in COPIED.into_iter().enumerate() {
        let from = PARAMETERS_OFFSET as u8 + 4 + index as u8 * 4;
        asm.op(&[0x66, 0xA1, from, 0x00]); // mov eax, [parameter]
        asm.op(&[0x66, 0x64, 0xA3, word.offset(), 0x00]); // mov fs:[word], eax
    }
    real_prepare(&mut asm);
    real_count(&mut asm);
    real_act(&mut asm);
    asm.finish()
}

/// mov dword fs:[word], value
fn real_store(asm: &mut Asm, word: Word, value: u32) {
    asm.op_imm32(&[0x66, 0x64, 0xC7, 0x06, word.offset(), 0x00], value);
}

/// The boot record through GS = FFFFh: FFFF:0010 is 1 MiB, since the firmware leaves A20 on.
fn real_boot_count(asm: &mut Asm) {
    asm.op(&[0xB8, 0xFF, 0xFF, 0x8E, 0xE8]); // mov ax, FFFFh; mov gs, ax
    asm.op_imm32(&[0x66, 0x65, 0x81, 0x3E, 0x10, 0x00], CONTROL_MAGIC); // cmp dword gs:[10h], MAGIC
    asm.jump(0x74, "again"); // je
    asm.op_imm32(&[0x66, 0x65, 0xC7, 0x06, 0x14, 0x00], 0); // mov dword gs:[14h], 0
    asm.op_imm32(&[0x66, 0x65, 0xC7, 0x06, 0x10, 0x00], CONTROL_MAGIC); // mov dword gs:[10h], MAGIC
    asm.label("again");
    asm.op(&[0x66, 0x65, 0xFF, 0x06, 0x14, 0x00]); // inc dword gs:[14h]
    asm.op(&[0x66, 0x65, 0xA1, 0x14, 0x00]); // mov eax, gs:[14h]
    asm.op(&[0x66, 0x64, 0xA3, Word::Boots.offset(), 0x00]); // mov fs:[boots], eax
}

fn real_first_segment(asm: &mut Asm) {
    asm.op(&[0x64, 0x8B, 0x1E, Word::FirstPage.offset(), 0x00]); // mov bx, fs:[first]
    asm.op(&[0xC1, 0xE3, 0x08]); // shl bx, 8
}

fn real_prepare(asm: &mut Asm) {
    real_first_segment(asm);
    asm.op(&[0x64, 0x8B, 0x16, Word::EndPage.offset(), 0x00]); // mov dx, fs:[end]
    asm.op(&[0xC1, 0xE2, 0x08]); // shl dx, 8
    asm.op(&[0x66, 0x64, 0xA1, Word::FirstPage.offset(), 0x00]); // mov eax, fs:[first]
    asm.label("prepare");
    asm.op(&[0x8E, 0xDB]); // mov ds, bx
    asm.op_imm32(&[0x66, 0xC7, 0x06, COUNTER_OFFSET as u8, 0x00], 0); // mov dword [counter], 0
    asm.op(&[0x66, 0xA3, NUMBER_OFFSET as u8, 0x00]); // mov [number], eax
    asm.op(&[0x66, 0x40]); // inc eax
    asm.op(&[0x81, 0xC3, 0x00, 0x01]); // add bx, 100h
    asm.op(&[0x39, 0xD3]).jump(0x75, "prepare"); // cmp bx, dx; jne
    real_store(asm, Word::State, 1);
}

fn real_count(asm: &mut Asm) {
    asm.label("pass");
    real_first_segment(asm);
    asm.label("page");
    asm.op(&[0x8E, 0xDB]); // mov ds, bx
    asm.op(&[0x66, 0xFF, 0x06, COUNTER_OFFSET as u8, 0x00]); // inc dword [counter]
    asm.op(&[0x66, 0x64, 0x8B, 0x0E, Word::Spin.offset(), 0x00]); // mov ecx, fs:[spin]
    asm.op(&[0x66, 0x85, 0xC9]).jump(0x74, "next"); // test ecx, ecx; jz
    asm.label("spin").op(&[0x66, 0x49]).jump(0x75, "spin"); // dec ecx; jnz
    asm.label("next");
    asm.op(&[0x81, 0xC3, 0x00, 0x01]); // add bx, 100h
    asm.op(&[0x39, 0xD3]).jump(0x75, "page"); // cmp bx, dx; jne
    asm.op(&[0x66, 0x64, 0xFF, 0x06, Word::Passes.offset(), 0x00]); // inc dword fs:[passes]
    asm.op(&[0x66, 0x64, 0xA1, Word::Passes.offset(), 0x00]); // mov eax, fs:[passes]
    asm.op(&[0x66, 0x64, 0x3B, 0x06, Word::ActionAtPasses.offset(), 0x00]); // cmp eax, fs:[at]
    asm.jump(0x75, "pass"); // jne
    asm.op_imm32(&[0x66, 0x64, 0x81, 0x3E, Word::Boots.offset(), 0x00], 1); // cmp dword fs:[boots], 1
    asm.jump(0x75, "pass"); // jne
    asm.op(&[0x66, 0x64, 0xA1, Word::Action.offset(), 0x00]); // mov eax, fs:[action]
    asm.op(&[0x84, 0xC0]).jump(0x74, "pass"); // test al, al; jz
}

fn real_act(asm: &mut Asm) {
    real_store(asm, Word::State, 2);
    asm.op(&[0x3C, Action::Reset as u8]).jump(0x74, "reset"); // cmp al, 2; je
    asm.op(&[0x3C, Action::Panic as u8]).jump(0x74, "panic"); // cmp al, 3; je
    asm.op(&[0xBA, 0x04, 0x06, 0xB8, 0x00, 0x20, 0xEF]); // mov dx, 604h; mov ax, 2000h; out dx, ax
    asm.jump(0xEB, "halt").label("reset");
    asm.op(&[0xBA, 0xF9, 0x0C, 0xB0, 0x02, 0xEE]); // mov dx, CF9h; mov al, 2; out dx, al
    asm.op(&[0xB0, 0x06, 0xEE]); // mov al, 6; out dx, al
    asm.jump(0xEB, "halt").label("panic");
    asm.op(&[0xBA, 0x05, 0x05, 0xB0, 0x01, 0xEE]); // mov dx, 505h; mov al, 1; out dx, al
    asm.label("halt").op(&[0xF4]).jump(0xEB, "halt"); // hlt; jmp
}

/// 32-bit mode without paging: EBP stays at the control block, ESI walks pages, EDI is the end.
fn flat_program() -> Result<Vec<u8>, AsmError> {
    let mut asm = Asm::default();
    asm.jump(0xEB, "first");
    flat_enter_reader(&mut asm);
    asm.label("first");
    flat_enter(&mut asm);
    flat_boot_count(&mut asm);
    flat_store(&mut asm, Word::State, 0);
    flat_store(&mut asm, Word::Magic, CONTROL_MAGIC);
    flat_store(&mut asm, Word::Passes, 0);
    flat_store(&mut asm, Word::Reads, 0);
    for (index, word) in COPIED.into_iter().enumerate() {
        asm.op_imm32(&[0xA1], PARAMETERS_LINEAR + 4 + index as u32 * 4); // mov eax, [parameter]
        asm.op(&[0x89, 0x45, word.offset()]); // mov [ebp+word], eax
    }
    flat_prepare(&mut asm);
    flat_wake_reader(&mut asm);
    flat_count(&mut asm);
    flat_act(&mut asm);
    flat_read(&mut asm);
    asm.finish()
}

/// At [`READER_OFFSET`]: what a second vCPU does first.
fn flat_enter_reader(asm: &mut Asm) {
    asm.op(&[0xFA, 0xFC]); // cli; cld
    flat_protected(asm, "reader");
}

fn flat_protected(asm: &mut Asm, to: &'static str) {
    asm.op_offset16(&[0x2E, 0x0F, 0x01, 0x16], "gdtr"); // lgdt cs:[gdtr]
    asm.op(&[0x0F, 0x20, 0xC0, 0x0C, 0x01, 0x0F, 0x22, 0xC0]); // mov eax, cr0; or al, 1; mov cr0, eax
    asm.op_address(&[0x66, 0xEA], to, CODE_LINEAR)
        .op(&[0x08, 0x00]); // jmp dword 08h:to
}

fn flat_segments(asm: &mut Asm) {
    asm.op(&[0x66, 0xB8, 0x10, 0x00]); // mov ax, 10h
    asm.op(&[0x8E, 0xD8, 0x8E, 0xC0, 0x8E, 0xD0]); // mov ds, ax; mov es, ax; mov ss, ax
    asm.op_imm32(&[0xBD], CONTROL_ADDRESS as u32); // mov ebp, CONTROL
}

fn flat_enter(asm: &mut Asm) {
    asm.op(&[0xFA, 0xFC]); // cli; cld
    asm.op(&[0xE4, 0x92, 0x0C, 0x02, 0x24, 0xFE, 0xE6, 0x92]); // in al, 92h; or al, 2; and al, FEh; out 92h, al (A20)
    flat_protected(asm, "flat");
    asm.label("gdt").op(&[0; 8]); // null
    asm.op(&[0xFF, 0xFF, 0, 0, 0, 0x9A, 0xCF, 0]); // 08h: code, base 0, 4 GiB
    asm.op(&[0xFF, 0xFF, 0, 0, 0, 0x92, 0xCF, 0]); // 10h: data, base 0, 4 GiB
    asm.label("gdtr")
        .op(&[23, 0])
        .op_address(&[], "gdt", CODE_LINEAR);
    asm.label("flat");
    flat_segments(asm);
}

/// mov dword [ebp+word], value
fn flat_store(asm: &mut Asm, word: Word, value: u32) {
    asm.op_imm32(&[0xC7, 0x45, word.offset()], value);
}

fn flat_boot_count(asm: &mut Asm) {
    asm.op_imm32(&[0xBB], BOOT_ADDRESS as u32); // mov ebx, BOOT
    asm.op_imm32(&[0x81, 0x3B], CONTROL_MAGIC); // cmp dword [ebx], MAGIC
    asm.jump(0x74, "again"); // je
    asm.op_imm32(&[0xC7, 0x43, 0x04], 0); // mov dword [ebx+4], 0
    asm.op_imm32(&[0xC7, 0x03], CONTROL_MAGIC); // mov dword [ebx], MAGIC
    asm.label("again");
    asm.op(&[0xFF, 0x43, 0x04]); // inc dword [ebx+4]
    asm.op(&[0x8B, 0x43, 0x04]); // mov eax, [ebx+4]
    asm.op(&[0x89, 0x45, Word::Boots.offset()]); // mov [ebp+boots], eax
}

fn flat_first_address(asm: &mut Asm) {
    asm.op(&[0x8B, 0x75, Word::FirstPage.offset()]); // mov esi, [ebp+first]
    asm.op(&[0xC1, 0xE6, 0x0C]); // shl esi, 12
}

fn flat_prepare(asm: &mut Asm) {
    flat_first_address(asm);
    asm.op(&[0x8B, 0x7D, Word::EndPage.offset()]); // mov edi, [ebp+end]
    asm.op(&[0xC1, 0xE7, 0x0C]); // shl edi, 12
    asm.op(&[0x8B, 0x45, Word::FirstPage.offset()]); // mov eax, [ebp+first]
    asm.label("prepare");
    asm.op_imm32(&[0xC7, 0x46, COUNTER_OFFSET as u8], 0); // mov dword [esi+counter], 0
    asm.op(&[0x89, 0x46, NUMBER_OFFSET as u8]); // mov [esi+number], eax
    asm.op(&[0x40]); // inc eax
    asm.op_imm32(&[0x81, 0xC6], PAGE_BYTES as u32); // add esi, 4096
    asm.op(&[0x39, 0xFE]).jump(0x75, "prepare"); // cmp esi, edi; jne
    flat_store(asm, Word::State, 1);
}

/// Starts the other vCPUs, where one is asked for: reset, a while, start.
fn flat_wake_reader(asm: &mut Asm) {
    asm.op(&[0x8B, 0x45, Word::Reader.offset()]); // mov eax, [ebp+reader]
    asm.op(&[0x85, 0xC0]).jump(0x74, "alone"); // test eax, eax; jz
    flat_command_others(asm, APIC_INIT_OTHERS);
    asm.op_imm32(&[0xB9], 1_000_000); // mov ecx, 1000000
    asm.label("settle").op(&[0x49]).jump(0x75, "settle"); // dec ecx; jnz
    flat_command_others(asm, APIC_START_OTHERS);
    asm.label("alone");
}

/// mov dword [APIC command], value
fn flat_command_others(asm: &mut Asm, value: u32) {
    asm.op_imm32(&[0xC7, 0x05], APIC_COMMAND_ADDRESS)
        .op(&value.to_le_bytes());
}

/// The second vCPU: a word of every counted page, for ever.
fn flat_read(asm: &mut Asm) {
    asm.label("reader");
    flat_segments(asm);
    asm.op(&[0x8B, 0x7D, Word::EndPage.offset()]); // mov edi, [ebp+end]
    asm.op(&[0xC1, 0xE7, 0x0C]); // shl edi, 12
    asm.label("read");
    flat_first_address(asm);
    asm.label("look");
    asm.op(&[0x8B, 0x46, COUNTER_OFFSET as u8]); // mov eax, [esi+counter]
    asm.op(&[0xFF, 0x45, Word::Reads.offset()]); // inc dword [ebp+reads]
    asm.op_imm32(&[0x81, 0xC6], PAGE_BYTES as u32); // add esi, 4096
    asm.op(&[0x39, 0xFE]).jump(0x75, "look"); // cmp esi, edi; jne
    asm.jump(0xEB, "read");
}

fn flat_count(asm: &mut Asm) {
    asm.label("pass");
    flat_first_address(asm);
    asm.label("page");
    asm.op(&[0xFF, 0x46, COUNTER_OFFSET as u8]); // inc dword [esi+counter]
    asm.op(&[0x8B, 0x4D, Word::Spin.offset()]); // mov ecx, [ebp+spin]
    asm.op(&[0x85, 0xC9]).jump(0x74, "next"); // test ecx, ecx; jz
    asm.label("spin").op(&[0x49]).jump(0x75, "spin"); // dec ecx; jnz
    asm.label("next");
    asm.op_imm32(&[0x81, 0xC6], PAGE_BYTES as u32); // add esi, 4096
    asm.op(&[0x39, 0xFE]).jump(0x75, "page"); // cmp esi, edi; jne
    asm.op(&[0xFF, 0x45, Word::Passes.offset()]); // inc dword [ebp+passes]
    asm.op(&[0x8B, 0x45, Word::Passes.offset()]); // mov eax, [ebp+passes]
    asm.op(&[0x3B, 0x45, Word::ActionAtPasses.offset()])
        .jump(0x75, "pass"); // cmp eax, [ebp+at]; jne
    asm.op_imm32(&[0x81, 0x7D, Word::Boots.offset()], 1)
        .jump(0x75, "pass"); // cmp dword [ebp+boots], 1; jne
    asm.op(&[0x8B, 0x45, Word::Action.offset()]); // mov eax, [ebp+action]
    asm.op(&[0x84, 0xC0]).jump(0x74, "pass"); // test al, al; jz
}

fn flat_act(asm: &mut Asm) {
    flat_store(asm, Word::State, 2);
    asm.op(&[0x3C, Action::Reset as u8]).jump(0x74, "reset"); // cmp al, 2; je
    asm.op(&[0x3C, Action::Panic as u8]).jump(0x74, "panic"); // cmp al, 3; je
    asm.op(&[0x66, 0xBA, 0x04, 0x06]); // mov dx, 604h
    asm.op(&[0x66, 0xB8, 0x00, 0x20, 0x66, 0xEF]); // mov ax, 2000h; out dx, ax
    asm.jump(0xEB, "halt").label("reset");
    asm.op(&[0x66, 0xBA, 0xF9, 0x0C, 0xB0, 0x02, 0xEE]); // mov dx, CF9h; mov al, 2; out dx, al
    asm.op(&[0xB0, 0x06, 0xEE]); // mov al, 6; out dx, al
    asm.jump(0xEB, "halt").label("panic");
    asm.op(&[0x66, 0xBA, 0x05, 0x05, 0xB0, 0x01, 0xEE]); // mov dx, 505h; mov al, 1; out dx, al
    asm.label("halt").op(&[0xF4]).jump(0xEB, "halt"); // hlt; jmp
}

#[cfg(test)]
mod tests {
    use super::*;

    fn word(file: &[u8], index: usize) -> u32 {
        let at = PARAMETERS_OFFSET + 4 + index * 4;
        u32::from_le_bytes(file[at..at + 4].try_into().unwrap())
    }

    #[test]
    fn both_programs_fit_their_set_up_sectors() {
        for program in [real_program().unwrap(), flat_program().unwrap()] {
            assert!(
                program.len() <= SETUP_SECTORS * 512,
                "{} bytes",
                program.len()
            );
        }
    }

    #[test]
    fn the_second_vcpu_begins_where_the_file_jumps() {
        let program = flat_program().unwrap();
        assert_eq!(program[usize::from(READER_OFFSET)..][..2], [0xFA, 0xFC]);
    }

    #[test]
    fn a_file_carries_its_parameters_and_no_linux_magic() {
        let spec = CounterSpec::flat(64).then(Action::Reset, 7).slowed(3);
        let file = build(&spec).unwrap();
        assert_eq!(file[0x1F1], 4);
        assert_ne!(&file[0x202..0x206], b"HdrS");
        let words: Vec<u32> = (0..6).map(|index| word(&file, index)).collect();
        assert_eq!(words, [257, 64 * 256, 2, 7, 3, 0]);
    }

    #[test]
    fn patching_changes_parameters_only() {
        let mut file = build(&CounterSpec::flat(64)).unwrap();
        patch(&mut file, &CounterSpec::flat(128)).unwrap();
        assert_eq!(file, build(&CounterSpec::flat(128)).unwrap());
    }

    #[test]
    fn bad_limits_and_foreign_files_are_refused() {
        assert_eq!(build(&CounterSpec::flat(1)), Err(CounterError::Limit(1)));
        assert_eq!(
            build(&CounterSpec::flat(2048)),
            Err(CounterError::Limit(2048))
        );
        assert_eq!(
            patch(&mut [0; 4096], &CounterSpec::real()),
            Err(CounterError::Foreign)
        );
        assert_eq!(
            patch(&mut [0; 8], &CounterSpec::real()),
            Err(CounterError::Foreign)
        );
    }
}
