//! One thread per data channel at the destination: allocates memory for the pages that are announced and opens their
//! record straight into it; scattered pages are copied from the record.
//!
//! Each thread owns its channel and its buffers; threads share guest memory, where no two ever write the same page
//! within an iteration, and nothing else. Whatever is wrong with a record ends the thread with its reason.

use super::memory::Memory;
use super::progress::{End, Progress};
use crate::faults::reached;
use crate::priority::Manners;
use godwit_guestmem::PAGE_SIZE;
use godwit_transport::{Patience, RecordReader, TransportError};
use godwit_wire::{PageRuns, RecordKind, WireError, ZeroPages};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// A data channel may be silent as long as the control channel lives; the driver closes it otherwise.
pub(crate) const SILENCE_MAX: Duration = Duration::from_secs(3600);

/// Why a channel's thread stopped.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReceiveError {
    #[error(transparent)]
    Transport(#[from] TransportError),
    #[error(transparent)]
    Wire(#[from] WireError),
    #[error(transparent)]
    Memory(#[from] godwit_guestmem::Error),
    #[error(transparent)]
    Disk(#[from] godwit_blockio::Error),
    #[error("the source sent a record that has no place on a data channel")]
    OutOfPlace,
}

impl ReceiveError {
    pub(crate) fn end(&self) -> End {
        match self {
            Self::Transport(error) if error.class().is_lost() => End::Lost(error.to_string()),
            error => End::Failed(error.to_string()),
        }
    }
}

/// Starts the thread, which gives way to vCPUs in the first pass. It gives its channel back at the end: closed any sooner,
/// the source would take a failure here for a lost link before it hears the reason.
pub(crate) fn start(
    reader: RecordReader,
    memory: Arc<Memory>,
    progress: Arc<Progress>,
    first_pass: Arc<AtomicBool>,
) -> std::io::Result<std::thread::JoinHandle<RecordReader>> {
    let name = format!("receive-{}", reader.channel().index());
    std::thread::Builder::new().name(name).spawn(move || {
        let mut receiver = DataReceiver {
            reader,
            memory,
            progress: Arc::clone(&progress),
            runs: PageRuns::new(),
            zero: ZeroPages::new(),
            first_pass,
        };
        let end = match receiver.run() {
            Ok(()) => End::Finished,
            Err(error) => error.end(),
        };
        progress.ended(end);
        receiver.reader
    })
}

struct DataReceiver {
    reader: RecordReader,
    memory: Arc<Memory>,
    progress: Arc<Progress>,
    runs: PageRuns,
    zero: ZeroPages,
    first_pass: Arc<AtomicBool>,
}

impl DataReceiver {
    fn run(&mut self) -> Result<(), ReceiveError> {
        let patience = Patience::idle(SILENCE_MAX);
        let meter = self.reader.meter();
        let pages = self.memory.ram.page_count();
        let mut manners = Manners::default();
        loop {
            let (began, blocked) = (Instant::now(), meter.read().blocked_us);
            let record = self.reader.next(&patience)?;
            manners.give_way(self.first_pass.load(Ordering::Relaxed));
            let mut memory_wait = Duration::ZERO;
            reached("destination.apply");
            match record.kind {
                RecordKind::Pages => {
                    self.runs.decode(record.payload, pages)?;
                    memory_wait = self.pages(&patience)?;
                }
                RecordKind::ZeroPages => {
                    self.zero.decode(record.payload, pages)?;
                    for run in self.zero.runs() {
                        self.memory.zero(run.range())?;
                    }
                }
                RecordKind::Final => return Ok(()),
                _ => return Err(ReceiveError::OutOfPlace),
            }
            let waited = Duration::from_micros(meter.read().blocked_us - blocked);
            self.progress
                .spent(began.elapsed().saturating_sub(waited), memory_wait);
            self.progress.applied(self.reader.next_counter());
            reached("destination.receiving");
        }
    }

    /// The record of the pages' bytes, which follows their list. Says how long memory for them had to be waited for.
    fn pages(&mut self, patience: &Patience) -> Result<Duration, ReceiveError> {
        let (memory, reader) = (&self.memory, &mut self.reader);
        let mut waited = Duration::ZERO;
        for run in self.runs.runs() {
            waited += memory.allocate(run.range())?;
        }
        if let [run] = self.runs.runs() {
            memory.fill(run.range(), |bytes| {
                reader.next_payload_into(bytes, patience)
            })??;
            return Ok(waited);
        }
        let mut rest = reader.next(patience)?.payload;
        for run in self.runs.runs() {
            let (bytes, behind) = rest
                .split_at_checked(run.count as usize * PAGE_SIZE)
                .ok_or(ReceiveError::OutOfPlace)?;
            memory.fill(run.range(), |to| to.copy_from_slice(bytes))?;
            rest = behind;
        }
        Ok(waited)
    }
}
