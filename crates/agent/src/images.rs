//! What this host knows of the images on shared storage of the VMs that it holds, as a controller hears it, and what that one said.
//!
//! Part of [`Records`]. The VM process writes it with what else it knows of its disks, once it is durable at the image; here it is
//! only read, with what the controller said before. A file that cannot be read says nothing: its VM process tells why. Nor does a disk that has just got another image,
//! which may be taken back.

use crate::records::{Records, stored};
use crate::seen::Seen;
use godwit_store::{StoreError, load_json, remove_document, save_json};
use godwit_types::host_api::{DISKS_FILE, IMAGES_FILE, PutVm};
use godwit_types::image::{KnownImage, take_newest};
use godwit_types::{ApiError, Generation, VmName};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::path::Path;

/// As much of that file as is needed.
#[derive(Deserialize)]
struct Written {
    disks: Vec<Disk>,
    #[serde(default)]
    known: Vec<KnownImage>,
    #[serde(default)]
    left: Vec<Left>,
}

#[derive(Deserialize)]
struct Disk {
    name: String,
    #[serde(default)]
    read_only: bool,
    #[serde(default)]
    shared: bool,
}

/// An image that a disk had before.
#[derive(Deserialize)]
struct Left {
    disk: String,
    /// Whether the VM's description says where the disk is now.
    #[serde(default)]
    followed: bool,
}

impl Written {
    fn of_shared(self) -> Vec<KnownImage> {
        let Self { disks, known, left } = self;
        let is_certain = |name: &str| left.iter().all(|left| left.disk != name || left.followed);
        let is_shared = |known: &KnownImage| {
            let disk = disks.iter().find(|disk| disk.name == known.disk);
            disk.is_some_and(|disk| disk.shared && !disk.read_only && is_certain(&disk.name))
        };
        known.into_iter().filter(is_shared).collect()
    }
}

impl Records {
    /// What is known of a VM's images on shared storage; nothing of a VM that this host does not hold.
    pub(crate) fn images(&self, vm: &VmName) -> Vec<KnownImage> {
        let holds = self
            .record(vm)
            .is_some_and(|record| record.may_run().is_some());
        if !holds {
            return Vec::new();
        }
        let dir = self.dir(vm);
        let written = read(&self.seen.images, &dir.join(DISKS_FILE), Written::of_shared);
        let mut known = written.unwrap_or_default();
        let said = read(&self.seen.images, &dir.join(IMAGES_FILE), |said| said);
        take_newest(&mut known, said.unwrap_or_default());
        known
    }

    /// Has the VM process know of its images what its holders before this host did. Where this host `holds` the VM, what it knows
    /// itself may be newer.
    pub(crate) fn note_images(&self, request: &PutVm, holds: bool) -> Result<(), ApiError> {
        let path = self.dir(&request.spec.name).join(IMAGES_FILE);
        let noted = match holds {
            true => load_json(&path),
            false => Ok(None),
        };
        let mut images: Vec<KnownImage> = noted
            .unwrap_or_else(|error| {
                tracing::warn!(%error, "it is written anew with what the controller knows");
                None
            })
            .unwrap_or_default();
        take_newest(&mut images, request.images.iter().cloned());
        let noted = match images.is_empty() {
            true => remove_document(&path),
            false => save_json(&path, &images),
        };
        noted.map_err(stored)
    }

    /// A grant failed. One that may be on record all the same keeps it.
    pub(crate) fn forget_images(&self, vm: &VmName, generation: Generation) {
        let is_granted = self
            .read(vm)
            .map(|record| record.may_run() == Some(generation));
        if is_granted.unwrap_or(true) {
            return;
        }
        if let Err(error) = remove_document(&self.dir(vm).join(IMAGES_FILE)) {
            tracing::warn!(%vm, %error, "what others knew of its images is left");
        }
    }
}

fn read<T: DeserializeOwned>(
    seen: &Seen<Vec<KnownImage>>,
    path: &Path,
    of: impl FnOnce(T) -> Vec<KnownImage>,
) -> Option<Vec<KnownImage>> {
    let read = seen.read(path, || Ok::<_, StoreError>(load_json(path)?.map(of)));
    read.unwrap_or_else(|error| {
        // With each poll.
        tracing::debug!(%error, "what is known of images is not told");
        None
    })
}

#[cfg(test)]
mod tests {
    use crate::records::Records;
    use godwit_store::save_json;
    use godwit_types::host_api::{DISKS_FILE, IMAGES_FILE, PutVm};
    use godwit_types::image::{ImageId, KnownImage};
    use godwit_types::vm::VmSpec;
    use godwit_types::{Generation, HostName, VmName};
    use serde_json::json;

    fn known(disk: &str) -> KnownImage {
        KnownImage {
            disk: disk.into(),
            image: ImageId::new(7),
            generation: Generation(2),
            taken: 3,
        }
    }

