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

impl Entry {
    /// What its holder under this generation says. Its last word of a disk counts, but for one that takes the same image to be opened less
    /// often: no host takes that back, and an older copy of what it wrote says so.
    pub(crate) fn hear_images(&mut self, said: &[KnownImage], held: Generation) {
        for said in said.iter().take(DISKS_MAX) {
            let can_be = said.is_in_reach() && said.generation <= held;
            if !can_be || said.disk.len() > NAME_MAX {
                continue;
            }
            let is_older = |known: &KnownImage| {
                (&known.disk, &known.image) == (&said.disk, &said.image)
                    && known.is_newer_than(said)
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
