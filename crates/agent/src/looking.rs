//! One look at a time at storage that may hang.
//!
//! Whoever waits for such storage waits for as long as it hangs, so a look has a thread of its own, and each directory one such
//! thread at most. Owns the list of what is looked at now; an entry lasts as long as its look, also if that panics. Refuses: a
//! second look beside the first.

use std::collections::BTreeSet;
use std::io;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

/// What somebody looks at now.
static LOOKED_AT: (Mutex<BTreeSet<String>>, Condvar) =
    (Mutex::new(BTreeSet::new()), Condvar::new());

/// Nobody else looks there until this is dropped.
#[derive(Debug)]
pub(crate) struct Looking(String);

impl Looking {
    /// Waits until nobody else looks there, at most for `patience`.
    pub(crate) fn begin(path: &str, patience: Duration) -> Option<Self> {
        let (all, ended) = &LOOKED_AT;
        let all = all.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = ended.wait_timeout_while(all, patience, |all| all.contains(path));
        let (mut all, _) = waited.unwrap_or_else(PoisonError::into_inner);
        all.insert(path.to_owned()).then(|| Self(path.to_owned()))
    }
}

impl Drop for Looking {
    fn drop(&mut self) {
        let (all, ended) = &LOOKED_AT;
        let mut all = all.lock().unwrap_or_else(PoisonError::into_inner);
        all.remove(&self.0);
        ended.notify_all();
    }
}

/// Looks on a thread of its own, of which it is heard what was found; one that panics ends without a word. Nothing where another
/// look there has not ended within `patience`.
pub(crate) fn look<T: Send + 'static>(
    path: &str,
    patience: Duration,
    look: impl FnOnce() -> T + Send + 'static,
) -> io::Result<Option<Receiver<T>>> {
    let Some(looking) = Looking::begin(path, patience) else {
        return Ok(None);
    };
    let (sender, found) = channel();
    let work = move || {
        let seen = look();
        drop(looking);
        // Nobody waits for what came too late.
        let _ = sender.send(seen);
    };
    let thread = std::thread::Builder::new().name("datastore".into());
    thread.spawn(work)?;
    Ok(Some(found))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn what_one_looks_at_nobody_else_does_until_he_is_done() {
        let path = "/a/place/that/is/looked/at";
        let (end, ended) = channel::<()>();
        let first = look(path, LONG, move || ended.recv().is_err()).unwrap();
        assert!(look(path, Duration::ZERO, || ()).unwrap().is_none());
        drop(end);
        assert_eq!(first.unwrap().recv_timeout(LONG), Ok(true));
        let second = look(path, Duration::ZERO, || 7).unwrap();
        assert_eq!(second.unwrap().recv_timeout(LONG), Ok(7));
    }

    #[test]
    fn a_look_that_panics_keeps_nobody_from_the_next_one() {
        let path = "/a/place/whose/look/panics";
        let found = look(path, LONG, || -> u8 { panic!("on purpose") }).unwrap();
        assert!(found.unwrap().recv_timeout(LONG).is_err());
        assert!(Looking::begin(path, LONG).is_some());
    }
}
