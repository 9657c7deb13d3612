//! Disks that are to be made before their VM starts: from another image, or empty.
//!
//! Pure, owns nothing. `from`, `linked` and `size_gib` say how a disk begins, and are gone from the description once it has begun. Refuses:
//! sizes out of bounds, a disk that is made from itself, an empty disk that can only be read, and one that is linked to nothing.

use super::{DiskSpec, InvalidVm, VmSpec, check_path};
use crate::datastore::is_device_path;

/// Largest disk that is made, GiB (64 TiB).
pub const DISK_GIB_MAX: u64 = 64 << 10;

/// Why no disk of so many bytes comes from another host, which says that it has them; a part of a sentence.
pub fn check_disk_bytes(bytes: u64) -> Result<(), String> {
    match bytes <= DISK_GIB_MAX << 30 {
        true => Ok(()),
        false => Err(format!(
            "its host says that it has {bytes} bytes, and a disk has at most {DISK_GIB_MAX} GiB: see what runs on that host"
        )),
    }
}

/// A file system leaves this part to disks that are in use,
const KEPT_PART: u64 = 100;
/// and no more bytes than these.
const KEPT_MAX: u64 = 1 << 30;

/// Bytes that images which come to a file system of this size may take, of those that are free: a disk in use that has no room
/// pauses its guest in the end, and what comes can come another time.
pub fn room_for_images(file_system_bytes: u64, free_bytes: u64) -> u64 {
    free_bytes.saturating_sub((file_system_bytes / KEPT_PART).min(KEPT_MAX))
}

impl DiskSpec {
    /// Whether its image is still to be made.
    pub fn is_to_be_made(&self) -> bool {
        self.from.is_some() || self.size_gib.is_some()
    }

    /// The length that its image is to have, if that was said.
    pub fn wanted_bytes(&self) -> Option<u64> {
        self.size_gib.map(|gib| gib.saturating_mul(1 << 30))
    }

    pub(super) fn check_making(&self) -> Result<(), InvalidVm> {
        let wrong = |what: String| Err(InvalidVm(format!("disk '{}': {what}", self.name)));
        if let Some(gib) = self
            .size_gib
            .filter(|gib| !(1..=DISK_GIB_MAX).contains(gib))
        {
            return wrong(format!(
                "size_gib = {gib} is out of range: use 1 to {DISK_GIB_MAX}"
            ));
        }
        if self.linked {
            self.check_linking().or_else(wrong)?;
        }
        match &self.from {
            Some(from) if *from == self.path => {
                wrong("`from` and `path` are the same file: give its own image another path".into())
            }
            Some(from) => check_path("disk from", from),
            None if self.size_gib.is_some() && self.read_only => {
                wrong("an empty disk that the guest may only read is of no use: give `from`, or leave out read_only".into())
            }
            None => Ok(()),
        }
    }
}

impl DiskSpec {
    fn check_linking(&self) -> Result<(), String> {
        let why = match &self.from {
            None => "`linked` says that it begins as the image in `from`, and that is not given",
            Some(_) if self.read_only => {
                "one that its guest only reads is not linked: give the image itself as its path"
            }
            Some(_) if is_device_path(&self.path) => {
                "beside a block device there is no place for what its guest writes over another image: give it a path in a directory, or leave out `linked`"
            }
            Some(_) => return Ok(()),
        };
        Err(why.to_owned())
    }

    /// Whatever it was made from.
    fn is_made(&mut self) {
        (self.from, self.linked, self.size_gib) = (None, false, None);
    }
}

impl VmSpec {
    /// Disks whose images are still to be made.
    pub fn disks_to_make(&self) -> impl Iterator<Item = &DiskSpec> {
        self.disks.iter().filter(|disk| disk.is_to_be_made())
    }

    /// The description once all its disks are made.
    pub fn with_disks_made(mut self) -> Self {
        self.disks.iter_mut().for_each(DiskSpec::is_made);
        self
    }

