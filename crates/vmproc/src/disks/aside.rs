//! Work that storage may keep for long, on threads of their own: nobody waits for it longer than agreed.
//!
//! Owns nothing: work for which nobody waits any more goes on alone, and what it has is dropped at its end. Refuses: nothing.

use super::switching::Stopped;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// How often it is looked whether the move is called off.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Does something that storage may keep for long on a thread of its own, of which it is heard in [`wait`].
pub(super) fn begin<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<Receiver<T>, String> {
    let (done, is_done) = channel();
    let work = move || {
        let _ = done.send(work()); // whoever asked may have given up
    };
    let thread = std::thread::Builder::new().name(name.to_owned());
    thread.spawn(work).map_err(|error| error.to_string())?;
    Ok(is_done)
}

pub(super) fn wait<T>(done: &Receiver<T>, deadline: Instant) -> Result<T, String> {
    let left = deadline.saturating_duration_since(Instant::now());
    let silent = "the storage of the VM's disks does not answer: see that it does, and let the guest run again";
    done.recv_timeout(left).map_err(|_| silent.to_owned())
}

/// Does something on a thread of its own; nothing where that has not ended by then, if a time is given, or not in an orderly way. It goes on alone where nobody waits for it.
pub(super) fn within<R: Send + 'static>(
    (name, until): (&str, Option<Instant>),
    may_go_on: impl Fn() -> Result<(), Stopped>,
    work: impl FnOnce() -> R + Send + 'static,
) -> Result<Option<R>, Stopped> {
    let is_done = begin(name, work)?;
    let has_time = || until.is_none_or(|until| Instant::now() < until);
    loop {
        match is_done.recv_timeout(LOOK_EVERY) {
            Ok(result) => return Ok(Some(result)),
            Err(RecvTimeoutError::Timeout) if has_time() => may_go_on()?,
            Err(_) => return Ok(None),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn nobody_waits_longer_than_until_then_or_until_it_is_called_off() {
        let long = || ("waits", Some(Instant::now() + LONG));
        let waits = || Ok(());
        assert!(within(long(), waits, || 7).is_ok_and(|done| done == Some(7)));
        // What hangs ends with the test.
        let hangs = || {
            let (hold, held) = channel::<()>();
            (hold, move || held.recv().is_ok())
        };
        let (hold, work) = hangs();
        assert!(
            within(("hangs", Some(Instant::now())), waits, work).is_ok_and(|done| done.is_none())
        );
        drop(hold);
        for until in [long().1, None] {
            let (hold, work) = hangs();
            let stopped = within(("hangs", until), || Err(Stopped::Cancelled), work);
            assert!(matches!(stopped, Err(Stopped::Cancelled)));
            drop(hold);
        }
    }
}
