//! The source's disks with snapshots: what they consist of is said, and all below their tops is sent, before anything else of disks.
//!
//! Works on the driver's state. Refuses: to begin with a top before all below it is durable at the destination.

use super::driver::{BARRIER_WAIT, Halt, PING_EVERY, SourceDriver, halt_of};
use super::steps::{Step, unanswered};
use crate::disks::SourceDisks;
use crate::faults::reached;
use godwit_blockio::{NO_NEARER, Nearer};
use godwit_migrate::protocol::{ToDestination, ToSource};
use godwit_streams::source::ConnectionSet;
use std::time::Instant;

/// Whether ever less is left of the file that is sent.
#[derive(Debug, Default)]
struct NearerBelow {
    file: Option<usize>,
    nearer: Nearer,
}

impl NearerBelow {
    /// Why it is of no use to wait any longer. `not_there`: which file is sent, and how much of that is left.
    fn must_be_of_use(
        &mut self,
        now: Instant,
        not_there: Option<(usize, u64)>,
    ) -> Result<(), String> {
        let Some((file, left)) = not_there else {
            return Ok(());
        };
        if self.file.replace(file) != Some(file) {
            self.nearer = Nearer::default();
        }
        match self.nearer.observe(now, left) {
            true => Ok(()),
            false => Err(format!(
                "what its snapshots hold gets no nearer to being copied: {} MiB of an image are left since {} s; see whether the destination's storage answers",
                left >> 20,
                NO_NEARER.as_secs()
            )),
        }
    }
}

impl SourceDriver {
    /// Once; over new channels it goes on where it was.
    pub(super) fn send_layers(&mut self, set: &ConnectionSet) -> Result<(), Halt> {
        let layers = self.parts.disks.as_ref().map(SourceDisks::layers);
        let layers = layers.filter(|layers| !layers.is_empty() && !self.layers_ready);
        let Some(layers) = layers else {
            return Ok(());
        };
        let places: Vec<u8> = layers.iter().map(|(disk, _)| *disk).collect();
        for (disk, images) in layers {
            let said = ToDestination::Layers { disk, images };
            set.control.send(&said).map_err(halt_of)?;
            self.hear_word(set, &ToSource::LayersBegun { disk })?;
        }
        reached("source.layers-begun");
        self.send_below(set)?;
        for disk in places {
            let said = ToDestination::LayersSent { disk };
            set.control.send(&said).map_err(halt_of)?;
            self.hear_word(set, &ToSource::LayersReady { disk })?;
        }
        self.layers_ready = true;
        reached("source.layers-ready");
        Ok(())
    }

    fn send_below(&mut self, set: &ConnectionSet) -> Result<(), Halt> {
        if let Some(disks) = &self.parts.disks {
            disks.begin_below().map_err(Halt::Failed)?;
        }
        self.show_copying();
        let (mut began, mut nearer) = (None, NearerBelow::default());
        loop {
            let Some(disks) = self.disks_after_a_while(set)? else {
                return Ok(());
            };
            if let Some(why) = disks.failure() {
                return Err(Halt::Failed(why));
            }
            if disks.is_below_done() {
                return Ok(());
            }
            let of_use = nearer.must_be_of_use(Instant::now(), disks.below_not_there());
            of_use.map_err(Halt::Failed)?;
            let (bytes, left) = (disks.below_bytes(), disks.below_left_bytes());
            let (at, first) = *began.get_or_insert_with(|| (Instant::now(), left));
            let (seconds, copied) = (at.elapsed().as_secs_f64(), first.saturating_sub(left));
            self.parts.report.update(|report| {
                (report.disk_bytes, report.disk_left_bytes) = (bytes, left);
                report.eta_s = (copied > 0).then(|| left as f64 * seconds / copied as f64);
            });
            self.show_sent(set);
        }
    }

    /// Waits for this word: storage there may take long, and the destination is heard meanwhile.
    fn hear_word(&mut self, set: &ConnectionSet, word: &ToSource) -> Result<(), Halt> {
        self.heard = Instant::now();
        loop {
            if let Step::Peer(said, _) = self.next(Some(set), PING_EVERY)?
                && said == *word
            {
                return Ok(());
            }
            self.sign_of_life(set, PING_EVERY)?;
            if self.heard.elapsed() >= BARRIER_WAIT {
                return Err(unanswered());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_of_which_no_less_is_left_for_long_is_given_up() {
        let (mut nearer, began) = (NearerBelow::default(), Instant::now());
        let later = began + 2 * NO_NEARER;
        for (now, not_there) in [(began, None), (began, Some((0, 7))), (later, Some((0, 6)))] {
            nearer.must_be_of_use(now, not_there).unwrap();
        }
        // The next one is longer.
        nearer.must_be_of_use(later, Some((1, 9))).unwrap();
        let stalled = nearer.must_be_of_use(later + 2 * NO_NEARER, Some((1, 9)));
        assert!(stalled.is_err_and(|why| why.contains("no nearer")));
    }
}
