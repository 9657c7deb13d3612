//! Which files are removed and renamed, at whatever moment a process died.

use super::super::former::tests::say;
use super::*;
use crate::testing::{Site, holds, open, unconfirmed};
use godwit_ownership::{Phase, Power};
use godwit_qemu::disk::identity_of;
use godwit_store::save_json;
use godwit_types::HostName;
use godwit_types::vm::VmSpec;
use rustix::fs::{IFlags, ioctl_getflags, ioctl_setflags};
use std::time::{Duration, Instant};

pub(in crate::disks) struct Left {
    pub site: Site,
    pub paths: Paths,
    pub directory: tempfile::TempDir,
    pub what: ServedDisks,
}

pub(in crate::disks) fn id(name: &str) -> MigrationId {
    MigrationId::new(name).unwrap()
}

impl Left {
    /// What a process left that died: `disks.json`, and images of these names.
    pub(in crate::disks) fn with(
        arriving: Option<(&str, Option<u64>)>,
        leaving: Option<&str>,
        files: &[&str],
    ) -> Self {
        // Where files can say of themselves who has them.
        let directory = tempfile::tempdir_in("/var/tmp").unwrap();
        let site = Site::new();
        for name in files {
            std::fs::write(directory.path().join(name), name.as_bytes()).unwrap();
        }
        let path = directory.path().join("root.raw");
        let of = |path: &Path| identity_of(path).unwrap();
        let came = directory.path().join(CAME);
        let image = of(&came).or_else(|| of(&path)).unwrap_or((1, 2));
        let disk = DiskSpec::new("root", path.to_str().unwrap());
        let arriving = arriving.map(|(migration, whole)| Arrival {
            whole: whole.map(Generation),
            ..Arrival::of(&id(migration))
        });
        let what = ServedDisks {
            disks: vec![disk],
            images: vec![image],
            arriving,
            leaving: leaving.map(id),
            ..ServedDisks::none(1, (0, 0))
        };
        let paths = Paths::of(&site.config);
        std::fs::create_dir_all(&paths.state).unwrap();
        save_json(&paths.disks(), &what).unwrap();
        Self {
            site,
            paths,
            directory,
            what,
        }
    }

    pub(in crate::disks) fn files(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.directory.path()).unwrap();
        let mut names: Vec<String> = entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    /// What is written in the file of this name.
    pub(in crate::disks) fn content(&self, name: &str) -> String {
        std::fs::read_to_string(self.directory.path().join(name)).unwrap()
    }

    /// A process takes the VM's seat with this record.
    pub(in crate::disks) fn open(&self, phase: Phase) -> crate::vm::Vm {
        self.site.record(phase);
        open(&self.site)
    }
}

pub(in crate::disks) const CAME: &str = "root.raw.arriving-m";

#[test]
fn a_host_that_died_after_it_took_the_vm_has_its_disks_before_a_person_raises_the_generation() {
    let left = Left::with(Some(("m", Some(2))), None, &[CAME]);
    drop(left.open(unconfirmed(Power::Off)));
    assert_eq!(left.files(), ["root.raw"]);
    assert_eq!(left.content("root.raw"), CAME);
    // Whatever generation follows.
    assert_eq!(settle(&left.paths, Generation(1 << 30)), Ok(()));
    assert_eq!(left.files(), ["root.raw"]);
}

#[test]
fn what_came_is_kept_by_a_host_that_holds_the_vm_under_a_generation_for_which_it_was_not_whole() {
    for whole in [None, Some(7)] {
        let left = Left::with(Some(("m", whole)), None, &[CAME]);
        assert_eq!(settle(&left.paths, Generation(9)), Ok(()));
        let kept = "root.raw.kept-m";
        assert_eq!(left.files(), [kept], "it may be somebody's only copy");
        assert_eq!(left.content(kept), CAME);
    }
}

#[test]
fn a_file_that_has_the_name_keeps_it_and_the_image_that_came_stays_known() {
    let left = Left::with(Some(("m", Some(2))), None, &[CAME, "root.raw"]);
    let refused = settle(&left.paths, Generation(2)).unwrap_err();
    assert!(refused.contains("does not get its name"), "{refused}");
    assert_eq!(left.content("root.raw"), "root.raw");
    assert_eq!(left.content(CAME), CAME);
    std::fs::remove_file(left.directory.path().join("root.raw")).unwrap();
    assert_eq!(settle(&left.paths, Generation(2)), Ok(()));
    assert_eq!(left.content("root.raw"), CAME);
}

#[test]
fn a_disk_that_was_this_host_s_once_is_that_under_a_later_generation_and_is_not_removed() {
    let left = Left::with(Some(("m", Some(2))), None, &[CAME, "root.raw"]);
    assert!(settle(&left.paths, Generation(2)).is_err());
    // A person lets the VM run here, which raises the generation; its disk has no name yet.
    assert!(settle(&left.paths, Generation(1 << 30)).is_err());
    put_aside(&left.paths, Source::HasDisks, None);
    assert_eq!(left.content(CAME), CAME);
    std::fs::remove_file(left.directory.path().join("root.raw")).unwrap();
    assert_eq!(settle(&left.paths, Generation(1 << 30)), Ok(()));
    assert_eq!(left.content("root.raw"), CAME);
}

fn moved(migration: &str) -> Phase {
    Phase::Moved {
        generation: Generation(2),
        migration: id(migration),
        to: HostName::new("a").unwrap(),
    }
}

