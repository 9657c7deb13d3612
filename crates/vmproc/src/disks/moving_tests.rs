//! Disks that come to storage which does not answer.

use super::super::served::ServedDisks;
use super::*;
use crate::disks::images::arriving_path;
use crate::testing::{LONG, Site, apart};
use godwit_guestmem::RamFile;
use godwit_store::load_json;
use godwit_testkit::testvol::Volume;
use godwit_types::MigrationId;
use std::os::fd::AsFd as _;
use std::sync::mpsc::channel;

#[test]
fn disks_that_arrive_on_silent_storage_keep_nobody_waiting_beyond_the_deadline() {
    let (site, directory) = (Site::new(), tempfile::tempdir_in("/var/tmp").unwrap());
    let ram = RamFile::create(&site.paths.ram_file(1), 16 << 20, None).unwrap();
    let path = directory.path().join("root.raw");
    let (path, id) = (path.to_str().unwrap(), MigrationId::new("m").unwrap());
    let what = ServedDisks {
        disks: vec![DiskSpec::new("root", path)],
        images: vec![(1, 2)],
        arriving: Some(Arrival {
            whole: Some(Generation(2)),
            ..Arrival::of(&id)
        }),
        ..ServedDisks::none(1, (0, 0))
    };
    let served = Served::new(&site.config, &site.paths, what, &Arc::new(ram), None);
    let disks = Disks(Arc::new(served));
    apart(|mounts| {
        let storage = Volume::mount(mounts.as_fd(), directory.path()).unwrap();
        std::fs::write(arriving_path(path, &id), "image").unwrap();
        // On threads that may wait for ever, so that the test does not.
        let arrive = |deadline| {
            let (disks, (told, heard)) = (disks.clone(), channel());
            std::thread::spawn(move || told.send(disks.arrive(Generation(2), deadline)));
            heard
        };
        storage.change(|volume| volume.hangs = true);
        let patient = arrive(Instant::now() + 2 * LONG);
        storage.wait_held(1, LONG).unwrap();
        // Whoever is patient keeps nobody else from what is known of the disks.
        let refused = arrive(Instant::now()).recv_timeout(LONG).unwrap();
        let refused = refused.unwrap_err();
        assert!(refused.contains("does not answer"), "{refused}");
        let written: ServedDisks = load_json(&site.paths.disks()).unwrap().unwrap();
        assert!(
            written.arriving.unwrap().ours,
            "whatever generation follows"
        );
        storage.change(|volume| volume.hangs = false);
        assert_eq!(patient.recv_timeout(LONG).unwrap(), Ok(()));
        assert_eq!(std::fs::read_to_string(path).unwrap(), "image");
        assert!(disks.0.what().arriving.as_ref().unwrap().is_here);
    });
}
