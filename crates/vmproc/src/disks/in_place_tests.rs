//! Who serves a disk while it is written down that its second image is the disk.

use super::super::{LOCK_WAIT, there};
use super::*;
use crate::testing::{LONG, Site, apart};
use godwit_blockio::label::End;
use godwit_guestmem::RamFile;
use godwit_qemu::disk::is_taken;
use godwit_qemu::disk::{identity_of, identity_of_open};
use godwit_qemu::user::User;
use godwit_store::load_json;
use godwit_testkit::testvol::Volume;
use godwit_types::disk_move::FirstLog;
use godwit_types::snapshots::{Quiesce, TakeSnapshot, description_of};
use godwit_types::vm::DiskSpec;
use godwit_types::{Generation, MigrationId, SnapshotName};
use rustix::process::{getegid, geteuid};
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{TryRecvError, channel};

const BYTES: u64 = 4 << 20;
const METHODS: [Method; 2] = [Method::Mirror, Method::DirtyTracking];

fn went<T>(done: Result<T, Stopped>) -> T {
    done.unwrap_or_else(|stopped| match stopped {
        Stopped::Cancelled => panic!("it was called off"),
        Stopped::Failed(why) => panic!("{why}"),
    })
}

fn until(mut is_so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < LONG);
        std::thread::yield_now();
    }
}

/// The VM's disk with this image, served for a guest that may run.
fn served_with(site: &Site, image: &Path) -> Disks {
    let root = DiskSpec::new("root", image.to_str().unwrap());
    served_for(site, &described(site, vec![root]))
}

fn described(site: &Site, disks: Vec<DiskSpec>) -> VmSpec {
    VmSpec {
        hardware: Some(2),
        disks,
        ..VmSpec::placeholder(&site.config.vm)
    }
}

/// The VM's disks, served for a guest that may run.
fn served_for(site: &Site, spec: &VmSpec) -> Disks {
    let ram = RamFile::create(&site.paths.ram_file(1), 16 << 20, None).unwrap();
    let user = User {
        uid: geteuid().as_raw(),
        gid: getegid().as_raw(),
    };
    let (qemu, right) = ((user, 1), (Some(Generation(2)), None));
    Disks::begin(&site.config, &site.paths, spec, qemu, &Arc::new(ram), right).unwrap()
}

/// Which file the disk works with.
fn image_of(served: &Served) -> Option<(u64, u64)> {
    let lent = served.disk(0).ok()?.lend_image().unwrap();
    Some(identity_of_open(&File::from(lent)).unwrap())
}

/// The disk's image, and where it is to go.
fn image_and_place(directory: &Path) -> (PathBuf, DiskPlace) {
    let [before, after] = ["root.raw", "new.raw"].map(|name| directory.join(name));
    File::create(&before).unwrap().set_len(BYTES).unwrap();
    let place = DiskPlace {
        disk: "root".to_owned(),
        path: after.to_str().unwrap().to_owned(),
        shared: false,
        max_bandwidth_mbit_per_s: None,
        method: Method::default(),
        without: Vec::new(),
        first_log: FirstLog::default(),
    };
    (before, place)
}

/// The disk on its way there.
fn going_to<'a>(place: &'a DiskPlace, what: &ServedDisks) -> Going<'a> {
    Going {
        index: 0,
        place,
        spec: what.disks[0].clone(),
        image: what.images[0],
        copying: Copying {
            parts: Default::default(),
            disk: "root".into(),
            path: place.path.clone(),
            beside: format!("{}.moving-1", place.path),
            image: None,
            known: None,
        },
        follows: None,
        tree: None,
        below: 0,
    }
}

#[test]
fn a_disk_that_ends_while_its_switch_is_written_is_served_by_nobody_until_it_is() {
    METHODS
        .into_iter()
        .for_each(ends_while_its_switch_is_written);
}