    fn put(generation: u64, images: Vec<KnownImage>) -> PutVm {
        PutVm {
            spec: VmSpec::placeholder(&VmName::new("web").unwrap()),
            generation: Generation(generation),
            expect: Some(Generation(generation - 1)),
            images,
        }
    }

    fn records(dir: &tempfile::TempDir) -> (Records, VmName) {
        std::fs::create_dir(dir.path().join("vms")).unwrap();
        let records = Records::new(dir.path(), HostName::new("a").unwrap());
        (records, VmName::new("web").unwrap())
    }

    #[test]
    fn a_host_tells_of_the_shared_images_of_vms_that_it_holds() {
        let dir = tempfile::tempdir().unwrap();
        let (records, web) = records(&dir);
        records.survey(&web, Generation(1)).unwrap();
        records.put(&put(2, Vec::new())).unwrap();
        assert_eq!(records.images(&web), []);
        let disk = |name: &str, shared: bool, read_only: bool| json!({"name": name, "path": "/x", "shared": shared, "read_only": read_only});
        let written = json!({
            "launch": 1, "what": "a later version may add",
            "disks": [disk("root", true, false), disk("own", false, false), disk("cd", true, true)],
            "known": [known("root"), known("own"), known("cd"), known("gone")],
        });
        let path = records.dir(&web).join(DISKS_FILE);
        save_json(&path, &written).unwrap();
        assert_eq!(records.images(&web), [known("root")]);
        // A switch to another image may be taken back until the description has followed.
        for (followed, told) in [(false, vec![]), (true, vec![known("root")])] {
            let mut moved = written.clone();
            moved["left"] = json!([{"disk": "root", "path": "/y", "followed": followed}]);
            save_json(&path, &moved).unwrap();
            assert_eq!(records.images(&web), told);
        }
        // What cannot be read says nothing, and does not keep the rest from being told.
        std::fs::write(&path, "{").unwrap();
        assert_eq!(records.images(&web), []);
        save_json(&path, &written).unwrap();
        records.delete(&web, Some(Generation(2))).unwrap();
        save_json(&path, &written).unwrap();
        assert_eq!(records.images(&web), [], "it is not held here");
    }

    #[test]
    fn what_holders_before_knew_is_kept_for_the_vm_process_until_the_vm_leaves() {
        let dir = tempfile::tempdir().unwrap();
        let (records, web) = records(&dir);
        let path = records.dir(&web).join(IMAGES_FILE);
        let said = || godwit_store::load_json::<Vec<KnownImage>>(&path).unwrap();
        records.survey(&web, Generation(1)).unwrap();
        records.put(&put(2, vec![known("root")])).unwrap();
        assert_eq!(said(), Some(vec![known("root")]));
        assert_eq!(
            records.images(&web),
            [known("root")],
            "before it has taken it itself"
        );
        // A new description alone, by a controller that does not know this.
        let described = PutVm {
            expect: None,
            ..put(2, Vec::new())
        };
        records.put(&described).unwrap();
        assert_eq!(said(), Some(vec![known("root")]));
        records.delete(&web, Some(Generation(2))).unwrap();
        assert_eq!(said(), None);
        // Another VM of that name, to which nothing of this one applies.
        save_json(&path, &vec![known("root")]).unwrap();
        records.survey(&web, Generation(8)).unwrap();
        records.put(&put(9, Vec::new())).unwrap();
        assert_eq!(said(), None);
    }

    /// A host that dies in between is asked to start it again, by what it was granted.
    #[test]
    fn no_grant_is_there_without_what_holders_before_knew() {
        let dir = tempfile::tempdir().unwrap();
        let (records, web) = records(&dir);
        records.survey(&web, Generation(1)).unwrap();
        // Nothing can be written where that goes.
        let path = records.dir(&web).join(format!("{IMAGES_FILE}.new"));
        std::fs::create_dir_all(&path).unwrap();
        records.put(&put(2, vec![known("root")])).unwrap_err();
        assert_eq!(records.read(&web).unwrap().may_run(), None);
    }

    #[test]
    fn an_older_word_of_a_controller_takes_nothing_from_the_holder_and_a_refused_grant_leaves_none()
    {
        let dir = tempfile::tempdir().unwrap();
        let (records, web) = records(&dir);
        let of = |taken| KnownImage {
            taken,
            ..known("root")
        };
        records.survey(&web, Generation(1)).unwrap();
        records.put(&put(2, vec![of(4)])).unwrap();
        for (said, kept) in [(3, 4), (5, 5), (5, 5)] {
            let described = PutVm {
                expect: None,
                ..put(2, vec![of(said)])
            };
            records.put(&described).unwrap();
            assert_eq!(records.images(&web), [of(kept)]);
            // A damaged one keeps nobody from starting the VM.
            if said == 5 {
                std::fs::write(records.dir(&web).join(IMAGES_FILE), "{").unwrap();
            }
        }
        records.delete(&web, Some(Generation(2))).unwrap();
        records.put(&put(2, vec![of(9)])).unwrap_err();
        assert!(!records.dir(&web).join(IMAGES_FILE).exists());
    }
}