#[test]
fn an_image_that_went_along_is_removed_by_whoever_opens_the_vm_next_and_no_other() {
    let left = Left::with(None, Some("m"), &["root.raw", "other.raw"]);
    drop(left.open(moved("m")));
    assert_eq!(left.files(), ["other.raw"]);
    // A record of an earlier move, from a copy of the state directory.
    let old = Left::with(None, Some("m"), &["root.raw"]);
    drop(old.open(moved("earlier")));
    assert_eq!(old.files(), ["root.raw"]);
    let never = Left::with(None, None, &["root.raw"]);
    drop(never.open(moved("m")));
    assert_eq!(never.files(), ["root.raw"]);
    let held = Left::with(None, Some("m"), &["root.raw"]);
    drop(held.open(holds(Power::Off)));
    assert_eq!(held.files(), ["root.raw"]);
    assert_eq!(held.what.leaving, Some(id("m")));
}

#[test]
fn an_image_that_could_not_be_removed_is_tried_again_by_the_same_process_until_it_is_gone() {
    let left = Left::with(None, Some("m"), &["root.raw"]);
    let at = left.directory.path().to_owned();
    let away = at.with_extension("away");
    std::fs::rename(&at, &away).unwrap();
    std::fs::write(&at, "no directory").unwrap();
    let mut vm = left.open(moved("m"));
    let soon = Instant::now() + Duration::from_secs(11);
    vm.clean_again(soon);
    assert!(away.join("root.raw").exists() && left.paths.disks().exists());
    // No other process would be begun beside one that lives.
    vm.busy_at = Instant::now() - Duration::from_secs(60);
    assert!(!vm.is_idle());
    std::fs::remove_file(&at).unwrap();
    std::fs::rename(&away, &at).unwrap();
    vm.clean_again(Instant::now());
    assert_eq!(left.files(), ["root.raw"], "not yet");
    vm.clean_again(soon + Duration::from_secs(30));
    assert!(left.files().is_empty() && !left.paths.disks().exists());
    vm.busy_at = Instant::now() - Duration::from_secs(60);
    assert!(!vm.left_over.waits() && vm.is_idle());
}

/// Has nobody change which names a directory has, or lets everybody again; whether this process may.
fn is_immutable(directory: &Path, is: bool) -> bool {
    let directory = std::fs::File::open(directory).unwrap();
    let Ok(mut flags) = ioctl_getflags(&directory) else {
        return false;
    };
    flags.set(IFlags::IMMUTABLE, is);
    ioctl_setflags(&directory, flags).is_ok()
}

#[test]
fn an_image_in_a_directory_that_nobody_could_change_is_removed_once_that_is_over() {
    let left = Left::with(None, Some("m"), &["root.raw"]);
    let at = left.directory.path();
    if !is_immutable(at, true) {
        println!("  not possible here");
        return;
    }
    let mut vm = left.open(moved("m"));
    let soon = Instant::now() + Duration::from_secs(11);
    vm.clean_again(soon);
    let (files, waits) = (left.files(), vm.left_over.waits());
    assert!(is_immutable(at, false));
    assert!(waits && files == ["root.raw"]);
    vm.clean_again(soon);
    assert!(left.files().is_empty() && !left.paths.disks().exists());
}

#[test]
fn an_image_that_came_back_is_not_removed_for_what_an_old_copy_notes_of_the_one_before() {
    let mut left = Left::with(None, Some("m"), &["root.raw"]);
    let path = left.directory.path().join("root.raw");
    left.what.known = vec![say(&path, 3)];
    save_json(&left.paths.disks(), &left.what).unwrap();
    // With the numbers of the one before, which file systems give again.
    say(&path, 5);
    drop(left.open(moved("m")));
    assert_eq!(left.files(), ["root.raw"]);
    left.what.known = vec![say(&path, 6)];
    save_json(&left.paths.disks(), &left.what).unwrap();
    drop(left.open(moved("m")));
    assert!(left.files().is_empty());
}

#[test]
fn what_is_noted_of_a_vm_that_is_deleted_turns_no_later_vm_s_disk_back() {
    let mut left = Left::with(None, None, &["root.raw", "former.raw"]);
    let former = left.directory.path().join("former.raw");
    let former = former.to_str().unwrap().to_owned();
    left.what.left = vec![super::super::left::Left {
        parts: Default::default(),
        disk: "root".to_owned(),
        path: former.clone(),
        image: (1, 2),
        known: None,
        part: None,
        followed: true,
    }];
    save_json(&left.paths.disks(), &left.what).unwrap();
    drop(left.open(Phase::Absent));
    let mut spec = VmSpec::placeholder(&left.site.config.vm);
    spec.disks = vec![DiskSpec::new("root", &former)];
    settle_moves(&left.paths, Some(&mut spec)).unwrap();
    assert_eq!(spec.disks[0].path, former);
    assert_eq!(left.files(), ["former.raw", "root.raw"]);
}

#[test]
fn another_file_at_the_image_s_place_is_not_removed() {
    let left = Left::with(None, Some("m"), &["root.raw", "new"]);
    std::fs::rename(
        left.directory.path().join("new"),
        left.directory.path().join("root.raw"),
    )
    .unwrap();
    drop(left.open(moved("m")));
    assert_eq!(left.content("root.raw"), "new");
}
