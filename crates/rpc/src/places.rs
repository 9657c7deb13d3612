//! The places of one TLS listener for peers that have shown a certificate which is admitted.
//!
//! Owns nothing but the places. No holder but the controller gets more than half of them, so that one enrolled host or
//! operator locks nobody out, and some are for the controller alone, so that no others together do. Says in the log, once a minute at most, that somebody was sent away, and who has most.

use crate::limits::{CONNECTIONS_FOR_CONTROLLER, CONNECTIONS_MAX, CONNECTIONS_PER_HOLDER};
use crate::pki::{Holder, Role};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Between two lines about the same.
const TOLD_EVERY: Duration = Duration::from_secs(60);

#[derive(Default)]
pub(crate) struct Places {
    inside: Mutex<Inside>,
}

#[derive(Default)]
struct Inside {
    taken: usize,
    by_holder: BTreeMap<String, usize>,
    told: Option<Instant>,
}

/// One of them; given back when dropped.
pub(crate) struct OnePlace {
    places: Arc<Places>,
    holder: String,
}

impl Places {
    /// A place, if there is one for this holder.
    pub(crate) fn take(self: &Arc<Self>, holder: &Holder) -> Option<OnePlace> {
        let (of_all, of_one) = match holder.role {
            Role::Controller => (CONNECTIONS_MAX, CONNECTIONS_MAX),
            _ => (
                CONNECTIONS_MAX - CONNECTIONS_FOR_CONTROLLER,
                CONNECTIONS_PER_HOLDER,
            ),
        };
        let holder = holder.role.to_string();
        let mut inside = self.inside();
        let has = inside.by_holder.get(&holder).copied().unwrap_or(0);
        if inside.taken >= of_all || has >= of_one {
            let line = inside.line(&holder);
            drop(inside);
            if let Some(line) = line {
                tracing::warn!("{line}");
            }
            return None;
        }
        inside.taken += 1;
        inside.by_holder.insert(holder.clone(), has + 1);
        drop(inside);
        Some(OnePlace {
            places: Arc::clone(self),
            holder,
        })
    }

    fn inside(&self) -> MutexGuard<'_, Inside> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inside {
    /// What is to be said, if it is time to.
    fn line(&mut self, refused: &str) -> Option<String> {
        let now = Instant::now();
        if self.told.is_some_and(|told| now - told < TOLD_EVERY) {
            return None;
        }
        self.told = Some(now);
        let most = self.by_holder.iter().max_by_key(|(_, count)| **count);
        let (most, count) = most.map_or(("nobody", 0), |(who, count)| (who.as_str(), *count));
        Some(format!(
            "a connection of {refused} was closed at once: {taken} of {CONNECTIONS_MAX} places are taken, {count} of them by {most}; nobody but the controller gets more than {CONNECTIONS_PER_HOLDER}, and {CONNECTIONS_FOR_CONTROLLER} are for it alone",
            taken = self.taken,
        ))
    }
}

impl Drop for OnePlace {
    fn drop(&mut self) {
        let mut inside = self.places.inside();
        inside.taken = inside.taken.saturating_sub(1);
        let left = inside.by_holder.get_mut(&self.holder).map(|count| {
            *count = count.saturating_sub(1);
            *count
        });
        if left == Some(0) {
            inside.by_holder.remove(&self.holder);
        }
    }
}
