//! Whether an image is kept for another VM of this host, by that VM's own files.
//!
//! What an image says of itself outlives the VM: one that was deleted, moved away, or got another image keeps nothing, nor does one
//! whose image was copied with its attributes. Nor is one kept for a VM that nobody holds, or whose QEMU opens disks itself. Owns nothing. In
//! doubt the image is kept: a person can let it go.

use crate::image::readable_record;
use godwit_blockio::holder;
use godwit_ownership::ImageRecord;
use godwit_qemu::disk::{identity_of, identity_of_open};
use godwit_qemu::holding;
use godwit_store::{VmStore, load_json};
use godwit_types::host_api::{SPEC_FILE, VmProcessConfig};
use godwit_types::vm::{DiskSpec, VmSpec};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;

/// What an image says, where it is the disk of another VM that this host had last.
pub(super) fn said_of_another(
    config: &VmProcessConfig,
    image: BorrowedFd<'_>,
) -> io::Result<Option<ImageRecord>> {
    let held = holder::read(image)?;
    let record = readable_record(held.as_ref());
    Ok(record.filter(|record| record.vm != config.vm && record.holder == config.host))
}

/// Which file a path is: its file system and inode.
type Look<'a> = &'a dyn Fn(&Path) -> io::Result<Option<(u64, u64)>>;

/// Whether that VM is this host's still, on or off, and this image its disk. `look` tells which file is at a path that its host's root
/// may not look at.
pub(super) fn is_kept(
    config: &VmProcessConfig,
    record: &ImageRecord,
    image: BorrowedFd<'_>,
    look: Look<'_>,
) -> bool {
    let Some(state) = VmStore::state_of(Path::new(&config.state_dir)) else {
        return false;
    };
    match VmStore::peek(state, &record.vm) {
        Ok(Some(held)) if held.may_hold() => {}
        Ok(_) => return false,
        Err(error) => {
            tracing::warn!(vm = %record.vm, %error, "whether the VM is still here cannot be told");
            return true;
        }
    }
    let path = VmStore::directory(state, &record.vm).join(SPEC_FILE);
    match load_json::<VmSpec>(&path) {
        Ok(Some(spec)) => {
            let mut disks = spec.disks.iter();
            disks.any(|disk| disk.name == record.disk && has(disk, image, look))
        }
        Ok(None) | Err(_) => true,
    }
}

/// Refuses a device that another VM of this host, on or off, has for a disk. Why is a part of a sentence.
pub(super) fn must_be_nobodys(config: &VmProcessConfig, device: &File) -> Result<(), String> {
    match VmStore::state_of(Path::new(&config.state_dir)) {
        Some(state) => holding::must_be_nobodys(state, Some(&config.vm), device),
        None => Ok(()),
    }
}

