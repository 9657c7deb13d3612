//! A guest that UEFI boots, and that keeps a number in a UEFI variable.
//!
//! The program reads the variable, writes it one higher, shows it in memory and counts for ever; so each boot that finds what an
//! earlier one wrote shows a higher number, and one that finds nothing shows 1. A test that leaves a number in its memory
//! has it written into the variable. It is an EFI program of one section, given as a kernel or as the program on a disk.

use super::asm::{Asm, AsmError};
use std::io;
use std::os::unix::fs::FileExt;

/// Where the program shows how far it is: rounds, the variable, what a test wants written, what went wrong.
const MARK: u64 = 32 << 20;
/// Where the section is, in the file and in memory.
const SECTION: (u32, u32) = (0x200, 0x1000);
/// Bytes of data before its first instruction.
const DATA: u32 = 0x40;
/// Bytes of the file: one that is given as a kernel is longer than an old kernel's setup.
const FILE: usize = 0x1000;
/// Sectors of a disk of 1.44 MB.
const SECTORS: usize = 2880;
const SECTOR: usize = 512;

/// How far the guest has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    pub round: u32,
    /// What the variable is.
    pub number: u32,
    /// Which call of the firmware failed with what.
    pub wrong: u32,
}

/// Reads that from the guest's memory.
pub fn progress(ram: &impl FileExt) -> io::Result<Progress> {
    let mut words = [[0; 4]; 4];
    for (word, at) in words.iter_mut().zip((MARK..).step_by(4)) {
        ram.read_exact_at(word, at)?;
    }
    let [round, number, _, wrong] = words.map(u32::from_le_bytes);
    Ok(Progress {
        round,
        number,
        wrong,
    })
}

/// Has the guest write this number, above 0, into the variable.
pub fn want(ram: &impl FileExt, number: u32) -> io::Result<()> {
    ram.write_all_at(&number.to_le_bytes(), MARK + 8)
}

pub fn program() -> Result<Vec<u8>, AsmError> {
    let code = code()?;
    let mut section = data();
    section.extend(code);
    let mut file = headers();
    file.resize(SECTION.0 as usize, 0);
    file.extend(section);
    file.resize(FILE, 0);
    Ok(file)
}

/// The variable's namespace and name, then room for a length and the number.
fn data() -> Vec<u8> {
    let mut data = (1..=16).collect::<Vec<u8>>();
    data.extend("Godwit".encode_utf16().flat_map(u16::to_le_bytes));
    data.resize(DATA as usize, 0);
    data
}