    /// The description in place of one whose disks may be made already: those are not made again. Refused where one is
    /// elsewhere by now, since the guest would begin with an empty one.
    pub fn with_disks_known(mut self, known: &VmSpec) -> Result<Self, InvalidVm> {
        let vm = &self.name;
        for disk in &mut self.disks {
            let wants = disk.from.is_some() || disk.size_gib.is_some();
            let before = known.disks.iter().find(|before| before.name == disk.name);
            let made = before.filter(|before| before.from.is_none() && before.size_gib.is_none());
            let Some(made) = made.filter(|_| wants) else {
                continue;
            };
            if made.path != disk.path {
                let (name, path, now) = (&disk.name, &disk.path, &made.path);
                return Err(InvalidVm(format!(
                    "disk '{name}' of VM '{vm}' is made, and is {now} now: write that as its path; for another disk at {path} give it another name, or leave out `from` and `size_gib`"
                )));
            }
            disk.is_made();
        }
        Ok(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn described(lines: &str) -> Result<VmSpec, InvalidVm> {
        VmSpec::from_toml(&format!(
            "name = \"web\"\nvcpus = 1\nmemory_mib = 64\n[[disk]]\nname = \"root\"\npath = \"/d/root.raw\"\n{lines}"
        ))
    }

    #[test]
    fn how_a_disk_begins_is_written_until_it_has_begun() {
        let vm = described("from = \"/d/base.qcow2\"\nsize_gib = 20\n").unwrap();
        let [disk] = vm.disks_to_make().collect::<Vec<_>>()[..] else {
            panic!()
        };
        assert_eq!(disk.wanted_bytes(), Some(20 << 30));
        let written = serde_json::to_string(&vm).unwrap();
        assert!(
            written.contains("\"from\":\"/d/base.qcow2\",\"size_gib\":20"),
            "{written}"
        );
        let vm = vm.with_disks_made();
        assert_eq!(vm.disks_to_make().count(), 0);
        let written = serde_json::to_string(&vm).unwrap();
        assert!(
            !written.contains("from") && !written.contains("size_gib"),
            "{written}"
        );
    }

    #[test]
    fn a_disk_that_is_made_is_not_made_again_by_the_same_description_and_not_elsewhere_either() {
        let file = described("from = \"/d/base.qcow2\"\nsize_gib = 20\n").unwrap();
        let again = file.clone().with_disks_known(&file).unwrap();
        assert_eq!(again, file, "it is not made yet");
        let mut known = file.clone().with_disks_made();
        let again = file.clone().with_disks_known(&known).unwrap();
        assert_eq!(again, known);
        known.disks[0].path = "/fast/web-root.raw".into();
        let refused = file.with_disks_known(&known).unwrap_err().to_string();
        assert!(refused.contains("is /fast/web-root.raw now"), "{refused}");
        let plain = described("").unwrap();
        assert_eq!(plain.clone().with_disks_known(&known).unwrap(), plain);
    }

    #[test]
    fn a_disk_is_called_linked_until_it_is_made_and_on_hardware_that_has_such() {
        let mut vm = described("from = \"/d/base.raw\"\nlinked = true\n").unwrap();
        let written = serde_json::to_string(&vm).unwrap();
        assert!(written.contains("\"linked\":true"), "{written}");
        let made = vm.clone().with_disks_made();
        let known = vm.clone().with_disks_known(&made).unwrap();
        assert!(!made.disks[0].linked && known == made);
        let written = serde_json::to_string(&made).unwrap();
        assert!(
            !written.contains("linked"),
            "older hosts do not know it: {written}"
        );
        let plain = described("from = \"/d/base.raw\"\n").unwrap();
        assert!(
            !serde_json::to_string(&plain).unwrap().contains("linked"),
            "older hosts do not know it"
        );
        vm.set_hardware(None);
        let refused = vm.check_boots().unwrap_err().to_string();
        assert!(refused.contains("linked = true"), "{refused}");
    }

    #[test]
    fn what_makes_no_disk_is_refused() {
        for (lines, told) in [
            ("size_gib = 0\n", "out of range"),
            ("size_gib = 65537\n", "out of range"),
            ("from = \"/d/root.raw\"\n", "the same file"),
            ("from = \"base\"\n", "disk from"),
            ("from = \"/d/\\u001b\"\n", "control character"),
            ("size_gib = 1\nread_only = true\n", "of no use"),
            ("linked = true\n", "is not given"),
            (
                "from = \"/d/base\"\nlinked = true\nread_only = true\n",
                "the image itself",
            ),
        ] {
            let refusal = described(lines).unwrap_err().to_string();
            assert!(refusal.contains(told), "{lines}: {refusal}");
        }
    }
}