fn ends_while_its_switch_is_written(method: Method) {
    let (site, directory) = (Site::new(), tempfile::tempdir_in("/var/tmp").unwrap());
    let (before, place) = image_and_place(directory.path());
    let place = DiskPlace { method, ..place };
    apart(|mounts| {
        let state = Volume::mount(mounts.as_fd(), &site.paths.state).unwrap();
        let disks = served_with(&site, &before);
        let (served, what) = (&disks.0, disks.0.what());
        let mut going = going_to(&place, &what);
        let (mirror, image) = went(served.make_equal(&mut going));
        let (disks, going, before) = (&disks, &going, &before);
        // While a thread is about to serve it nothing is switched.
        let mut image = Some(image);
        let alone = served.serve_alone(0).unwrap();
        let switched = switch_over(
            &mirror.second,
            || match method {
                Method::Mirror => Ok(()),
                Method::DirtyTracking | Method::Snapshot => {
                    served.wait_until_closed(going, &mirror)
                }
            },
            |bound| served.switch(going, (&mirror, bound), &mut image).map(Some),
        );
        assert_eq!(went(switched), Some(None));
        mirror.second.course().open();
        drop(alone);
        let (image, disk) = (image.unwrap(), Arc::clone(&mirror.disk));
        std::thread::scope(move |scope| {
            // Ends here whatever becomes of the test, so that nobody waits for it.
            let state = state;
            state.change(|volume| volume.hangs = true);
            let goes_over = scope.spawn(move || served.go_over(going, &mirror, image));
            state.wait_held(1, LONG).unwrap();
            disk.begin_end();
            until(|| disk.has_ended());
            assert_eq!(served.missing(), [0]);
            let (tried, is_tried) = channel();
            served.try_in_thread(0, LOCK_WAIT, Some(tried));
            let begun = is_tried.try_recv();
            assert_eq!(begun, Err(TryRecvError::Disconnected), "a thread serves it");
            state.change(|volume| volume.hangs = false);
            // The mirror ended with the disk, so that what is written is taken back.
            let gone_over = goes_over.join().unwrap();
            assert!(matches!(gone_over, Err(Stopped::Failed(_))));
            // From then on it is the first image, and no other.
            until(|| {
                let (tried, is_tried) = channel();
                served.try_in_thread(0, LOCK_WAIT, Some(tried));
                let _ = is_tried.recv_timeout(LONG);
                served.disk(0).is_ok()
            });
            assert_eq!(image_of(served), identity_of(before).unwrap());
            disks.end();
        });
    });
}

/// Until the record says again that the first image is the disk, nobody may be answered by that one alone.
#[test]
fn a_second_image_that_fails_after_it_was_written_down_is_taken_back_and_the_disk_goes_on_with_its_first()
 {
    METHODS
        .into_iter()
        .for_each(fails_after_it_was_written_down);
}

fn fails_after_it_was_written_down(method: Method) {
    let (site, directory) = (Site::new(), tempfile::tempdir_in("/var/tmp").unwrap());
    let (before, place) = image_and_place(directory.path());
    let place = DiskPlace { method, ..place };
    apart(|mounts| {
        let state = Volume::mount(mounts.as_fd(), &site.paths.state).unwrap();
        let disks = served_with(&site, &before);
        let (served, what) = (&disks.0, disks.0.what());
        let mut going = going_to(&place, &what);
        let (mirror, image) = went(served.make_equal(&mut going));
        let written = || {
            load_json::<ServedDisks>(&site.paths.disks())
                .unwrap()
                .unwrap()
        };
        let noted = written();
        let second = mirror.second.clone();
        let (disks, going, noted) = (&disks, &going, &noted);
        let (what, before) = (&what, &before);
        std::thread::scope(move |scope| {
            let state = state;
            state.change(|volume| volume.hangs = true);
            let goes_over = scope.spawn(move || served.go_over(going, &mirror, image));
            state.wait_held(1, LONG).unwrap();
            assert!(
                !disks.are_elsewhere(),
                "nothing follows what may be taken back"
            );
            second.course().fail("its storage is gone".to_owned());
            state.change(|volume| volume.hangs = false);
            let Err(Stopped::Failed(why)) = goes_over.join().unwrap() else {
                panic!("it went");
            };
            assert_eq!(why, "its storage is gone");
            assert_eq!(written().disks, what.disks);
            assert_eq!(written().left, noted.left);
            assert_eq!(written().images, what.images);
            assert_eq!(written().copying, noted.copying);
            assert!(served.missing().is_empty(), "it is served all the while");
            assert_eq!(image_of(served), identity_of(before).unwrap());
            // Its mirror lets go.
            until(|| served.disk(0).unwrap().take_lowest(LONG).is_ok());
            disks.end();
        });
    });
}

