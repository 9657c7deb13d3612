//! How a running guest uses its memory, measured for a prediction: what has content, and how much is written within
//! several times.
//!
//! Owns a thread with the write tracking while it measures, at most [`MEASURE_MS_MAX`]. Whatever ends it (time, a
//! migration that begins, QEMU's end) the tracking is put away first and huge pages are put back afterwards. Refuses:
//! to measure beside a migration, which needs the tracking for itself, and a guest that does not run.

use crate::hypervisor::{internal, memory};
use crate::input::Input;
use crate::vm::Vm;
use godwit_guestmem::usage::{Subject, Usage, Written, measure};
use godwit_ownership::Status;
use godwit_types::forecast::{DirtyAge, DirtyRate};
use godwit_types::host_api::{MEASURE_MS_MAX, VmAnswer};
use godwit_types::{ApiError, ErrorCode};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, SyncSender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

const MIB: f64 = 1_048_576.0;
const PAGES_PER_MIB: f64 = 256.0;

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
        let ram_bytes = subject.ram.byte_count();
        let work = move || {
            let wait = |time| match ended.recv_timeout(time) {
                Err(RecvTimeoutError::Timeout) => true,
                Ok(()) | Err(RecvTimeoutError::Disconnected) => false,
            };
            let answer = match measure(&subject, wait) {
                Ok(Some(usage)) => VmAnswer::DirtyRate(rate(&usage, ram_bytes)),
                Ok(None) => VmAnswer::Error(ApiError::new(
                    ErrorCode::AlreadyMigrating,
                    "the measuring was ended because the VM began to move or stop",
                )),
                Err(error) => VmAnswer::Error(ApiError::new(
                    ErrorCode::Internal,
                    format!("the guest's writes cannot be measured: {error}"),
                )),
            };
            // The caller may have gone.
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
            // The caller may have gone.
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
            within: Duration::from_millis(millis.clamp(1, MEASURE_MS_MAX)),
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

/// As a prediction wants it.
fn rate(usage: &Usage, ram_bytes: u64) -> DirtyRate {
    let age = |written: &Written| DirtyAge {
        seconds: written.after.as_secs_f64(),
        mib: written.pages as f64 / PAGES_PER_MIB,
    };
    DirtyRate {
        ram_mib: (ram_bytes as f64 / MIB) as u64,
        data_mib: (usage.data_pages as f64 / PAGES_PER_MIB).ceil() as u64,
        ages: usage.written.iter().map(age).collect(),
    }
}
