//! What hosts measured of guests and links, remembered for a while.
//!
//! Plain data: owns the newest measurement of each VM and of each pair of hosts. Refuses: to answer with one that is
//! older than its reader asks for.

use godwit_types::forecast::DirtyRate;
use godwit_types::{HostName, VmName};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Measurements older than this are forgotten.
pub const KEPT: Duration = Duration::from_secs(600);

/// A link as far as it is known.
#[derive(Debug, Clone, PartialEq)]
pub struct Link {
    /// Page bytes per second.
    pub bytes_per_s: f64,
    pub rtt_s: f64,
    /// What this rests on.
    pub basis: String,
}

/// The two hosts between which a link was measured, the sender first.
pub type Pair = (HostName, HostName);

/// The newest measurements of one kind, each with when it came.
#[derive(Debug)]
pub struct Newest<K, V>(Mutex<BTreeMap<K, (Instant, V)>>);

impl<K, V> Default for Newest<K, V> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<K: Ord, V: Clone> Newest<K, V> {
    fn known(&self) -> MutexGuard<'_, BTreeMap<K, (Instant, V)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A measurement that is not older than `age`.
    pub fn young(&self, key: &K, age: Duration) -> Option<V> {
        let known = self.known();
        let (at, value) = known.get(key)?;
        (at.elapsed() <= age).then(|| value.clone())
    }

    /// Remembers a measurement that has just come.
    pub fn keep(&self, key: K, value: V) {
        let mut known = self.known();
        known.retain(|_, (at, _)| at.elapsed() < KEPT);
        known.insert(key, (Instant::now(), value));
    }
}

/// What was measured lately about guests and links.
#[derive(Debug, Default)]
pub struct Measured {
    pub rates: Newest<VmName, DirtyRate>,
    pub links: Newest<Pair, Link>,
    /// Links that are being measured: two bursts at once would halve each other.
    measuring: Mutex<BTreeMap<Pair, Arc<tokio::sync::Mutex<()>>>>,
}

impl Measured {
    /// Who measures a link holds this.
    pub fn turn(&self, hosts: &Pair) -> Arc<tokio::sync::Mutex<()>> {
        let mut measuring = self
            .measuring
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        measuring.retain(|_, turn| Arc::strong_count(turn) > 1);
        measuring.entry(hosts.clone()).or_default().clone()
    }
}
