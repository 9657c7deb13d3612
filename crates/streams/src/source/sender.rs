//! One thread per data channel at the source: takes chunks, leaves zero pages out, seals and sends the rest.
//!
//! Each thread owns its channel and the list of what the destination has not yet applied. Threads share the RAM file
//! (read only), the pass (one atomic add per chunk of 512 pages) and nothing else. When a channel fails, its thread ends
//! and gives back everything that is dirty again. A channel that is taken out sends its final record after its present
//! chunk; its thread stays until the set ends, since what it sent may still have to be sent again.

use super::pass::{Pass, put_back_chunk};
use super::unacked::Unacked;
use crate::priority::Manners;
use godwit_guestmem::page_set::Chunk;
use godwit_guestmem::{PageSet, RamFile};
use godwit_transport::{Meter, MeterReading, Patience, RecordWriter, TransportError};
use godwit_wire::{PageRun, PageRuns, ZeroPages};
use rustix::time::{ClockId, clock_gettime};
use std::ops::{AddAssign, Range};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A channel on which nothing moves for this long is lost.
pub const SILENCE_MAX: Duration = Duration::from_secs(10);

/// Longest wait to get rid of a final record.
pub const FINISH_WAIT: Duration = Duration::from_millis(500);

/// What a sender did in one pass.
#[derive(Debug, Default, Clone, Copy)]
pub struct PassFigures {
    /// Pages sent with their bytes.
    pub pages: u64,
    /// Pages of which only the number was sent, since they hold nothing.
    pub zero_pages: u64,
    /// Bytes on the wire.
    pub bytes: u64,
    /// Time spent computing: reading, testing, sealing, copying to the socket.
    pub busy: Duration,
    /// Time spent held back by the cap.
    pub capped: Duration,
}

impl AddAssign for PassFigures {
    fn add_assign(&mut self, other: Self) {
        self.pages += other.pages;
        self.zero_pages += other.zero_pages;
        self.bytes += other.bytes;
        self.busy += other.busy;
        self.capped += other.capped;
    }
}

/// How a sender's pass ended.
#[derive(Debug)]
pub struct PassEnd {
    /// Which channel, by index.
    pub index: usize,
    /// Counts and times of this pass alone.
    pub figures: PassFigures,
    /// Records sent on this channel so far.
    pub records: u64,
    /// Its failure; the thread ends then and gives back what is dirty again.
    pub error: Option<SendError>,
}