#[test]
fn a_move_is_called_off_while_its_new_image_hangs_before_the_disk_is_closed() {
    let (site, directory) = (Site::new(), tempfile::tempdir_in("/var/tmp").unwrap());
    let there = tempfile::tempdir_in("/var/tmp").unwrap();
    let (before, place) = image_and_place(directory.path());
    let place = DiskPlace {
        path: there.path().join("new.raw").to_str().unwrap().to_owned(),
        method: Method::DirtyTracking,
        ..place
    };
    apart(|mounts| {
        let storage = Volume::mount_direct(mounts.as_fd(), there.path()).unwrap();
        let disks = served_with(&site, &before);
        let (served, what) = (&disks.0, disks.0.what());
        let mut going = going_to(&place, &what);
        let (mirror, _image) = went(served.make_equal(&mut going));
        let (going, mirror) = (&going, &mirror);
        std::thread::scope(move |scope| {
            // Ends here whatever becomes of the test, so that nobody waits for it.
            let storage = storage;
            storage.change(|volume| volume.hangs = true);
            let closes = scope.spawn(move || served.wait_until_closed(going, mirror));
            storage.wait_held(1, LONG).unwrap();
            served.moves.is_cancelled.store(true, Ordering::SeqCst);
            until(|| closes.is_finished());
            let closed = closes.join().unwrap();
            assert!(matches!(closed, Err(Stopped::Cancelled)));
            let held = mirror.second.course().closed_for();
            assert_eq!(held, Duration::ZERO);
            storage.change(|volume| volume.hangs = false);
        });
        disks.end();
    });
}

#[test]
fn a_disk_that_moves_on_its_host_is_there_for_whoever_asks_until_its_storage_fails() {
    let (site, directory) = (Site::new(), tempfile::tempdir_in("/var/tmp").unwrap());
    let (before, place) = image_and_place(directory.path());
    let disks = served_with(&site, &before);
    let (served, migration) = (&disks.0, MigrationId::new("m").unwrap());
    let what = served.what();
    let along = there::seen(vec![(what.disks[0].clone(), what.images[0], End::OfDevice)]).unwrap();
    served
        .change(|what| what.note_along(&migration, along))
        .unwrap();
    let is_there = || disks.have_those_of(&migration);
    assert!(is_there());
    let mut going = going_to(&place, &what);
    let (mirror, image) = went(served.make_equal(&mut going));
    went(served.go_over(&going, &mirror, image));
    assert!(is_there());
    let faults = served.faults(0);
    served.gauges[0].count_fault();
    assert!(!is_there());
    // What failed after its part was read is not mended by the rest.
    served.note_whole((0, &place.path), faults);
    assert!(!is_there());
    served.note_whole((0, &place.path), served.faults(0));
    assert!(is_there());
    // QEMU has the file that had this name.
    let aside = directory.path().join("aside");
    std::fs::rename(&place.path, &aside).unwrap();
    std::fs::copy(&aside, &place.path).unwrap();
    assert!(!is_there());
    std::fs::rename(&aside, &place.path).unwrap();
    assert!(is_there());
    disks.end();
}

/// Of each snapshot its name, and that of the one before it.
fn listed(disks: &Disks) -> Vec<(SnapshotName, Option<SnapshotName>)> {
    let listed = disks.list_snapshots().unwrap().snapshots.into_iter();
    listed.map(|one| (one.name, one.after)).collect()
}

