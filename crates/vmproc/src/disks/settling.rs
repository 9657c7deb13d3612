//! Settles what a process that died left of snapshots: images that no description names, snapshots that some disks lack, and descriptors that name what is
//! gone. Once in each process, by the thread that gives up images ([`super::tidying`]), before anything else.
//!
//! Owns nothing. Keeps the images of all disks locked for as long as it works: storage may keep it beyond its QEMU, and nobody else has the disks before it has
//! ended. Refuses: to begin while a disk is not served, or while the disks are not this host's, or move; it is tried again. VMs whose disks change hands are left to
//! who takes their next snapshot: nothing may hold their images' locks beside the guest.

use super::served::Served;
use crate::adoption::lock;
use godwit_types::vm::DiskSpec;
use std::sync::atomic::Ordering;

impl Served {
    /// Has it done if nobody has yet in this process. Why it is not is the end of a sentence.
    pub(super) fn settle_halves(&self) -> Result<(), String> {
        let what = self.what();
        if self.tidies.is_settled() || what.disks.iter().any(DiskSpec::changes_hands) {
            return Ok(());
        }
        let written = what.disks.iter().enumerate();
        let written = written.filter(|(_, spec)| !spec.read_only);
        let locked = written.map(|(index, spec)| {
            let lent = self.disk(index)?.lend_image();
            lent.map_err(|error| format!("disk '{}': {error}", spec.name))
        });
        let _locked = locked.collect::<Result<Vec<_>, String>>()?;
        let _one = lock(&self.descriptions);
        let has_ended = self.has_ended.load(Ordering::SeqCst);
        if has_ended || self.held().is_none() || self.tidies.why_not().is_some() {
            return Err("its disks are not to be changed now".to_owned());
        }
        let all = self.all();
        let told = |error: godwit_types::ApiError| error.message;
        all.forget_halves().map_err(told)?;
        for (spec, images) in all.specs.iter().zip(all.load().map_err(told)?) {
            all.place(spec).describe_chain(&images);
        }
        self.tidies.set_settled(true);
        Ok(())
    }
}
