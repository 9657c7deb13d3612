//! What lies above a disk's image while it is served: changed while the disk stands still, and closed with the disk.
//!
//! Who owns the state: the disk's thread. What it refuses: to change anything while something is under way, or while the disk does not stand
//! still.

use std::sync::mpsc::Sender;
use std::time::Instant;

use godwit_blockio::delta::Delta;
use godwit_blockio::{Data, Outcome, Request, Work};

use crate::Error;
use crate::disk::Device;

/// Makes the deltas, from the lowest to the top, with which a disk goes on, of those that it had; or says why not.
pub(crate) type Change = Box<dyn FnOnce(Vec<Delta>) -> Result<Vec<Delta>, String> + Send>;

/// Stands in the numbers of flushes that no guest asked for.
pub(crate) const OWN: u64 = 1 << 63;

pub(crate) const OTHER_LENGTH: &str = "what lies above its image is of another length";

impl Device {
    /// Begins to make durable all that the guest was told, and what says where it is, as a flush of the guest's does: nobody waits for it here, since storage
    /// may hang.
    pub(crate) fn settle(&mut self, answer: Sender<Result<(), Error>>) {
        let token = OWN | self.settled;
        self.settled = (self.settled + 1) % OWN;
        self.settling.push((token, answer));
        let now = Instant::now();
        let flush = Request::new(Work::Flush, Data::None, token, now);
        self.stack.submit(flush, now);
    }

    /// A flush of ours has ended. What the storage lost the guest hears with its next one, whoever waits for this.
    pub(crate) fn has_settled(&mut self, flush: &Request, outcome: Outcome) {
        let unsettled = self.stack.unsettled(flush, outcome);
        self.lost_sync |= unsettled.as_ref().is_some_and(|why| why.lost);
        let mut all = self.settling.iter();
        if let Some(place) = all.position(|(token, _)| *token == flush.token) {
            let (_, answer) = self.settling.swap_remove(place);
            let settled = unsettled.map_or(Ok(()), |why| Err(why.error.into()));
            let _ = answer.send(settled); // whoever asked may have given up
        }
    }

    /// Has what is answered and not durable be where whoever comes after this process looks for it.
    pub(crate) fn keep_maps(&mut self) -> Result<(), Error> {
        match self.stands > 0 && self.stack.is_idle() {
            true => Ok(self.stack.keep_maps()?),
            false => Err(self.busy()),
        }
    }

    /// Where this fails the disk takes nothing any more.
    pub(crate) fn change_layers(&mut self, change: Change) -> Result<(), Error> {
        let busy = self.busy();
        let had = (self.stands > 0).then(|| self.stack.take_deltas());
        let now = change(had.flatten().ok_or(busy)?);
        let now = now.map_err(|reason| Error::Settings { reason })?;
        if now.is_empty() {
            return Ok(());
        }
        let put = self.stack.put_deltas(now);
        put.map_err(|_| Error::Settings {
            reason: OTHER_LENGTH.to_owned(),
        })
    }

    /// The disk goes on without them.
    pub(crate) fn give_deltas_up(&mut self) {
        let deltas = self.stack.take_deltas();
        deltas.into_iter().flatten().for_each(Delta::give_up);
    }

    /// A disk that ends leaves nothing that only a process of this boot would know.
    pub(crate) fn close_deltas(&mut self) {
        let Some(deltas) = self.stack.take_deltas() else {
            let (disk, under_way) = (&self.name, self.stack.under_way());
            tracing::warn!(
                disk,
                under_way,
                "what lies above the disk's image is not closed, since its storage does not answer: who opens it next goes on where it was"
            );
            return;
        };
        for delta in deltas {
            if let Err(error) = delta.close() {
                tracing::warn!(disk = self.name, %error, "what lies above the disk's image is not closed: who opens it next goes on where it was");
            }
        }
    }
}
