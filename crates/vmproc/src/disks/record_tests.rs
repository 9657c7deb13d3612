//! A state directory that was put back from an older copy, while a hypervisor lives and when it is gone.

use super::*;
use crate::testing::Site;
use godwit_guestmem::RamFile;
use godwit_types::vm::DiskSpec;

/// What a guest had whose disk was `first` and is `second` now, written down; and its description and that of the older copy,
/// which is put back.
fn put_back_on(site: &Site) -> (ServedDisks, ServedDisks, VmSpec) {
    let ram = RamFile::create(&site.paths.ram_file(3), 16 << 20, None).unwrap();
    let of = |path| ServedDisks {
        disks: vec![DiskSpec::new("root", path)],
        ..ServedDisks::none(3, ram.identity().unwrap())
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
    (older, now, spec)
}

fn read(site: &Site) -> (ServedDisks, String) {
    let described: VmSpec = load_json(&site.paths.spec()).unwrap().unwrap();
    let what = load_json(&site.paths.disks()).unwrap().unwrap();
    (what, described.disks[0].path.clone())
}

#[test]
fn an_older_copy_of_the_state_directory_says_nothing_of_the_disks_of_a_guest_that_runs() {
    let site = Site::new();
    let (_, now, mut spec) = put_back_on(&site);
    put_back_living(&site.paths, Some(&mut spec)).unwrap();
    assert_eq!(spec.disks, now.disks);
    assert_eq!(read(&site), (now.clone(), "/second".into()));
    // What a person described for the next start stays.
    spec.disks[0].path = "/third".into();
    save_json(&site.paths.spec(), &spec).unwrap();
    put_back_living(&site.paths, Some(&mut spec)).unwrap();
    assert_eq!(read(&site), (now, "/third".into()));
}

#[test]
fn of_a_hypervisor_that_is_gone_the_state_directory_tells() {
    let site = Site::new();
    let (older, _, mut spec) = put_back_on(&site);
    let ram = site.paths.ram_file(3);
    std::fs::remove_file(&ram).unwrap();
    put_back_living(&site.paths, Some(&mut spec)).unwrap();
    assert_eq!(read(&site), (older.clone(), "/first".into()));
    // Another one has its number.
    let _other = std::fs::File::create(ram.with_extension("other")).unwrap();
    RamFile::create(&ram, 16 << 20, None).unwrap();
    put_back_living(&site.paths, Some(&mut spec)).unwrap();
    assert_eq!(read(&site), (older, "/first".into()));
}

#[test]
fn what_could_not_be_written_leaves_no_older_word_of_what_lives() {
    let site = Site::new();
    let (older, ..) = put_back_on(&site);
    let next = format!("{}.new", site.paths.disks().display());
    std::fs::create_dir(&next).unwrap();
    write(&site.paths, &older).unwrap_err();
    assert!(!site.paths.living_disks().exists());
    std::fs::remove_dir(&next).unwrap();
    write(&site.paths, &older).unwrap();
    remove(&site.paths).unwrap();
    assert!(!site.paths.disks().exists() && !site.paths.living_disks().exists());
}
