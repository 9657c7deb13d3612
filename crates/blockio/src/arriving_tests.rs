//! What an image that fills does with changes, and with syncs that fail.

use super::*;
use crate::Access;
use std::sync::Arc;
use std::sync::mpsc::channel;

#[test]
fn what_comes_of_several_files_goes_into_each_and_nowhere_else() {
    let file = |bytes| {
        let file = tempfile::NamedTempFile::new_in("/var/tmp").unwrap();
        file.as_file().set_len(bytes).unwrap();
        let image = Image::open(file.path(), Access::ReadWrite, 512).unwrap();
        (file, image)
    };
    let bytes = 1 << 20;
    let (own, own_image) = file(bytes);
    let (over, over_image) = file(Layout::of(bytes).unwrap().file_bytes());
    let arriving = Arriving::files(&own_image, &[over_image]).unwrap();
    let stride = stride_of(bytes);
    assert!(stride > bytes && stride.is_multiple_of(REGION));
    for (number, at) in [(1, 4096), (2, stride + 8192)] {
        let range = at..at + 512;
        let content = [number as u8; 512];
        arriving.apply(number, 1, &range, Some(&content)).unwrap();
    }
    arriving.apply(3, 1, &(stride..stride + 512), None).unwrap();
    for wrong in [bytes, 2 * stride] {
        let range = wrong..wrong + 512;
        assert!(arriving.apply(4, 1, &range, Some(&[9; 512])).is_err());
    }
    arriving.sync().unwrap();
    let found = |file: &tempfile::NamedTempFile, at: usize| {
        let bytes = std::fs::read(file.path()).unwrap();
        let others = bytes.iter().filter(|byte| **byte != 0).count();
        (bytes[at], others)
    };
    assert_eq!(found(&own, 4096), (1, 512));
    assert_eq!(found(&over, 8192), (2, 512));
}

#[test]
fn a_sync_that_fails_after_its_caller_has_gone_is_not_followed_by_one_that_succeeds() {
    let file = tempfile::NamedTempFile::new_in("/var/tmp").unwrap();
    file.as_file().set_len(4096).unwrap();
    let image = Image::open(file.path(), Access::ReadWrite, 512).unwrap();
    let arriving = Arc::new(Arriving::of(&image).unwrap());
    arriving.sync().unwrap();
    let (began, has_begun) = channel();
    let (fail, fails) = channel();
    let slow = Arc::clone(&arriving);
    let thread = std::thread::spawn(move || {
        slow.sync_by(|_| {
            began.send(()).unwrap();
            fails.recv().unwrap();
            Err(Errno::IO)
        })
    });
    has_begun.recv().unwrap();
    let later = Arc::clone(&arriving);
    let later = std::thread::spawn(move || later.sync());
    fail.send(()).unwrap();
    assert!(thread.join().unwrap().is_err());
    let refused = later.join().unwrap().unwrap_err().to_string();
    assert!(refused.contains("Input/output error"), "{refused}");
    assert!(arriving.sync().is_err());
}

#[test]
fn an_image_that_somebody_took_away_exchanged_or_cut_is_not_whole() {
    let directory = tempfile::tempdir_in("/var/tmp").unwrap();
    let at = |name: &str| directory.path().join(name);
    std::fs::write(at("image"), [7; 8192]).unwrap();
    let image = Image::open(&at("image"), Access::ReadWrite, 512).unwrap();
    let arriving = Arriving::of(&image).unwrap();
    arriving.must_be_whole().unwrap();
    std::fs::rename(at("image"), at("away")).unwrap();
    let refused = || arriving.must_be_whole().unwrap_err();
    assert!(refused().contains("is not the image any more"));
    std::fs::write(at("image"), [7; 8192]).unwrap();
    assert!(refused().contains("is not the image any more"));
    std::fs::remove_file(at("image")).unwrap();
    std::os::unix::fs::symlink(at("away"), at("image")).unwrap();
    assert!(refused().contains("is not the image any more"));
    std::fs::rename(at("away"), at("image")).unwrap();
    arriving.must_be_whole().unwrap();
    let cut = File::options().write(true).open(at("image")).unwrap();
    cut.set_len(4096).unwrap();
    assert!(refused().contains("4096 bytes by now in place of 8192"));
}

#[test]
fn those_who_ask_while_a_sync_is_under_way_have_one_done_for_all_of_them() {
    const ASKERS: usize = 31;
    let file = tempfile::NamedTempFile::new_in("/var/tmp").unwrap();
    file.as_file().set_len(4096).unwrap();
    let image = Image::open(file.path(), Access::ReadWrite, 512).unwrap();
    let arriving = Arriving::of(&image).unwrap();
    let syncs = std::sync::atomic::AtomicUsize::new(0);
    let count = || syncs.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
    let (began, has_begun) = channel();
    let (end, ends) = channel::<()>();
    std::thread::scope(|scope| {
        let (arriving, count) = (&arriving, &count);
        scope.spawn(move || {
            let first = arriving.sync_by(|_| {
                count();
                began.send(()).unwrap();
                ends.recv().unwrap();
                Ok(())
            });
            first.unwrap();
        });
        has_begun.recv().unwrap();
        for _ in 0..ASKERS {
            scope.spawn(move || {
                let asked = arriving.sync_by(|_| {
                    count();
                    Ok(())
                });
                asked.unwrap();
            });
        }
        while lock(&arriving.syncs).waiting < ASKERS {
            std::thread::yield_now();
        }
        end.send(()).unwrap();
    });
    assert_eq!(syncs.into_inner(), 2);
}