#[test]
fn a_disk_with_snapshots_moves_with_all_that_it_consists_of() {
    for method in METHODS {
        let (site, directory) = (Site::new(), tempfile::tempdir_in("/var/tmp").unwrap());
        let (before, place) = image_and_place(directory.path());
        let place = DiskPlace { method, ..place };
        let image = File::options().write(true).open(&before).unwrap();
        image.write_all_at(&[5; 512], 4096).unwrap();
        let disks = served_with(&site, &before);
        for name in ["first", "second"] {
            let wish = TakeSnapshot {
                name: SnapshotName::new(name).unwrap(),
                text: String::new(),
                quiesce: Quiesce::Never,
            };
            disks.take_snapshot(&wish, None).unwrap();
        }
        let had = listed(&disks);
        let (served, what) = (&disks.0, disks.0.what());
        let _held = served.hold_tidying(LONG).unwrap();
        let mut going = going_to(&place, &what);
        let (mirror, image) = went(served.make_equal(&mut going));
        went(served.go_over(&going, &mirror, image));
        drop(mirror);
        assert_eq!(listed(&disks), had);
        assert!(description_of(Path::new(&place.path)).exists());
        let mut content = [0; 512];
        let image = File::open(&place.path).unwrap();
        image.read_exact_at(&mut content, 4096).unwrap();
        assert_eq!(content, [5; 512]);
        let follow = |left: &mut super::super::left::Left| left.followed = true;
        let followed = served.change(|what| what.left.iter_mut().for_each(follow));
        followed.unwrap();
        served.remove_former();
        let names = std::fs::read_dir(directory.path()).unwrap();
        let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let left: Vec<_> = names.filter(|name| name.starts_with("root.raw")).collect();
        assert!(left.is_empty(), "{left:?}");
        disks.end();
    }
}

/// Moves two disks, and gives how they ended and what they were each time that one was moved.
fn move_both(
    (site, spec): (&Site, &mut VmSpec),
    disks: &Disks,
    places: &[DiskPlace],
) -> (Vec<DiskMove>, Vec<[DiskMoveState; 2]>) {
    let ((tell, told), served) = (channel(), Arc::clone(&disks.0));
    let changed = move || {
        let moves = lock(&served.moves.disks);
        tell.send([moves[0].state, moves[1].state]).unwrap();
    };
    disks.move_in_place(places.to_vec(), changed).unwrap();
    until(|| {
        disks.follow_moves(&site.paths, spec).unwrap();
        !disks.are_moving()
    });
    (disks.moves().disks, told.iter().collect())
}

#[test]
fn disks_move_one_after_the_other_and_none_after_one_that_stays() {
    use DiskMoveState::{Copying, Failed, Moved, Waiting};
    let (site, directory) = (Site::new(), tempfile::tempdir_in("/var/tmp").unwrap());
    let (mut specs, mut places) = (Vec::new(), Vec::new());
    for name in ["root", "data"] {
        let at = |file: String| directory.path().join(file).to_str().unwrap().to_owned();
        let (before, path) = (at(format!("{name}.raw")), at(format!("new-{name}.raw")));
        File::create(&before).unwrap().set_len(BYTES).unwrap();
        specs.push(DiskSpec::new(name, &before));
        places.push(DiskPlace {
            disk: name.to_owned(),
            path,
            shared: false,
            max_bandwidth_mbit_per_s: None,
            method: Method::default(),
            without: Vec::new(),
            first_log: FirstLog::default(),
        });
    }
    let mut spec = described(&site, specs.clone());
    let disks = served_for(&site, &spec);
    let paths = [0, 1].map(|index: usize| PathBuf::from(&places[index].path));
    let [root, data] = &paths;

    std::fs::write(root, "somebody's").unwrap();
    let (ended, changes) = move_both((&site, &mut spec), &disks, &places);
    let [first, second] = [0, 1].map(|index: usize| (ended[index].state, ended[index].why.clone()));
    assert_eq!(first, (Failed, Some(is_taken(root))));
    let why = "the one before it could not be moved";
    assert_eq!(second, (Failed, Some(why.to_owned())));
    assert!(changes.is_empty() && !data.exists());
    assert_eq!(disks.0.what().disks, specs);

    std::fs::remove_file(root).unwrap();
    places[1].method = Method::DirtyTracking;
    let (ended, changes) = move_both((&site, &mut spec), &disks, &places);
    assert_eq!(changes, [[Copying, Waiting], [Moved, Copying]]);
    assert!(ended.iter().all(|disk| disk.state == Moved), "{ended:?}");
    // The image is one hole.
    let first = ended[1].iterations.first().unwrap();
    assert_eq!((first.number, first.copied_bytes), (1, 0));
    assert!(ended[0].iterations.is_empty(), "it was mirrored");
    let now = disks.0.what();
    let is_at = |(disk, place): (&DiskSpec, &DiskPlace)| disk.path == place.path;
    assert!(now.disks.iter().zip(&places).all(is_at), "{:?}", now.disks);
    disks.end();
}

