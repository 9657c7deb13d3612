//! How a running guest uses its memory, measured for a prediction: what has content, and how much is written within
//! several times.
//!
//! Owns a thread with the write tracking while it measures, at most [`MEASURE_MS_MAX`]. Whatever ends it (time, a
//! migration that begins, QEMU's end) the tracking is put away first and huge pages are put back afterwards. Refuses:
//! to measure beside a migration, which needs the tracking for itself, and a guest that does not run.

use crate::huge_pages::HugePages;
use crate::hypervisor::{internal, memory};
use crate::input::Input;
use crate::source::tracking::begin;
use crate::vm::Vm;
use godwit_guestmem::{CHUNK_PAGES, Error, PageSet, RamFile, Tracking};
use godwit_ownership::Status;
use godwit_types::forecast::{DirtyAge, DirtyRate};
use godwit_types::host_api::{MEASURE_MS_MAX, VmAnswer};
use godwit_types::{ApiError, ErrorCode};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, SyncSender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Looks, as shares of the whole time: a working set shows by growing ever more slowly.
const LOOKS: [f64; 5] = [0.06, 0.15, 0.35, 0.6, 1.0];
/// Chunks whose content is looked at; more memory than this is judged by a sample, evenly spread.
const CHUNKS_READ_MAX: u64 = 256;
const MIB: f64 = 1_048_576.0;
const PAGES_PER_MIB: f64 = 256.0;

/// What is measured, and where.
#[derive(Debug)]
pub(crate) struct Subject {
    pub ram: Arc<RamFile>,
    pub huge_pages: Arc<HugePages>,
    pub qemu_pid: u32,
    pub handout_socket: PathBuf,
    pub millis: u64,
}

/// A measuring under way. Dropping it ends it, with the tracking put away.
#[derive(Debug)]
pub(crate) struct Measuring {
    end: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Measuring {
    /// Begins; the answer goes to `reply`, and `inputs` hears when it is over.
    pub(crate) fn start(
        subject: Subject,
        reply: SyncSender<VmAnswer>,
        inputs: Sender<Input>,
    ) -> std::io::Result<Self> {
        let (end, ended) = channel();
        let work = move || {
            let wait = |time| match ended.recv_timeout(time) {
                Err(RecvTimeoutError::Timeout) => true,
                Ok(()) | Err(RecvTimeoutError::Disconnected) => false,
            };
            let answer = match measure(&subject, wait) {
                Ok(Some(rate)) => VmAnswer::DirtyRate(rate),
                Ok(None) => VmAnswer::Error(ApiError::new(
                    ErrorCode::AlreadyMigrating,
                    "the measuring was ended because the VM began to move or stop",
                )),
                Err(error) => VmAnswer::Error(ApiError::new(
                    ErrorCode::Internal,
                    format!("the guest's writes cannot be measured: {error}"),
                )),
            };
            // Nobody waits any more: that is the caller's business.
            let _ = reply.send(answer);
            let _ = inputs.send(Input::Measured);
        };
        let thread = std::thread::Builder::new()
            .name("measure".into())
            .spawn(work)?;
        Ok(Self {
            end: Some(end),
            thread: Some(thread),
        })
    }
}

impl Vm {
    /// Begins to measure how the guest writes; the answer comes when it is done.
    pub(crate) fn measure(&mut self, millis: u64, reply: SyncSender<VmAnswer>) {
        let answers = reply.clone();
        let begun = self.subject(millis).and_then(|subject| {
            Measuring::start(subject, reply, self.inputs.clone()).map_err(internal)
        });
        match begun {
            Ok(measuring) => self.measuring = Some(measuring),
            // Nobody waits any more: that is the caller's business.
            Err(error) => drop(answers.send(VmAnswer::Error(error))),
        }
    }

