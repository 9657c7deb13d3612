//! What a qcow2 image says of itself, read from its head without running anything.
//!
//! Pure. The head is hostile input: an image may name other files of the host, whose content a guest would then find on its disk.
//! Refuses: images with a backing file or a data file beside them, encrypted and damaged ones, and what a later version adds.

/// Bytes of the longest head that is looked at.
pub const HEAD_LEN: usize = 104;
const MAGIC: &[u8] = b"QFI\xfb";
/// Features that must be understood: what was not closed, another compression, smaller parts.
const KNOWN: u64 = 1 | 8 | 16;
const DAMAGED: u64 = 2;
const DATA_FILE: u64 = 4;

/// Formats that are no raw images either, by how they begin.
const OTHERS: [(&[u8], &str); 4] = [
    (b"KDMV", "VMDK"),
    (b"# Disk DescriptorFile", "VMDK"),
    (b"vhdxfile", "VHDX"),
    (b"conectix", "VHD"),
];

/// What an image is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    Raw,
    /// With the bytes that a guest finds on it.
    Qcow2 {
        bytes: u64,
    },
}

/// What an image is that begins so; else why it is not used.
pub fn format_of(head: &[u8]) -> Result<Format, String> {
    if let Some((_, name)) = OTHERS.iter().find(|(magic, _)| head.starts_with(magic)) {
        return Err(format!(
            "it is a {name} image: make a raw or qcow2 image of it with 'qemu-img convert'"
        ));
    }
    if !head.starts_with(MAGIC) {
        return Ok(Format::Raw);
    }
    let damaged = || "its head is not whole".to_owned();
    let word = |at| number(head, at, 4).ok_or_else(damaged);
    let long = |at| number(head, at, 8).ok_or_else(damaged);
    let version = word(4)?;
    if !(2..=3).contains(&version) {
        return Err(format!(
            "it is a qcow image of version {version}: versions 2 and 3 are known"
        ));
    }
    if long(8)? != 0 || word(16)? != 0 {
        return Err("it has a backing file, through which it could show any file of the host: make one without with 'qemu-img convert'".into());
    }
    if word(32)? != 0 {
        return Err("it is encrypted: make one that is not with 'qemu-img convert'".into());
    }
    let features = if version == 3 { long(72)? } else { 0 };
    if features & DATA_FILE != 0 {
        return Err("its data is in another file, which could be any file of the host: make one without with 'qemu-img convert'".into());
    }
    if features & DAMAGED != 0 {
        return Err("it is marked as damaged: see 'qemu-img check'".into());
    }
    if features & !KNOWN != 0 {
        return Err(
            "it has features that are not known here: make a plain one with 'qemu-img convert'"
                .into(),
        );
    }
    match long(24)? {
        0 => Err("it is empty".into()),
        bytes => Ok(Format::Qcow2 { bytes }),
    }
}

fn number(head: &[u8], at: usize, length: usize) -> Option<u64> {
    let bytes = head.get(at..at + length)?;
    Some(
        bytes
            .iter()
            .fold(0, |sum, byte| sum << 8 | u64::from(*byte)),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(version: u32) -> Vec<u8> {
        let mut head = vec![0; HEAD_LEN];
        head[..4].copy_from_slice(MAGIC);
        head[4..8].copy_from_slice(&version.to_be_bytes());
        head[24..32].copy_from_slice(&(1u64 << 30).to_be_bytes());
        head
    }

    fn with(at: usize, bytes: &[u8]) -> Result<Format, String> {
        let mut head = head(3);
        head[at..at + bytes.len()].copy_from_slice(bytes);
        format_of(&head)
    }

    #[test]
    fn an_image_that_could_show_other_files_is_refused() {
        let bytes = 1 << 30;
        assert_eq!(format_of(&head(2)), Ok(Format::Qcow2 { bytes }));
        assert_eq!(with(79, &[1 | 8 | 16]), Ok(Format::Qcow2 { bytes }));
        for (at, value, told) in [
            (15, &[1][..], "backing file"),
            (19, &[1], "backing file"),
            (35, &[2], "encrypted"),
            (79, &[4], "another file"),
            (79, &[2], "damaged"),
            (72, &[1], "not known"),
            (4, &[0, 0, 0, 4], "version 4"),
            (24, &[0; 8], "empty"),
        ] {
            let refusal = with(at, value).unwrap_err();
            assert!(refusal.contains(told), "{at}: {refusal}");
        }
        for length in 4..80 {
            assert!(format_of(&head(3)[..length]).is_err(), "{length}");
        }
        assert_eq!(format_of(b""), Ok(Format::Raw));
        assert!(format_of(b"KDMV and more").unwrap_err().contains("VMDK"));
    }
}