/// What ends a sender's thread before its time.
#[derive(Debug, thiserror::Error)]
pub enum SendError {
    /// The channel failed, which may be a lost link.
    #[error(transparent)]
    Transport(#[from] TransportError),
    /// Guest memory could not be read.
    #[error(transparent)]
    Memory(#[from] godwit_guestmem::Error),
    /// A page list that cannot be.
    #[error(transparent)]
    Wire(#[from] godwit_wire::WireError),
}

/// What a sender is told.
#[derive(Debug)]
enum Task {
    Pass(Arc<Pass>),
    Leave,
}

/// What others may see of a sender while it works, and the wish that it leaves.
#[derive(Debug, Default)]
pub struct Live {
    pages: AtomicU64,
    zero_pages: AtomicU64,
    capped_us: AtomicU64,
    cpu_us: AtomicU64,
    leave: AtomicBool,
}

impl Live {
    /// Time held back by the cap.
    pub fn capped(&self) -> Duration {
        Duration::from_micros(self.capped_us.load(Ordering::Relaxed))
    }

    /// Time on a core.
    pub fn cpu(&self) -> Duration {
        Duration::from_micros(self.cpu_us.load(Ordering::Relaxed))
    }

    /// Pages sent with their bytes and as zero, in all passes so far.
    pub fn pages(&self) -> (u64, u64) {
        let read = |pages: &AtomicU64| pages.load(Ordering::Relaxed);
        (read(&self.pages), read(&self.zero_pages))
    }

    fn sent(&self, pages: u64, zero_pages: u64) {
        self.pages.fetch_add(pages, Ordering::Relaxed);
        self.zero_pages.fetch_add(zero_pages, Ordering::Relaxed);
    }

    fn book(&self, capped: Duration) {
        let us = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        self.capped_us.fetch_add(us(capped), Ordering::Relaxed);
        let cpu = clock_gettime(ClockId::ThreadCPUTime);
        let cpu = Duration::try_from(cpu).unwrap_or_default();
        self.cpu_us.store(us(cpu), Ordering::Relaxed);
    }
}

/// A running sender, as the driver holds it.
#[derive(Debug)]
pub struct SenderHandle {
    tasks: Sender<Task>,
    live: Arc<Live>,
    thread: JoinHandle<PageSet>,
}

impl SenderHandle {
    /// Starts the thread; every pass given to it ends in one [`PassEnd`] on `ends`.
    pub fn start(
        index: usize,
        writer: RecordWriter,
        ram: Arc<RamFile>,
        applied: Arc<AtomicU64>,
        ends: impl Fn(PassEnd) + Send + 'static,
    ) -> std::io::Result<Self> {
        let (tasks, todo) = channel();
        let live = Arc::<Live>::default();
        let sender = DataSender::new(index, writer, ram, applied, Arc::clone(&live));
        let thread = std::thread::Builder::new()
            .name(format!("send-{index}"))
            .spawn(move || sender.run(&todo, ends))?;
        Ok(Self {
            tasks,
            live,
            thread,
        })
    }

    /// Gives a pass to the thread; `false`: the thread has ended.
    pub fn begin(&self, pass: &Arc<Pass>) -> bool {
        self.tasks.send(Task::Pass(Arc::clone(pass))).is_ok()
    }

    /// Ends the channel in good order after its present chunk. A pass that it works on ends for it with a [`PassEnd`].
    pub fn leave(&self) {
        self.live.leave.store(true, Ordering::Relaxed);
        // A thread that has ended has left.
        let _ = self.tasks.send(Task::Leave);
    }

    /// Counters that others may read while it works.
    pub fn live(&self) -> &Live {
        &self.live
    }

    /// Ends the thread after its pass and gives what the destination has not acknowledged as applied; `None` when the
    /// thread died, and nobody knows.
    pub fn end(self) -> Option<PageSet> {
        drop(self.tasks);
        self.thread.join().ok()
    }
}

struct DataSender {
    index: usize,
    writer: RecordWriter,
    meter: Arc<Meter>,
    ram: Arc<RamFile>,
    applied: Arc<AtomicU64>,
    live: Arc<Live>,
    unacked: Unacked,
    runs: PageRuns,
    zero: ZeroPages,
}

impl DataSender {
    fn new(
        index: usize,
        writer: RecordWriter,
        ram: Arc<RamFile>,
        applied: Arc<AtomicU64>,
        live: Arc<Live>,
    ) -> Self {
        let meter = writer.meter();
        let (runs, zero) = (PageRuns::new(), ZeroPages::new());
        Self {
            index,
            writer,
            meter,
            ram,
            applied,
            live,
            unacked: Unacked::default(),
            runs,
            zero,
        }
    }

    fn run(mut self, todo: &Receiver<Task>, ends: impl Fn(PassEnd)) -> PageSet {
        let (mut current, mut left) = (None, false);
        let mut manners = Manners::default();
        while let Ok(task) = todo.recv() {
            let Task::Pass(pass) = task else {
                self.finish();
                left = true;
                continue;
            };
            manners.give_way(pass.gives_way());
            let end = self.pass(&pass, &mut current);
            let failed = end.error.is_some();
            if failed {
                pass.stop();
            }
            ends(end);
            if failed {
                return self.not_applied(current);
            }
        }
        if !left {
            // Nobody needs this channel any more.
            self.finish();
        }
        self.not_applied(None)
    }

    /// The final record tells the peer that nothing follows. A peer that is gone does not mind.
    fn finish(&mut self) {
        let _ = self.writer.finish(&Patience::idle(FINISH_WAIT));
    }

    fn pass(&mut self, pass: &Pass, current: &mut Option<Chunk>) -> PassEnd {
        let (began, before) = (Instant::now(), self.meter.read());
        let mut figures = PassFigures::default();
        let result = self.send_chunks(pass, current, &mut figures);
        self.book_time(&mut figures, began, before);
        PassEnd {
            index: self.index,
            figures,
            records: self.writer.next_counter(),
            error: result.err(),
        }
    }

    fn book_time(&self, figures: &mut PassFigures, began: Instant, before: MeterReading) {
        let after = self.meter.read();
        let blocked = Duration::from_micros(after.blocked_us - before.blocked_us);
        figures.bytes = after.bytes - before.bytes;
        figures.busy = began
            .elapsed()
            .saturating_sub(blocked)
            .saturating_sub(figures.capped);
    }

    /// What must be sent again when this channel is gone.
    fn not_applied(&mut self, current: Option<Chunk>) -> PageSet {
        let mut dirty = PageSet::new(self.ram.page_count());
        self.unacked.applied(self.applied.load(Ordering::Acquire));
        self.unacked.put_back(&mut dirty);
        for run in self.runs.runs() {
            dirty.insert_range(run.range());
        }
        for run in self.zero.runs() {
            dirty.insert_range(run.range());
        }
        if let Some(chunk) = current {
            put_back_chunk(&chunk, &mut dirty);
        }
        dirty
    }

    fn send_chunks(
        &mut self,
        pass: &Pass,
        current: &mut Option<Chunk>,
        figures: &mut PassFigures,
    ) -> Result<(), SendError> {
        while !self.live.leave.load(Ordering::Relaxed)
            && let Some(chunk) = pass.take()
        {
            *current = Some(*chunk);
            let before = self.meter.read().bytes;
            let (pages, zero_pages) = (figures.pages, figures.zero_pages);
            self.send_chunk(chunk, figures)?;
            self.live
                .sent(figures.pages - pages, figures.zero_pages - zero_pages);
            let capped = pass.keep_pace(self.meter.read().bytes - before);
            figures.capped += capped;
            self.live.book(capped);
        }
        self.flush_data()?;
        self.flush_zero()?;
        *current = None;
        Ok(())
    }

    fn send_chunk(&mut self, chunk: &Chunk, figures: &mut PassFigures) -> Result<(), SendError> {
        let content = self.ram.classify_chunk(chunk.first_page, chunk.words)?;
        for run in content.data_runs() {
            figures.pages += run.end - run.start;
            self.add_run(run)?;
        }
        let zero = Chunk {
            first_page: chunk.first_page,
            words: content.zero,
        };
        figures.zero_pages += zero.count();
        for page in zero.runs().flatten() {
            self.add_zero(page)?;
        }
        Ok(())
    }

    /// Adds a run of data, cut into records.
    fn add_run(&mut self, run: Range<u64>) -> Result<(), SendError> {
        let mut first = run.start;
        while first < run.end {
            let count = u64::from(self.runs.room()).min(run.end - first);
            self.runs.push(PageRun {
                first,
                count: u32::try_from(count).unwrap_or(0),
            })?;
            first += count;
            if self.runs.room() == 0 {
                self.flush_data()?;
            }
        }
        Ok(())
    }

    fn add_zero(&mut self, page: u64) -> Result<(), SendError> {
        if !self.zero.insert(page)? {
            self.flush_zero()?;
            self.zero.insert(page)?;
        }
        Ok(())
    }

    fn flush_data(&mut self) -> Result<(), SendError> {
        if self.runs.pages() == 0 {
            return Ok(());
        }
        let patience = Patience::idle(SILENCE_MAX);
        let (writer, runs) = (&mut self.writer, &self.runs);
        match runs.runs() {
            [run] => self
                .ram
                .with_pages(run.first, u64::from(run.count), |bytes| {
                    writer.send_pages(runs, &[bytes], &patience)
                })??,
            scattered => {
                let spans: Vec<_> = scattered.iter().map(|run| run.range()).collect();
                self.ram
                    .with_runs(&spans, |parts| writer.send_pages(runs, parts, &patience))??;
            }
        }
        self.book_runs();
        Ok(())
    }

    fn flush_zero(&mut self) -> Result<(), SendError> {
        if self.zero.is_empty() {
            return Ok(());
        }
        self.writer
            .send_zero_pages(&self.zero, &Patience::idle(SILENCE_MAX))?;
        let records = self.writer.next_counter();
        for run in self.zero.runs() {
            self.unacked.push(records, run.range());
        }
        self.zero.clear();
        Ok(())
    }

    fn book_runs(&mut self) {
        let records = self.writer.next_counter();
        for run in self.runs.runs() {
            self.unacked.push(records, run.range());
        }
        self.unacked.applied(self.applied.load(Ordering::Acquire));
        self.runs.clear();
    }
}