/// A block device that was left stays noted for good.
#[test]
fn a_full_state_directory_keeps_no_disk_from_its_guest_where_nothing_is_to_be_written() {
    let (site, left) = (Site::new(), (0x700, 0));
    let ram = godwit_guestmem::RamFile::create(&site.paths.ram_file(1), 16 << 20, None).unwrap();
    let mut what = ServedDisks::none(1, (0, 0));
    what.left = vec![super::super::left::Left {
        parts: Default::default(),
        disk: "root".into(),
        path: "/dev/left".into(),
        image: left,
        known: None,
        part: None,
        followed: true,
    }];
    let served = Served::new(&site.config, &site.paths, what, &Arc::new(ram), None);
    let next = format!("{}.new", site.paths.disks().display());
    std::fs::create_dir(&next).unwrap();
    served.clean();
    assert!(!served.must_save.load(Ordering::SeqCst));
    served.end();
    assert!(served.save().is_err(), "its hypervisor has ended");
}

/// Once QEMU is gone nobody has the image open with which the guest worked.
#[test]
fn a_copy_stays_where_its_disk_lost_its_image_once_the_guest_has_ended() {
    for is_there in [true, false] {
        let (site, directory) = (Site::new(), tempfile::tempdir_in("/var/tmp").unwrap());
        let (before, place) = image_and_place(directory.path());
        let disks = served_with(&site, &before);
        let (served, what) = (&disks.0, disks.0.what());
        let mut going = going_to(&place, &what);
        let made = went(served.make_equal(&mut going));
        disks.end();
        drop(made);
        if !is_there {
            // A person puts another file there, an older copy say.
            let other = directory.path().join("other.raw");
            File::create(&other).unwrap().set_len(BYTES).unwrap();
            std::fs::rename(&other, &before).unwrap();
        }
        assert_eq!(served.remove_copy(&going.copying).is_ok(), is_there);
        assert_eq!(Path::new(&place.path).exists(), !is_there);
    }
}

