//! The guest's addresses, learned from what its network cards say of themselves.
//!
//! One thread per card listens on the guest's port for ARP and neighbour discovery. Owns the lists, which are bounded,
//! and keeps them in a file for a successor. A guest may say anything: its claims are checked, a flood of
//! them costs this host little, and nothing but announcements in the guest's own name is made of them. Refuses: to
//! listen to anything but what the card says of itself.

use crate::announce::{Mac, claimed_address};
use crate::packet::PacketSocket;
use crate::tap::name_of;
use godwit_migrate::addresses::{CARDS_MAX, check, note};
use godwit_store::{load_json, save_json};
use godwit_types::vm::VmSpec;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

/// How often a listener looks whether it is still wanted.
const LOOK_EVERY: Duration = Duration::from_secs(2);
/// Rest after each frame: a guest that floods is heard a hundred times a second and no more.
const REST: Duration = Duration::from_millis(10);
/// Least time between two savings.
const SAVE_EVERY: Duration = Duration::from_secs(2);

/// The lists, by card.
#[derive(Debug, Clone)]
pub struct Neighbours(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    cards: Mutex<Vec<Vec<IpAddr>>>,
    file: PathBuf,
}

impl Neighbours {
    /// What a predecessor kept of this QEMU's guest in `file`; nothing for a new one.
    pub fn load(file: PathBuf) -> Self {
        let kept: Option<Vec<Vec<IpAddr>>> = load_json(&file).unwrap_or_default();
        let cards = kept
            .filter(|cards| check(cards).is_ok())
            .unwrap_or_default();
        Self(Arc::new(Shared {
            cards: Mutex::new(cards),
            file,
        }))
    }

    /// All that is known.
    pub fn read(&self) -> Vec<Vec<IpAddr>> {
        self.0.lock().clone()
    }

    /// Adds what another host knew.
    pub fn merge(&self, cards: &[Vec<IpAddr>]) {
        for (card, addresses) in cards.iter().enumerate() {
            for address in addresses {
                self.0.learn(card, *address);
            }
        }
        self.0.save();
    }

    /// Listens to all cards until this is dropped. What cannot be listened to is said; the guest runs all the same.
    pub fn listen(&self, spec: &VmSpec) {
        for card in 0..spec.nics.len() {
            let (Some(mac), name) = (spec.mac(card), name_of(spec, card)) else {
                continue;
            };
            let shared = Arc::downgrade(&self.0);
            let started = PacketSocket::open_for_claims(&name, mac)
                .map_err(|error| error.to_string())
                .and_then(|socket| {
                    let work = move || listen(&socket, mac, card, &shared);
                    let thread = std::thread::Builder::new().name("addresses".into());
                    thread.spawn(work).map_err(|error| error.to_string())
                });
            if let Err(error) = started {
                tracing::warn!(%error, "the guest's addresses are not learned");
            }
        }
    }
}

impl Shared {
    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Vec<IpAddr>>> {
        self.cards.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn learn(&self, card: usize, address: IpAddr) -> bool {
        if card >= CARDS_MAX {
            return false;
        }
        let mut cards = self.lock();
        let wanted = cards.len().max(card + 1);
        cards.resize(wanted, Vec::new());
        cards.get_mut(card).is_some_and(|list| note(list, address))
    }

    fn save(&self) {
        let cards = self.lock().clone();
        if let Err(error) = save_json(&self.file, &cards) {
            tracing::debug!(%error, "the guest's addresses are not kept");
        }
    }
}

fn listen(socket: &PacketSocket, mac: Mac, card: usize, shared: &Weak<Shared>) {
    let (mut unsaved, mut saved_at) = (false, Instant::now());
    loop {
        let frame = match socket.receive(Instant::now() + LOOK_EVERY) {
            Ok(frame) => frame,
            // The tap is gone, and QEMU with it.
            Err(_) => return,
        };
        let Some(shared) = shared.upgrade() else {
            return;
        };
        if let Some(frame) = frame {
            unsaved |=
                claimed_address(&frame, mac).is_some_and(|address| shared.learn(card, address));
            std::thread::sleep(REST);
        }
        if unsaved && saved_at.elapsed() >= SAVE_EVERY {
            shared.save();
            (unsaved, saved_at) = (false, Instant::now());
        }
    }
}
