//! Hashes of guest files and a quick look at the speed of AES.
//!
//! Owns nothing. Refuses: what is no regular file, and files larger than any kernel or
//! initramfs has business to be.

use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use aws_lc_rs::digest;
use godwit_qemu::disk::open_looked_at;
use rustix::fs::{CWD, OFlags};
use std::io::Read;
use std::path::Path;
use std::time::Instant;

/// Largest file that is hashed, bytes.
pub const FILE_LEN_MAX: u64 = 4 << 30;

/// SHA-256 of a regular file, hex; reads at most [`FILE_LEN_MAX`].
pub fn sha256_of_file(path: &Path) -> std::io::Result<String> {
    let file = open_looked_at(CWD, path, OFlags::RDONLY)?;
    let found = file.metadata()?;
    if !found.is_file() {
        return Err(std::io::Error::other("it is no regular file"));
    }
    // What the kernel makes up when it is read has no length, and may be waited for without end.
    let mut file = file.take(found.len().min(FILE_LEN_MAX));
    let mut context = digest::Context::new(&digest::SHA256);
    let mut buffer = vec![0; 1 << 20];
    loop {
        let length = file.read(&mut buffer)?;
        if length == 0 {
            return Ok(hex(context.finish().as_ref()));
        }
        context.update(buffer.get(..length).unwrap_or_default());
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// How fast this core seals 256 KiB records, GB/s; takes some 10 ms.
pub fn seal_gb_per_s() -> Option<f64> {
    const RECORD: usize = 256 << 10;
    const RECORDS: u8 = 128;
    let key = LessSafeKey::new(UnboundKey::new(&AES_256_GCM, &[7; 32]).ok()?);
    let mut record = vec![1; RECORD];
    let began = Instant::now();
    for index in 0..RECORDS {
        let nonce = Nonce::assume_unique_for_key([index; 12]);
        let _tag = key
            .seal_in_place_separate_tag(nonce, Aad::empty(), &mut record)
            .ok()?;
    }
    let seconds = began.elapsed().as_secs_f64().max(1e-9);
    Some(RECORD as f64 * f64::from(RECORDS) / 1e9 / seconds)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{FileType, Mode};

    #[test]
    fn a_file_hashes_to_the_known_value() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        std::fs::write(&path, "abc").unwrap();
        let expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(sha256_of_file(&path).unwrap(), expected);
        assert!(sha256_of_file(dir.path()).is_err());
    }

    #[test]
    fn a_fifo_is_refused_and_nobody_waits_for_what_is_written_to_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("kernel");
        let (kind, mode) = (FileType::Fifo, Mode::RUSR | Mode::WUSR);
        rustix::fs::mknodat(rustix::fs::CWD, &path, kind, mode, 0).unwrap();
        let refused = sha256_of_file(&path).unwrap_err();
        assert!(refused.to_string().contains("neither a file"), "{refused}");
    }

    #[test]
    fn the_speed_is_a_number() {
        assert!(seal_gb_per_s().unwrap() > 0.0);
    }
}