/// Files in a directory, by name.
fn files(directory: &Path) -> Vec<String> {
    let found = std::fs::read_dir(directory).unwrap();
    let name = |entry: std::io::Result<std::fs::DirEntry>| entry.unwrap().file_name();
    let mut names: Vec<String> = found
        .map(|entry| name(entry).into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// Two disks in one directory, something in each, that are to move by snapshots to another directory.
struct TwoDisks {
    site: Site,
    spec: VmSpec,
    places: Vec<DiskPlace>,
    slow: tempfile::TempDir,
    fast: tempfile::TempDir,
}

impl TwoDisks {
    fn new(first_log: FirstLog) -> Self {
        let mut site = Site::new();
        (site.config.qemu_uid, site.config.qemu_gid) = (geteuid().as_raw(), getegid().as_raw());
        let [slow, fast] = [(); 2].map(|()| tempfile::tempdir_in("/var/tmp").unwrap());
        let (mut specs, mut places) = (Vec::new(), Vec::new());
        for name in ["root", "data"] {
            let file = format!("{name}.raw");
            let [before, after] = [&slow, &fast].map(|at| at.path().join(&file));
            let mut content = vec![0; BYTES as usize];
            content[12_288..300_000].fill(name.as_bytes()[0]);
            std::fs::write(&before, content).unwrap();
            specs.push(DiskSpec::new(name, before.to_str().unwrap()));
            places.push(DiskPlace {
                disk: name.to_owned(),
                path: after.to_str().unwrap().to_owned(),
                shared: false,
                max_bandwidth_mbit_per_s: None,
                method: Method::Snapshot,
                without: Vec::new(),
                first_log,
            });
        }
        let spec = described(&site, specs);
        Self {
            site,
            spec,
            places,
            slow,
            fast,
        }
    }

    fn content(directory: &Path) -> Vec<Vec<u8>> {
        let disks = ["root.raw", "data.raw"];
        let read = |name: &str| std::fs::read(directory.join(name)).unwrap();
        disks.map(read).into()
    }
}

#[test]
fn disks_move_by_snapshots_and_leave_nothing_where_they_were() {
    for first_log in [FirstLog::Source, FirstLog::Destination] {
        let mut two = TwoDisks::new(first_log);
        let before = TwoDisks::content(two.slow.path());
        let disks = served_for(&two.site, &two.spec);
        let (ended, _) = move_both((&two.site, &mut two.spec), &disks, &two.places);
        for disk in &ended {
            assert_eq!(disk.state, DiskMoveState::Moved, "{ended:?}");
            let logs = disk.redo_logs.unwrap();
            assert!(logs.logs >= 1 && logs.space_max_bytes > 0, "{logs:?}");
            assert!(disk.iterations.len() == logs.logs as usize, "{disk:?}");
        }
        assert_eq!(files(two.slow.path()), Vec::<String>::new());
        assert_eq!(files(two.fast.path()), ["data.raw", "root.raw"]);
        assert!(TwoDisks::content(two.fast.path()) == before);
        let served = &disks.0;
        assert!(lock(&served.layered).is_empty() && lock(&served.by_logs).is_empty());
        // What is noted of logs is forgotten with the disk's former image.
        assert_eq!(served.what().logs, []);
        disks.end();
    }
}

#[test]
fn a_disk_that_does_not_move_by_snapshots_has_its_log_come_down_again() {
    let mut two = TwoDisks::new(FirstLog::Source);
    let before = TwoDisks::content(two.slow.path());
    let disks = served_for(&two.site, &two.spec);
    let gone = two.fast.path().join("gone");
    for place in &mut two.places {
        let name = Path::new(&place.path).file_name().unwrap().to_owned();
        place.path = gone.join(name).to_str().unwrap().to_owned();
    }
    let (ended, _) = move_both((&two.site, &mut two.spec), &disks, &two.places);
    let is_failed = |disk: &DiskMove| disk.state == DiskMoveState::Failed;
    assert!(ended.iter().all(is_failed), "{ended:?}");
    // Both lay under a log by then.
    let is_log = |name: &String| name.contains(".d1") || name.ends_with(".images");
    until(|| !files(two.slow.path()).iter().any(is_log));
    until(|| !disks.0.tidies.works());
    assert!(lock(&disks.0.by_logs).is_empty());
    disks.end();
    assert!(TwoDisks::content(two.slow.path()) == before);
    assert_eq!(files(two.fast.path()), Vec::<String>::new());
}

#[test]
fn what_has_no_place_for_redo_logs_is_refused_before_anything_is_begun() {
    let (spec, place) = (
        DiskSpec::new("root", "/slow/root.raw"),
        DiskPlace {
            path: "/dev/vg0/root".to_owned(),
            ..TwoDisks::new(FirstLog::default()).places[0].clone()
        },
    );
    let why = must_take_logs(&spec, &place).unwrap_err();
    assert!(why.contains("block device"), "{why}");
    let place = DiskPlace {
        path: "/fast/root.raw".to_owned(),
        ..place
    };
    assert_eq!(must_take_logs(&spec, &place), Ok(()));
    let shared = DiskSpec {
        shared: true,
        ..spec
    };
    let why = must_take_logs(&shared, &place).unwrap_err();
    assert!(why.contains("other hosts have its image"), "{why}");
}
