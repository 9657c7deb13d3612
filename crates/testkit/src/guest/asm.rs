//! A very small assembler: bytes, labels and the jumps between them.
//!
//! The counter guests are a few dozen instructions, so each is written as its bytes beside its
//! mnemonic and only what depends on layout (jump distances, label addresses) is computed here.
//! It knows no mnemonics and refuses a short jump that does not reach.

use std::collections::HashMap;

/// Why a program could not be put together. These are mistakes in the program, not in its input.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum AsmError {
    /// A jump names a label that was never placed.
    #[error("label {0} is used but never placed")]
    UnknownLabel(&'static str),
    /// The same label was placed twice.
    #[error("label {0} is placed twice")]
    DoubleLabel(&'static str),
    /// What is before some place needs more than there is.
    #[error("{length} bytes are before a place at {place}")]
    TooLong {
        length: usize,
        /// Where that is, in bytes from the program's beginning.
        place: usize,
    },
    /// A short jump spans more than a signed byte.
    #[error("jump to {label} spans {distance} bytes, a short jump reaches 127")]
    TooFar {
        label: &'static str,
        /// How far that is, in bytes from the end of the jump.
        distance: i64,
    },
}

enum Fixup {
    /// One byte, relative to the byte after it.
    Short(usize, &'static str),
    /// Four bytes: the label's offset plus an origin.
    Absolute(usize, &'static str, u32),
    /// Two bytes: the label's offset.
    Offset16(usize, &'static str),
}

/// A program being written, from offset 0.
#[derive(Default)]
pub struct Asm {
    bytes: Vec<u8>,
    labels: HashMap<&'static str, usize>,
    fixups: Vec<Fixup>,
    double: Option<&'static str>,
    /// How long it was where it was to be shorter, and how short.
    long: Option<(usize, usize)>,
}

impl Asm {
    /// Appends instruction bytes as they are.
    pub fn op(&mut self, bytes: &[u8]) -> &mut Self {
        self.bytes.extend_from_slice(bytes);
        self
    }

    /// Appends instruction bytes followed by a 32-bit immediate.
    pub fn op_imm32(&mut self, bytes: &[u8], value: u32) -> &mut Self {
        self.op(bytes).op(&value.to_le_bytes())
    }

    /// Appends zeros up to so many bytes; [`Asm::finish`] refuses a program that is longer here.
    pub fn pad(&mut self, to: usize) -> &mut Self {
        let length = self.bytes.len();
        self.long = self.long.or((length > to).then_some((length, to)));
        self.bytes.resize(length.max(to), 0);
        self
    }

    /// Places a label here.
    pub fn label(&mut self, name: &'static str) -> &mut Self {
        if self.labels.insert(name, self.bytes.len()).is_some() {
            self.double = Some(name);
        }
        self
    }

    /// Appends a jump with an 8-bit distance: `opcode` is 0xEB (jmp), 0x74 (jz), 0x75 (jnz) and so on.
    pub fn jump(&mut self, opcode: u8, label: &'static str) -> &mut Self {
        self.op(&[opcode, 0]);
        self.fixups.push(Fixup::Short(self.bytes.len() - 1, label));
        self
    }

    /// Appends instruction bytes followed by the 32-bit address of a label in a program that starts at `origin`.
    pub fn op_address(&mut self, bytes: &[u8], label: &'static str, origin: u32) -> &mut Self {
        self.op(bytes).op(&[0; 4]);
        self.fixups
            .push(Fixup::Absolute(self.bytes.len() - 4, label, origin));
        self
    }

    /// Appends instruction bytes followed by the 16-bit offset of a label in this program.
    pub fn op_offset16(&mut self, bytes: &[u8], label: &'static str) -> &mut Self {
        self.op(bytes).op(&[0; 2]);
        self.fixups
            .push(Fixup::Offset16(self.bytes.len() - 2, label));
        self
    }

    /// Resolves all jumps and gives the program.
    pub fn finish(mut self) -> Result<Vec<u8>, AsmError> {
        if let Some(name) = self.double {
            return Err(AsmError::DoubleLabel(name));
        }
        if let Some((length, place)) = self.long {
            return Err(AsmError::TooLong { length, place });
        }
        for fixup in std::mem::take(&mut self.fixups) {
            self.resolve(fixup)?;
        }
        Ok(self.bytes)
    }

    fn resolve(&mut self, fixup: Fixup) -> Result<(), AsmError> {
        match fixup {
            Fixup::Short(at, label) => {
                let distance = self.place(label)? as i64 - (at as i64 + 1);
                let byte =
                    i8::try_from(distance).map_err(|_| AsmError::TooFar { label, distance })?;
                self.bytes[at] = byte as u8;
            }
            Fixup::Absolute(at, label, origin) => {
                let address = origin + self.place(label)? as u32;
                self.bytes[at..at + 4].copy_from_slice(&address.to_le_bytes());
            }
            Fixup::Offset16(at, label) => {
                let offset = self.place(label)? as u16;
                self.bytes[at..at + 2].copy_from_slice(&offset.to_le_bytes());
            }
        }
        Ok(())
    }

    fn place(&self, label: &'static str) -> Result<usize, AsmError> {
        self.labels
            .get(label)
            .copied()
            .ok_or(AsmError::UnknownLabel(label))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jumps_resolve_forwards_and_backwards() {
        let mut asm = Asm::default();
        asm.label("top")
            .op(&[0x90])
            .jump(0xEB, "end")
            .jump(0x75, "top")
            .label("end")
            .op(&[0xF4]);
        assert_eq!(asm.finish(), Ok(vec![0x90, 0xEB, 2, 0x75, 0xFB, 0xF4]));
    }

    #[test]
    fn addresses_carry_the_origin() {
        let mut asm = Asm::default();
        asm.op_address(&[0xE9], "here", 0x9_0200)
            .op_offset16(&[0xA1], "here")
            .label("here");
        assert_eq!(
            asm.finish(),
            Ok(vec![0xE9, 0x08, 0x02, 0x09, 0, 0xA1, 8, 0])
        );
    }

    #[test]
    fn mistakes_are_named() {
        let mut lost = Asm::default();
        lost.jump(0xEB, "nowhere");
        assert_eq!(lost.finish(), Err(AsmError::UnknownLabel("nowhere")));
        let mut twice = Asm::default();
        twice.label("a").label("a");
        assert_eq!(twice.finish(), Err(AsmError::DoubleLabel("a")));
        let mut far = Asm::default();
        far.jump(0xEB, "far").op(&[0x90; 128]).label("far");
        assert_eq!(
            far.finish(),
            Err(AsmError::TooFar {
                label: "far",
                distance: 128
            })
        );
    }
}