/// Whether this file may be the disk's image.
fn has(disk: &DiskSpec, image: BorrowedFd<'_>, look: Look<'_>) -> bool {
    let open = image.as_fd().try_clone_to_owned().map(File::from);
    let Ok(ours) = open.and_then(|open| identity_of_open(&open)) else {
        return true;
    };
    let path = Path::new(&disk.path);
    let look = |path| identity_of(path).or_else(|_| look(path));
    match look(path) {
        Ok(Some(theirs)) => theirs == ours,
        // Its file system may not be mounted there just now, and be found elsewhere.
        Ok(None) => {
            let place = path.parent().map(look).transpose();
            let place = place.ok().flatten().flatten();
            place.is_none_or(|(device, _)| device != ours.0)
        }
        Err(_) => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Site, ask, holds, open};
    use godwit_ownership::{HostRecord, IMAGE_RECORD_FORMAT, Phase, Power};
    use godwit_store::save_json;
    use godwit_types::host_api::VmRequest;
    use godwit_types::image::ImageId;
    use godwit_types::{Generation, VmName};
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt as _;
    use std::path::PathBuf;

    /// A host of which VM `web` is to use an image that says that it is VM `db`'s.
    struct Here {
        site: Site,
        images: tempfile::TempDir,
    }

    impl Here {
        fn new() -> Self {
            let here = Self {
                site: Site::new(),
                // Not the default place, which may be a tmpfs.
                images: tempfile::tempdir_in("/var/tmp").unwrap(),
            };
            std::fs::write(here.image(), "image").unwrap();
            here.says(&here.image());
            here.has(holds(Power::Off), &here.image());
            here
        }

        fn image(&self) -> PathBuf {
            self.images.path().join("root.raw")
        }

        fn state(&self) -> PathBuf {
            self.site.paths.state.ancestors().nth(2).unwrap().to_owned()
        }

        fn db() -> VmName {
            VmName::new("db").unwrap()
        }

        fn says(&self, image: &Path) {
            let record = ImageRecord {
                format: IMAGE_RECORD_FORMAT,
                image: ImageId::new(7),
                vm: Self::db(),
                disk: "root".to_owned(),
                holder: self.site.config.host.clone(),
                generation: Generation(2),
                taken: 3,
            };
            let file = File::options().read(true).write(true).open(image).unwrap();
            let text = serde_json::to_vec(&record).unwrap();
            assert!(holder::replace(file.as_fd(), None, &text).unwrap());
        }

        /// The host has VM `db` so, with this image.
        fn has(&self, phase: Phase, image: &Path) {
            let record = HostRecord {
                highest: Generation(2),
                held: Generation(2),
                phase,
                ..HostRecord::absent(Self::db())
            };
            let mut store = VmStore::open(&self.state(), &Self::db()).unwrap();
            store.persist(&record).unwrap();
            let text = format!(
                "name = \"db\"\nvcpus = 1\nmemory_mib = 16\nkernel = \"/k\"\n[[disk]]\nname = \"root\"\npath = \"{}\"",
                image.display()
            );
            let spec = VmSpec::from_toml(&text).unwrap();
            save_json(&self.description(), &spec).unwrap();
        }

        fn description(&self) -> PathBuf {
            VmStore::directory(&self.state(), &Self::db()).join(SPEC_FILE)
        }

        fn is_kept(&self, image: &Path) -> bool {
            let (config, file) = (&self.site.config, File::open(image).unwrap());
            let record = said_of_another(config, file.as_fd()).unwrap().unwrap();
            is_kept(config, &record, file.as_fd(), &identity_of)
        }
    }

    #[test]
    fn an_image_is_kept_for_another_vm_of_the_host_until_that_is_gone_or_has_another() {
        let here = Here::new();
        assert!(here.is_kept(&here.image()));
        // By whatever name it is found.
        let link = here.images.path().join("link.raw");
        std::os::unix::fs::symlink(here.image(), &link).unwrap();
        here.has(holds(Power::Off), &link);
        assert!(here.is_kept(&here.image()));
        // The other VM got another image, or this one is a copy with its attributes.
        here.has(holds(Power::Off), &here.images.path().join("other.raw"));
        assert!(!here.is_kept(&here.image()));
        // What has it under another path is not mounted there just now.
        for elsewhere in ["unmounted/root.raw", "/dev/root.raw"] {
            here.has(holds(Power::Off), &here.images.path().join(elsewhere));
            assert!(here.is_kept(&here.image()), "{elsewhere}");
        }
        here.has(holds(Power::Off), &here.image());
        let copy = here.images.path().join("copy.raw");
        std::fs::write(&copy, "image").unwrap();
        here.says(&copy);
        assert!(here.is_kept(&here.image()) && !here.is_kept(&copy));
        here.has(Phase::Absent, &here.image());
        assert!(!here.is_kept(&here.image()), "it was deleted");
        std::fs::remove_dir_all(VmStore::directory(&here.state(), &Here::db())).unwrap();
        assert!(!here.is_kept(&here.image()), "it is not known here");
    }

    #[test]
    fn a_device_that_another_vm_of_the_host_has_is_no_place_for_a_disk() {
        let here = Here::new();
        let image = File::open(here.image()).unwrap();
        let refused = || must_be_nobodys(&here.site.config, &image);
        let why = refused().unwrap_err();
        assert!(why.contains("is disk 'root' of VM 'db'"), "{why}");
        here.has(holds(Power::Off), &here.images.path().join("other.raw"));
        refused().unwrap();
        here.has(holds(Power::Off), &here.image());
        std::fs::write(here.description(), "torn").unwrap();
        assert!(
            refused()
                .unwrap_err()
                .contains("may be a disk of another VM")
        );
        here.has(Phase::Absent, &here.image());
        refused().unwrap();
    }

    #[test]
    fn a_start_with_it_is_refused_and_names_the_other_vm_also_where_it_is_only_read() {
        for read_only in [false, true] {
            a_start_is_refused(read_only);
        }
    }

    fn a_start_is_refused(read_only: bool) {
        let here = Here::new();
        // For QEMU's user.
        for (path, mode) in [
            (here.images.path().to_owned(), 0o755),
            (here.image(), 0o666),
        ] {
            std::fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
        }
        let image = File::options().write(true).open(here.image()).unwrap();
        image.set_len(1 << 20).unwrap();
        here.site.record(holds(Power::Off));
        let text = format!(
            "name = \"web\"\nvcpus = 1\nmemory_mib = 16\nhardware = 2\n[[disk]]\nname = \"root\"\npath = \"{}\"\nread_only = {read_only}",
            here.image().display()
        );
        let spec = VmSpec::from_toml(&text).unwrap();
        save_json(&here.site.paths.spec(), &spec).unwrap();
        let mut vm = open(&here.site);
        let refused = ask(&mut vm, VmRequest::Start).unwrap_err();
        for words in ["disk 'root' of VM 'db'", "delete that VM", "image release"] {
            assert!(refused.message.contains(words), "{refused}");
        }
        assert!(refused.not_begun);
        let config = &here.site.config;
        let file = File::open(here.image()).unwrap();
        let said = said_of_another(config, file.as_fd()).unwrap();
        assert_eq!(said.unwrap().vm, Here::db(), "it is that VM's still");
    }

    #[test]
    fn in_doubt_it_is_kept() {
        let here = Here::new();
        std::fs::write(here.description(), "torn").unwrap();
        assert!(here.is_kept(&here.image()));
        std::fs::remove_file(here.description()).unwrap();
        assert!(here.is_kept(&here.image()));
        let record = VmStore::directory(&here.state(), &Here::db()).join("ownership");
        std::fs::write(record, "torn").unwrap();
        assert!(here.is_kept(&here.image()));
    }

    #[test]
    fn what_another_host_had_last_or_this_vm_itself_is_not_looked_at_here() {
        let mut here = Here::new();
        let file = File::open(here.image()).unwrap();
        here.site.config.vm = Here::db();
        assert_eq!(
            said_of_another(&here.site.config, file.as_fd()).unwrap(),
            None
        );
        here.site.config.vm = VmName::new("web").unwrap();
        here.site.config.host = godwit_types::HostName::new("z").unwrap();
        assert_eq!(
            said_of_another(&here.site.config, file.as_fd()).unwrap(),
            None
        );
    }
}
