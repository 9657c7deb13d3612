//! Work on what is left of a VM's disks while it has no QEMU, on a thread of its own: storage may hang, and whoever asks this process is answered
//! meanwhile.
//!
//! Owns that thread, one at a time. Refuses: other work on the same files until it is over, and any once this process is to leave its VM to another one.
//! What is not over in time goes on by itself and tells the log what it comes to; whoever looks again does it again.

use godwit_types::{ApiError, ErrorCode};
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError, channel};
use std::time::{Duration, Instant};

/// For so long it is waited for. Storage that works makes a large image durable, or removes it, in less.
const PATIENCE: Duration = Duration::from_secs(10);

/// The work that is under way, if any is.
#[derive(Debug, Default)]
pub(crate) struct DiskWork {
    /// Whose other end the thread has for as long as it lives.
    under_way: Option<Receiver<()>>,
    is_closed: bool,
}

impl DiskWork {
    pub(crate) fn is_under_way(&mut self) -> bool {
        let ended = self.under_way.as_ref().map(Receiver::try_recv);
        let is_under_way = ended == Some(Err(TryRecvError::Empty));
        if !is_under_way {
            self.under_way = None;
        }
        is_under_way
    }

    /// What the work comes to; nothing where it has not ended yet, or an earlier one has not.
    pub(crate) fn run<T: Send + 'static>(
        &mut self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Option<T> {
        self.run_for(PATIENCE, work)
    }

    fn run_for<T: Send + 'static>(
        &mut self,
        patience: Duration,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Option<T> {
        if self.is_closed || self.is_under_way() {
            return None;
        }
        let (lives, is_over) = channel();
        let (done, is_done) = channel();
        let work = move || {
            let _lives = lives;
            // Whoever waits for it may have given up.
            let _ = done.send(work());
        };
        let thread = std::thread::Builder::new().name("disk-work".into());
        if let Err(error) = thread.spawn(work) {
            tracing::warn!(%error, "what is left of the VM's disks stays for now");
            return None;
        }
        let told = is_done.recv_timeout(patience).ok();
        if told.is_none() {
            tracing::warn!(
                "the storage of what is left of the VM's disks does not answer: it gets its end once that does"
            );
            self.under_way = Some(is_over);
        }
        told
    }

    /// As [`Self::run`], for whoever has to know what it comes to.
    pub(crate) fn must<T: Send + 'static>(
        &mut self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, ApiError> {
        self.must_be_over()?;
        self.run(work).ok_or_else(why_not)
    }

    /// Refuses what needs the same files while the work is under way.
    pub(crate) fn must_be_over(&mut self) -> Result<(), ApiError> {
        self.must_be_over_by(Instant::now() + PATIENCE)
    }

    fn must_be_over_by(&mut self, deadline: Instant) -> Result<(), ApiError> {
        let left = deadline.saturating_duration_since(Instant::now());
        let ended = self.under_way.as_ref().map(|end| end.recv_timeout(left));
        if ended != Some(Err(RecvTimeoutError::Timeout)) {
            self.under_way = None;
            return Ok(());
        }
        Err(why_not())
    }

    /// None begins from now on: this process gives up the lock that keeps others from these files.
    pub(crate) fn close(&mut self) -> Result<(), ApiError> {
        self.must_be_over()?;
        self.is_closed = true;
        Ok(())
    }
}

fn why_not() -> ApiError {
    ApiError::new(
        ErrorCode::WrongState,
        "what is left of the VM's disks on this host is being settled, and its storage does not answer: see that it does, and try again",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOON: Duration = Duration::from_millis(10);
    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn storage_that_hangs_holds_up_nobody_but_who_needs_the_same_files() {
        let mut work = DiskWork::default();
        assert_eq!(work.run_for(LONG, || 1), Some(1));
        let (go, goes) = channel::<()>();
        let (done, is_done) = channel();
        let hangs = move || {
            let _ = goes.recv();
            done.send(()).unwrap();
        };
        assert_eq!(work.run_for(SOON, hangs), None);
        assert!(work.is_under_way());
        // Another one waits behind no storage, and is not begun beside it.
        assert_eq!(work.run_for(LONG, || panic!("beside another")), None::<()>);
        let refused = work.must_be_over_by(Instant::now()).unwrap_err();
        assert_eq!(refused, why_not());
        drop(go);
        is_done.recv_timeout(LONG).unwrap();
        work.must_be_over_by(Instant::now() + LONG).unwrap();
        assert!(!work.is_under_way());
        assert_eq!(work.run_for(LONG, || 2), Some(2));
        work.close().unwrap();
        let begins = || panic!("after another process may have begun");
        assert_eq!(work.run_for(LONG, begins), None::<()>);
    }
}