/// Called with the system table in rdx. In rbx is the data, in r12 and r13 the firmware's tables, in r14 the mark.
fn code() -> Result<Vec<u8>, AsmError> {
    let mut asm = Asm::default();
    asm.op(&[0x48, 0x8d, 0x1d, 0xb9, 0xff, 0xff, 0xff]) // lea rbx, [rip - 0x47]: the section's begin
        .op(&[0x48, 0x83, 0xec, 0x38]) // sub rsp, 0x38
        .op(&[0x4c, 0x8b, 0x62, 0x58]) // mov r12, [rdx + 0x58]: runtime services
        .op(&[0x4c, 0x8b, 0x6a, 0x60]) // mov r13, [rdx + 0x60]: boot services
        .op_imm32(&[0x41, 0xbe], MARK as u32) // mov r14d, MARK
        .op(&[0x31, 0xc9, 0x31, 0xd2]) // xor ecx, ecx; xor edx, edx
        .op(&[0x45, 0x31, 0xc0, 0x45, 0x31, 0xc9]) // xor r8d, r8d; xor r9d, r9d
        .op_imm32(&[0x41, 0xff, 0x95], 0x100) // call [r13 + 0x100]: no watchdog
        .op(&[0x4c, 0x89, 0x74, 0x24, 0x28]) // mov [rsp + 0x28], r14
        .op_imm32(&[0xb9], 2) // mov ecx, 2: at this address
        .op_imm32(&[0xba], 2) // mov edx, 2: a loader's data
        .op_imm32(&[0x41, 0xb8], 1) // mov r8d, 1: page
        .op(&[0x4c, 0x8d, 0x4c, 0x24, 0x28]) // lea r9, [rsp + 0x28]
        .op(&[0x41, 0xff, 0x55, 0x28]) // call [r13 + 0x28]: allocate
        .op(&[0x48, 0x85, 0xc0]) // test rax, rax
        .jump(0x75, "wrong") // jnz
        .op_imm32(&[0x48, 0xc7, 0x43, 0x20], 4) // mov qword [rbx + 0x20], 4
        .op_imm32(&[0xc7, 0x43, 0x28], 0) // mov dword [rbx + 0x28], 0
        .op(&[0x48, 0x8d, 0x4b, 0x10, 0x48, 0x89, 0xda]) // lea rcx, [rbx + 0x10]; mov rdx, rbx
        .op(&[0x45, 0x31, 0xc0]) // xor r8d, r8d
        .op(&[0x4c, 0x8d, 0x4b, 0x20]) // lea r9, [rbx + 0x20]
        .op(&[0x48, 0x8d, 0x43, 0x28]) // lea rax, [rbx + 0x28]
        .op(&[0x48, 0x89, 0x44, 0x24, 0x20]) // mov [rsp + 0x20], rax
        .op(&[0x41, 0xff, 0x54, 0x24, 0x48]) // call [r12 + 0x48]: get the variable, if there is one
        .op(&[0xff, 0x43, 0x28]); // inc dword [rbx + 0x28]
    asm.label("set")
        .op(&[0x48, 0x8d, 0x4b, 0x10, 0x48, 0x89, 0xda]) // lea rcx, [rbx + 0x10]; mov rdx, rbx
        .op_imm32(&[0x41, 0xb8], 3) // mov r8d, 3: it stays
        .op_imm32(&[0x41, 0xb9], 4) // mov r9d, 4
        .op(&[0x48, 0x8d, 0x43, 0x28]) // lea rax, [rbx + 0x28]
        .op(&[0x48, 0x89, 0x44, 0x24, 0x20]) // mov [rsp + 0x20], rax
        .op(&[0x41, 0xff, 0x54, 0x24, 0x58]) // call [r12 + 0x58]: set the variable
        .op(&[0x48, 0x85, 0xc0]) // test rax, rax
        .jump(0x75, "wrong") // jnz
        .op(&[0x8b, 0x43, 0x28]) // mov eax, [rbx + 0x28]
        .op(&[0x41, 0x89, 0x46, 0x04]) // mov [r14 + 4], eax
        .op_imm32(&[0x41, 0xc7, 0x46, 0x08], 0); // mov dword [r14 + 8], 0
    asm.label("round")
        .op(&[0x41, 0xff, 0x06]) // inc dword [r14]
        .op(&[0x41, 0x8b, 0x46, 0x08]) // mov eax, [r14 + 8]
        .op(&[0x85, 0xc0]) // test eax, eax
        .jump(0x74, "round") // jz
        .op(&[0x89, 0x43, 0x28]) // mov [rbx + 0x28], eax
        .jump(0xeb, "set"); // jmp
    asm.label("wrong")
        .op(&[0x41, 0x89, 0x46, 0x0c]) // mov [r14 + 12], eax
        .op(&[0xf4]) // hlt
        .jump(0xeb, "wrong"); // jmp
    asm.finish()
}

/// Those of a program for x86-64 that may be loaded anywhere.
fn headers() -> Vec<u8> {
    let (in_file, in_memory) = SECTION;
    let section_bytes = FILE as u32 - in_file;
    let mut file = b"MZ".to_vec();
    file.resize(0x3c, 0);
    words(&mut file, &[0x40]);
    file.extend(b"PE\0\0");
    halves(&mut file, &[0x8664, 1]); // x86-64, one section
    words(&mut file, &[0, 0, 0]);
    halves(&mut file, &[0xf0, 0x22]); // bytes of what follows; a program for large addresses
    halves(&mut file, &[0x20b, 0]);
    words(&mut file, &[section_bytes, 0, 0]);
    words(&mut file, &[in_memory + DATA, in_memory]); // where it begins
    words(&mut file, &[0, 0]); // its base, eight bytes
    words(&mut file, &[0x1000, 0x200]); // alignment in memory and in the file
    words(&mut file, &[0, 0, 0, 0]);
    words(&mut file, &[in_memory + 0x1000, in_file, 0]); // bytes in memory, of headers
    halves(&mut file, &[10, 0]); // an EFI application
    words(&mut file, &[0; 8]); // stack and heap
    words(&mut file, &[0, 16]);
    words(&mut file, &[0; 32]); // tables, none
    file.extend(b".text\0\0\0");
    words(
        &mut file,
        &[section_bytes, in_memory, section_bytes, in_file],
    );
    words(&mut file, &[0, 0, 0, 0xe000_0020]); // read, written and executed
    file
}