    fn subject(&self, millis: u64) -> Result<Subject, ApiError> {
        let refuse = |why: &str| {
            let message = format!("VM '{}' {why}", self.config.vm);
            ApiError::new(ErrorCode::WrongState, message)
        };
        if self.migration.is_some() {
            return Err(refuse("is moving: its report has its dirty rate"));
        }
        if self.measuring.is_some() {
            return Err(refuse(
                "is being measured already: ask again in a few seconds",
            ));
        }
        let hyper = self.hyper.as_ref().ok_or_else(|| self.not_running())?;
        hyper.ram.check_length().map_err(memory)?;
        if !matches!(self.status, Status::Running { .. }) {
            return Err(refuse("does not run, so it writes nothing"));
        }
        Ok(Subject {
            ram: Arc::clone(&hyper.ram),
            huge_pages: Arc::clone(&hyper.huge_pages),
            qemu_pid: u32::try_from(hyper.pid()).map_err(internal)?,
            handout_socket: self.paths.handout(hyper.identity.launch),
            millis,
        })
    }
}

impl Drop for Measuring {
    fn drop(&mut self) {
        self.end = None;
        if let Some(thread) = self.thread.take() {
            // A panic ends the process anyway.
            let _ = thread.join();
        }
    }
}

/// `None` when `wait`, which says whether the time has passed undisturbed, said no.
fn measure(subject: &Subject, wait: impl Fn(Duration) -> bool) -> Result<Option<DirtyRate>, Error> {
    let data_pages = data_pages(&subject.ram)?;
    let tracking = begin(
        &subject.ram,
        subject.qemu_pid,
        &subject.handout_socket,
        &subject.huge_pages,
    )?;
    let looked = look(subject, tracking, wait);
    subject.huge_pages.put_back();
    Ok(looked?.map(|ages| DirtyRate {
        ram_mib: (subject.ram.byte_count() as f64 / MIB) as u64,
        data_mib: (data_pages as f64 / PAGES_PER_MIB).ceil() as u64,
        ages,
    }))
}

/// Looks at what has been written since the beginning, several times. Puts the tracking away, whatever happens.
fn look(
    subject: &Subject,
    mut tracking: Tracking,
    wait: impl Fn(Duration) -> bool,
) -> Result<Option<Vec<DirtyAge>>, Error> {
    let began = Instant::now();
    let whole_s = subject.millis.clamp(1, MEASURE_MS_MAX) as f64 / 1000.0;
    let mut written = PageSet::new(subject.ram.page_count());
    let mut ages = Vec::with_capacity(LOOKS.len());
    for share in LOOKS {
        let at = Duration::from_secs_f64(share * whole_s);
        if !wait(at.saturating_sub(began.elapsed())) {
            return Ok(None);
        }
        let pages = tracking.peek(&mut written)?;
        ages.push(DirtyAge {
            seconds: began.elapsed().as_secs_f64(),
            mib: pages as f64 / PAGES_PER_MIB,
        });
    }
    tracking.stop()?;
    Ok(Some(ages))
}

/// Pages that are not zero, judged by a sample where there are many.
fn data_pages(ram: &RamFile) -> Result<u64, Error> {
    let present = ram.data_pages()?.count();
    let chunks = ram.page_count() / CHUNK_PAGES;
    let step = chunks.div_ceil(CHUNKS_READ_MAX).max(1);
    let (mut seen, mut data) = (0_u64, 0_u64);
    let mut chunk = 0;
    while chunk < chunks {
        let first = chunk * CHUNK_PAGES;
        seen += ram
            .data_extents(first..first + CHUNK_PAGES)?
            .iter()
            .map(|extent| extent.end - extent.start)
            .sum::<u64>();
        let content = ram.classify_chunk(first, [u64::MAX; CHUNK_PAGES as usize / 64])?;
        data += content
            .data
            .iter()
            .map(|word| u64::from(word.count_ones()))
            .sum::<u64>();
        chunk += step;
    }
    Ok(scaled(present, data, seen))
}

/// The share of data among what was seen, of all that is present.
fn scaled(present: u64, data: u64, seen: u64) -> u64 {
    if seen == 0 {
        // No sample fell on memory: all of what there is may be data.
        return present;
    }
    (present as f64 * data as f64 / seen as f64).round() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shm_file(pages: u64) -> (tempfile::TempDir, RamFile) {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let ram = RamFile::create(&dir.path().join("ram"), pages * 4096, None).unwrap();
        (dir, ram)
    }

    #[test]
    fn untouched_and_zero_memory_is_no_data() {
        use std::os::unix::fs::FileExt as _;
        let (_dir, ram) = shm_file(4 * CHUNK_PAGES);
        assert_eq!(data_pages(&ram).unwrap(), 0);
        let file = std::fs::OpenOptions::new()
            .write(true)
            .open(ram.path())
            .unwrap();
        file.write_all_at(&[1; 4096], 0).unwrap();
        file.write_all_at(&[0; 4096], 3 * 4096).unwrap();
        file.write_all_at(&[7; 8192], 600 * 4096).unwrap();
        assert_eq!(data_pages(&ram).unwrap(), 3);
    }

    #[test]
    fn a_sample_speaks_for_the_rest() {
        assert_eq!(scaled(1000, 30, 60), 500);
        assert_eq!(scaled(1000, 0, 60), 0);
        assert_eq!(scaled(1000, 0, 0), 1000);
    }
}
