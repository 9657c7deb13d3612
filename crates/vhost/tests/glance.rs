//! A disk whose thread waits in a filter or in the kernel, as others see it.

mod common;

use common::{LONG, Site, wait_until};
use godwit_blockio::{Filter, Flow, Request};
use godwit_vhost::Error;
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// Keeps its thread for as long as the test has the lock.
struct Stuck(Arc<Mutex<()>>);

impl Filter for Stuck {
    fn down(&mut self, request: Request, flow: &mut Flow<'_>) {
        drop(self.0.lock().unwrap());
        flow.down(request);
    }
}

#[test]
fn whoever_asks_again_and_again_waits_once_for_a_disk_that_is_silent() {
    let site = Site::new(1 << 20);
    let lock = Arc::<Mutex<()>>::default();
    let disk = site.disk(vec![Box::new(Stuck(Arc::clone(&lock)))]);
    let mut guest = site.guest();
    disk.glance().unwrap();
    let held = lock.lock().unwrap();
    guest.submit(0, &site.write_of(0, 0, 1, 512));
    let silent = |glance| matches!(glance, Err(Error::Silent { .. }));
    let until = Instant::now() + LONG;
    while !silent(disk.glance()) {
        assert!(Instant::now() < until, "it answers");
    }
    // None of these waits.
    let began = Instant::now();
    for _ in 0..1000 {
        assert!(silent(disk.glance()));
    }
    assert!(began.elapsed() < LONG);
    drop(held);
    guest.wait(0);
    wait_until(&disk, |status| status.under_way == 0);
    disk.glance().unwrap();
}