fn words(file: &mut Vec<u8>, words: &[u32]) {
    file.extend(words.iter().flat_map(|word| word.to_le_bytes()));
}

fn halves(file: &mut Vec<u8>, halves: &[u16]) {
    file.extend(halves.iter().flat_map(|half| half.to_le_bytes()));
}

/// A disk that UEFI boots the program from: a FAT file system of 1.44 MB with `EFI/BOOT/BOOTX64.EFI`.
pub fn disk() -> Result<Vec<u8>, AsmError> {
    let program = program()?;
    let mut disk = vec![0; SECTORS * SECTOR];
    let boot: &[(usize, &[u8])] = &[
        (0, &[0xeb, 0x3c, 0x90]),
        (3, b"MSDOS5.0"),
        // 512 bytes a sector, 1 sector a cluster, 1 reserved, 2 tables, 224 names, 2880 sectors, 9 for each table.
        (
            11,
            &[
                0, 2, 1, 1, 0, 2, 224, 0, 0x40, 0x0b, 0xf0, 9, 0, 18, 0, 2, 0,
            ],
        ),
        (38, &[0x29, 1, 2, 3, 4]),
        (43, b"GODWIT     FAT12   "),
        (510, &[0x55, 0xaa]),
    ];
    for (at, bytes) in boot {
        put(&mut disk, *at, bytes);
    }
    // Clusters 2 and 3 are the directories, those from 4 on the program.
    let clusters = program.len().div_ceil(SECTOR);
    let mut chain = vec![0xff0, 0xfff, 0xfff, 0xfff];
    chain.extend((5..4 + clusters as u16).chain([0xfff]));
    let table = packed(&chain);
    put(&mut disk, SECTOR, &table);
    put(&mut disk, 10 * SECTOR, &table);
    put(&mut disk, 19 * SECTOR, &entry(b"EFI        ", 0x10, 2, 0));
    put(
        &mut disk,
        at(2),
        &directory(2, 0, entry(b"BOOT       ", 0x10, 3, 0)),
    );
    let file = entry(b"BOOTX64 EFI", 0x20, 4, program.len() as u32);
    put(&mut disk, at(3), &directory(3, 2, file));
    put(&mut disk, at(4), &program);
    Ok(disk)
}

fn put(disk: &mut [u8], at: usize, bytes: &[u8]) {
    disk[at..at + bytes.len()].copy_from_slice(bytes);
}

/// Where a cluster is: behind the boot sector, both tables and the root's names.
fn at(cluster: usize) -> usize {
    (1 + 18 + 14 + cluster - 2) * SECTOR
}

/// Twelve bits each.
fn packed(chain: &[u16]) -> Vec<u8> {
    let pairs = chain
        .chunks(2)
        .map(|pair| (pair[0], pair.get(1).copied().unwrap_or(0)));
    let bytes = |(a, b): (u16, u16)| [a as u8, (a >> 8) as u8 | (b << 4) as u8, (b >> 4) as u8];
    pairs.flat_map(bytes).collect()
}

fn directory(own: u16, above: u16, file: [u8; 32]) -> Vec<u8> {
    let dots = [(*b".          ", own), (*b"..         ", above)];
    let dots = dots.map(|(name, cluster)| entry(&name, 0x10, cluster, 0));
    [dots[0], dots[1], file].concat()
}

fn entry(name: &[u8; 11], kind: u8, cluster: u16, bytes: u32) -> [u8; 32] {
    let mut entry = [0; 32];
    entry[..11].copy_from_slice(name);
    entry[11] = kind;
    entry[26..28].copy_from_slice(&cluster.to_le_bytes());
    entry[28..].copy_from_slice(&bytes.to_le_bytes());
    entry
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_program_is_no_linux_kernel_and_fits_its_section() {
        let program = program().unwrap();
        assert_eq!(program.len(), FILE);
        assert_ne!(&program[0x202..0x206], b"HdrS");
        // What an old kernel's setup would be is counted here.
        assert_eq!(program[0x1f1], 0);
        let end = program.iter().rposition(|byte| *byte != 0).unwrap();
        assert!(end < FILE - 0x100, "{end}");
    }
}
