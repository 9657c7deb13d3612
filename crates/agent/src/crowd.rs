//! How many messages of one host about one VM are under way at once: a VM process has few connections, and this host's own orders need
//! them, too.
//!
//! Owns the counts. Refuses: more than a migration ever has under way; the other host says it again.

use crate::supervisor::lock;
use godwit_types::{ApiError, ErrorCode, HostName, VmName};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// A migration says one thing after the other; some are said again before the first try has an end.
const UNDER_WAY_MAX: usize = 4;

type About = (VmName, HostName);

type Counts = Mutex<BTreeMap<About, usize>>;

#[derive(Debug, Default)]
pub(crate) struct Crowd(Arc<Counts>);

impl Crowd {
    /// The message counts until what is returned is dropped.
    pub(crate) fn enter(&self, vm: &VmName, from: &HostName) -> Result<Seat, ApiError> {
        let about = (vm.clone(), from.clone());
        let mut all = lock(&self.0);
        let count = all.entry(about.clone()).or_default();
        if *count == UNDER_WAY_MAX {
            let message = format!(
                "{UNDER_WAY_MAX} messages of host '{from}' about VM '{vm}' are under way: say it again once one of them is answered"
            );
            return Err(ApiError::new(ErrorCode::Locked, message));
        }
        *count += 1;
        drop(all);
        let all = Arc::clone(&self.0);
        Ok(Seat { all, about })
    }
}

#[derive(Debug)]
pub(crate) struct Seat {
    all: Arc<Counts>,
    about: About,
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut all = lock(&self.all);
        if let Some(count) = all.get_mut(&self.about) {
            *count -= 1;
            if *count == 0 {
                all.remove(&self.about);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One host could take all connections of a VM process, so that nobody paused, moved or stopped its VM.
    #[test]
    fn one_host_has_no_more_than_a_few_messages_about_a_vm_under_way() {
        let crowd = Crowd::default();
        let [a, b] = ["a", "b"].map(|name| HostName::new(name).unwrap());
        let [web, db] = ["web", "db"].map(|name| VmName::new(name).unwrap());
        let mut seats: Vec<_> = (0..UNDER_WAY_MAX)
            .map(|_| crowd.enter(&web, &a).unwrap())
            .collect();
        assert_eq!(crowd.enter(&web, &a).unwrap_err().code, ErrorCode::Locked);
        assert!(crowd.enter(&web, &b).is_ok() && crowd.enter(&db, &a).is_ok());
        seats.pop();
        assert!(crowd.enter(&web, &a).is_ok());
        drop(seats);
        assert!(lock(&crowd.0).is_empty());
    }
}
