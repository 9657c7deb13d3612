//! A state directory that was put back from an older copy, while a hypervisor lives and when it is gone.

use super::*;
use crate::disks::Disks;
use crate::testing::{FakeQemu, Site};
use godwit_guestmem::RamFile;
use godwit_types::Generation;
use godwit_types::image::{ImageId, KnownImage};
use godwit_types::vm::DiskSpec;
use std::sync::Arc;

/// A guest whose disk was `first` and is `second` now, under a copy of its state directory from before.
struct PutBack {
    site: Site,
    qemu: FakeQemu,
    older: ServedDisks,
    now: ServedDisks,
    spec: VmSpec,
}

impl PutBack {
    fn new() -> Self {
        let site = Site::new();
        let qemu = site.qemu_of(3, &["running"]);
        let ram = std::fs::metadata(site.paths.ram_file(3)).unwrap();
        let of = |path| ServedDisks {
            disks: vec![DiskSpec::new("root", path)],
            ..ServedDisks::none(3, (ram.dev(), ram.ino()))
        };
        let (older, now) = (of("/first"), of("/second"));
        write(&site.paths, &older).unwrap();
        write(&site.paths, &now).unwrap();
        save_json(&site.paths.disks(), &older).unwrap();
        let spec = VmSpec {
            disks: older.disks.clone(),
            ..VmSpec::placeholder(&site.config.vm)
        };
        save_json(&site.paths.spec(), &spec).unwrap();
        Self {
            site,
            qemu,
            older,
            now,
            spec,
        }
    }

    /// As a process does that finds the VM.
    fn is_looked_at(&mut self) -> Result<(), StoreError> {
        put_back_living(
            &self.site.paths,
            self.site.config.qemu_uid,
            Some(&mut self.spec),
        )
    }

    fn read(&self) -> (ServedDisks, String) {
        let paths = &self.site.paths;
        let described: VmSpec = load_json(&paths.spec()).unwrap().unwrap();
        let what = load_json(&paths.disks()).unwrap().unwrap();
        (what, described.disks[0].path.clone())
    }

    fn of_living(&self) -> Option<ServedDisks> {
        of_living(&self.site.paths, (3, self.now.ram)).unwrap()
    }

    /// Nothing can be written where the next record would be.
    fn has_no_room(&self) -> String {
        let next = format!("{}.new", self.site.paths.disks().display());
        std::fs::create_dir(&next).unwrap();
        next
    }
}

#[test]
fn an_older_copy_of_the_state_directory_says_nothing_of_the_disks_of_a_guest_that_runs() {
    let mut back = PutBack::new();
    assert_eq!(back.of_living().as_ref(), Some(&back.now));
    back.is_looked_at().unwrap();
    assert_eq!(back.spec.disks, back.now.disks);
    assert_eq!(back.read(), (back.now.clone(), "/second".into()));
    // What a person described for the next start stays.
    back.spec.disks[0].path = "/third".into();
    save_json(&back.site.paths.spec(), &back.spec).unwrap();
    back.is_looked_at().unwrap();
    assert_eq!(back.read(), (back.now.clone(), "/third".into()));
}

#[test]
fn of_a_hypervisor_that_is_gone_the_state_directory_tells() {
    let mut back = PutBack::new();
    back.qemu.child.kill().unwrap();
    back.qemu.child.wait().unwrap();
    back.is_looked_at().unwrap();
    assert_eq!(back.read(), (back.older.clone(), "/first".into()));
    // Another one has its number.
    let other = back.site.paths.ram_file(3);
    std::fs::rename(&other, other.with_extension("other")).unwrap();
    std::fs::remove_file(back.site.paths.monitor(3, 0)).unwrap();
    let _qemu = back.site.qemu_of(3, &["running"]);
    back.is_looked_at().unwrap();
    assert_eq!(back.read(), (back.older.clone(), "/first".into()));
    let of_other = of_living(&back.site.paths, (3, (0, 0))).unwrap();
    assert_eq!(of_other, None);
}

/// A version that writes the state directory alone moved the disk.
#[test]
fn a_later_image_that_only_the_state_directory_knows_counts() {
    let mut back = PutBack::new();
    let known = |taken| KnownImage {
        disk: "root".into(),
        image: ImageId::new(7),
        generation: Generation(2),
        taken,
    };
    let (mut living, mut later) = (back.now.clone(), back.older.clone());
    living.known = vec![known(3)];
    later.known = vec![known(4)];
    write(&back.site.paths, &living).unwrap();
    save_json(&back.site.paths.disks(), &later).unwrap();
    back.is_looked_at().unwrap();
    assert_eq!(back.read(), (later.clone(), "/first".into()));
    assert_eq!(back.of_living(), Some(later));
    // One that was put back knows no more.
    let mut earlier = back.older.clone();
    earlier.known = vec![known(3)];
    save_json(&back.site.paths.disks(), &earlier).unwrap();
    assert_eq!(back.of_living(), Some(living));
}

/// The state directory is full just then.
#[test]
fn what_lives_counts_also_where_it_cannot_be_written_again_and_is_not_forgotten() {
    let mut back = PutBack::new();
    let next = back.has_no_room();
    back.is_looked_at().unwrap_err();
    write(&back.site.paths, &back.older).unwrap_err();
    assert_eq!(back.of_living().as_ref(), Some(&back.now));
    let ram = RamFile::open(&back.site.paths.ram_file(3), 16 << 20).unwrap();
    let (config, paths, ram) = (&back.site.config, &back.site.paths, Arc::new(ram));
    let disks = Disks::go_on(config, paths, 3, &ram, (true, None), None).unwrap();
    assert_eq!(*disks.0.what(), back.now);
    // Nothing is done of it before it is certain what counts after the next power cut.
    assert!(disks.0.change(|_| ()).is_err());
    std::fs::remove_dir(next).unwrap();
    disks.0.change(|_| ()).unwrap();
    assert_eq!(back.read().0, back.now);
}

#[test]
fn what_a_guest_has_is_in_its_run_directory_again_once_somebody_looks() {
    let back = PutBack::new();
    write(&back.site.paths, &back.now).unwrap();
    forget_living(&back.site.paths).unwrap();
    assert!(is_kept(&back.site.paths, &back.now));
    assert!(says(&back.site.paths.living_disks(), &back.now));
    remove(&back.site.paths).unwrap();
    let paths = &back.site.paths;
    assert!(!paths.disks().exists() && !paths.living_disks().exists());
}

#[test]
fn a_record_is_written_in_the_form_that_the_agent_reads() {
    const WRITTEN: &str = include_str!("../../testdata/disks.json");
    let what: ServedDisks = serde_json::from_str(WRITTEN).unwrap();
    let example: serde_json::Value = serde_json::from_str(WRITTEN).unwrap();
    assert_eq!(serde_json::to_value(what).unwrap(), example);
}
