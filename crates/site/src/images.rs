//! What the holders of a VM said of its images on storage that hosts share.
//!
//! Part of [`Book`]. The next holder hears it with its grant, and opens no older copy of such an image; an older book knows
//! of an earlier one, which refuses nothing. Refuses: what is said by anybody but the holder, and numbers that cannot have come about.

use crate::book::{Book, Entry};
use crate::plant::Plant;
use godwit_types::image::KnownImage;
use godwit_types::vm::DISKS_MAX;
use godwit_types::{Generation, VmName};

/// Longest name of a disk that is kept, bytes.
const NAME_MAX: usize = 64;

/// How often an image can have been taken, as a host tells it: far below where its record ends, so that it can be taken on from there.
const TAKEN_MAX: u64 = 1 << 40;

impl Entry {
    /// What its holder under this generation says: what it took itself under that counts, also in the place of what was newer (a switch to another
    /// image may have been written back); what it knows from before counts where that is newer. Of one image a lower count never does:
    /// it is an older copy of what was written.
    pub(crate) fn hear_images(&mut self, said: &[KnownImage], held: Generation) {
        for said in said.iter().take(DISKS_MAX) {
            let can_be = said.taken <= TAKEN_MAX && said.generation <= held;
            if !can_be || said.disk.len() > NAME_MAX {
                continue;
            }
            let is_word_of_its_own = said.generation == held;
            let is_older = |known: &KnownImage| {
                let may_be = known.image == said.image || !is_word_of_its_own;
                known.disk == said.disk && may_be && known.is_newer_than(said)
            };
            if self.images.iter().any(is_older) {
                continue;
            }
            self.images.retain(|known| known.disk != said.disk);
            self.images.push(said.clone());
        }
        // Of disks that it had once.
        let too_many = self.images.len().saturating_sub(DISKS_MAX);
        self.images.drain(..too_many);
    }
}

impl Book {
    /// What is known of a VM's images on shared storage, for who is to hold it.
    pub fn images(&self, vm: &VmName) -> Vec<KnownImage> {
        if self.planted(Plant::ForgetsImages) {
            return Vec::new();
        }
        self.entry(vm)
            .map(|entry| entry.images.clone())
            .unwrap_or_default()
    }
}
