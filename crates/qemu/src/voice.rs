//! Tells the network where the guest is now: after it runs here, never before, and never once it may run elsewhere.
//!
//! For each card RARP (switches learn), gratuitous ARP and unsolicited neighbour advertisements (neighbours learn) for
//! the addresses that came with the guest, several times, since switches and neighbours lose frames. They enter the
//! bridge by the guest's own port, as if the guest had sent them. Beside that QEMU announces its cards and asks the
//! guest's driver to. Owns this process's copies of the taps. Failing costs time on the network, not the guest.

use crate::announce::announcement;
use crate::machine::Machine;
use crate::packet::PacketSocket;
use crate::tap::Tap;
use godwit_types::PortGroup;
use godwit_types::vm::VmSpec;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// When the announcements leave, from the moment that the guest runs.
const ROUNDS_MS: [u64; 5] = [0, 50, 200, 550, 1100];
/// EtherType of ARP; what is sent may have another.
const ARP: u16 = 0x0806;

/// The right to speak in the guest's name on this host. Silent until the guest runs here.
#[derive(Debug, Clone, Default)]
pub struct Voice(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    may_speak: bool,
    taps: Vec<Tap>,
}

/// What to say about one card, and where if its tap is not ours.
struct Card {
    frames: Vec<Vec<u8>>,
    bridge: Option<String>,
}

impl Voice {
    /// With the taps as they were opened for QEMU, in the order of the cards.
    pub fn new(taps: Vec<Tap>) -> Self {
        let may_speak = false;
        Self(Arc::new(Mutex::new(State { may_speak, taps })))
    }

    /// From here on nothing more is said: the guest is about to stop, or its QEMU is gone. When this returns the last
    /// frame has left.
    pub fn silence(&self) {
        *self.lock() = State::default();
    }

    fn open(&self) {
        self.lock().may_speak = true;
    }

    /// One round; says whether more may follow.
    fn speak(&self, cards: &[Card]) -> bool {
        let state = self.lock();
        if !state.may_speak {
            return false;
        }
        for (index, card) in cards.iter().enumerate() {
            let sent = match (state.taps.get(index), &card.bridge) {
                (Some(tap), _) => send(&card.frames, |frame| tap.send(frame)),
                // This process took QEMU over and has no tap: the bridge reaches the other hosts.
                (None, Some(bridge)) => PacketSocket::open(bridge, ARP)
                    .map_err(|error| error.to_string())
                    .and_then(|socket| send(&card.frames, |frame| socket.send(frame))),
                (None, None) => Ok(()),
            };
            if let Err(error) = sent {
                tracing::warn!(%error, card = index, "the guest is not announced");
            }
        }
        true
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn send<E: std::fmt::Display>(
    frames: &[Vec<u8>],
    by: impl Fn(&[u8]) -> Result<(), E>,
) -> Result<(), String> {
    frames
        .iter()
        .try_for_each(|frame| by(frame))
        .map_err(|error| error.to_string())
}

/// Announces all cards of a guest that runs here since just now, with the addresses that are known of each.
pub fn announce(
    voice: &Voice,
    machine: &Machine,
    spec: &VmSpec,
    known: &[Vec<IpAddr>],
    bridges: &BTreeMap<PortGroup, String>,
) {
    if spec.nics.is_empty() {
        return;
    }
    let card = |index: usize| {
        let addresses = known.get(index).map_or(&[][..], Vec::as_slice);
        let nic = spec.nics.get(index);
        Card {
            frames: spec
                .mac(index)
                .map_or_else(Vec::new, |mac| announcement(mac, addresses)),
            bridge: nic.and_then(|nic| bridges.get(&nic.port_group).cloned()),
        }
    };
    let cards: Vec<Card> = (0..spec.nics.len()).map(card).collect();
    voice.open();
    let (voice, began) = (voice.clone(), Instant::now());
    let rounds = move || {
        for at in ROUNDS_MS.map(Duration::from_millis) {
            std::thread::sleep(at.saturating_sub(began.elapsed()));
            if !voice.speak(&cards) {
                return;
            }
        }
    };
    let started = std::thread::Builder::new()
        .name("announce".into())
        .spawn(rounds);
    if let Err(error) = started {
        tracing::warn!(%error, "the guest is announced by QEMU alone");
    }
    let deadline = Instant::now() + Duration::from_secs(2);
    if let Err(error) = machine.announce_self(deadline) {
        tracing::warn!(%error, "QEMU does not announce the guest");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::announce::rarp;
    use crate::tap::TapError;

    fn ip(arguments: &str) {
        let status = std::process::Command::new("ip")
            .args(arguments.split(' '))
            .status();
        assert!(status.expect("ip").success(), "ip {arguments}");
    }

    /// Waits until a bridge passes on what it gets for a port: the kernel sees to that some time after the port is up.
    fn forwards(port: &str) {
        let until = Instant::now() + Duration::from_secs(10);
        loop {
            let shown = std::process::Command::new("ip")
                .args(["-d", "link", "show", port])
                .output();
            if String::from_utf8_lossy(&shown.expect("ip").stdout).contains("state forwarding") {
                return;
            }
            assert!(Instant::now() < until, "{port} forwards nothing");
        }
    }

    /// Waits until the next QEMU can have the tap: a child that a test beside this one has just forked holds a copy of
    /// its descriptor until its exec.
    fn free(tap: &str) {
        let until = Instant::now() + Duration::from_secs(60);
        while let Err(error) = Tap::create(tap, "vmnet") {
            let held = matches!(error, TapError::InUse { .. });
            assert!(held && Instant::now() < until, "{error}");
        }
    }

    /// In a network namespace of the test's own, on a bridge with the guest's tap.
    #[test]
    fn nothing_is_said_before_the_guest_runs_nor_after_it_stops() {
        let run = || {
            // SAFETY: moves this thread, which ends with the test, into a namespace of its own.
            if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
                return println!("skipped: network namespaces need root");
            }
            ip("link add vmnet type bridge");
            ip("link set vmnet up");
            let mac = [0x52, 0x54, 0, 1, 2, 3];
            let addresses = ["192.0.2.7", "2001:db8::7"].map(|text| text.parse().expect("one"));
            let voice = Voice::new(vec![Tap::create("gwtap0", "vmnet").expect("a tap")]);
            let cards = [Card {
                frames: announcement(mac, &addresses),
                bridge: Some("vmnet".into()),
            }];
            let hearers = [0x8035, 0x0806, 0x86dd]
                .map(|kind| PacketSocket::open("vmnet", kind).expect("the bridge"));
            let now = || hearers.each_ref().map(|h| h.receive(Instant::now()));
            assert!(!voice.speak(&cards), "the guest does not run here");
            assert!(now().iter().all(|heard| matches!(heard, Ok(None))));
            voice.open();
            assert!(voice.speak(&cards));
            let soon = Instant::now() + Duration::from_secs(60);
            for (hearer, frame) in hearers.iter().zip(&cards[0].frames) {
                let heard = hearer.receive(soon).expect("received");
                assert_eq!(heard.as_ref(), Some(frame));
            }
            voice.silence();
            assert!(!voice.speak(&cards), "it may run elsewhere");
            assert!(now().iter().all(|heard| matches!(heard, Ok(None))));
            free("gwtap0");
            // A process that took QEMU over has no tap: it speaks on the bridge.
            let successor = Voice::default();
            successor.open();
            ip("link add veth-a type veth peer name veth-b");
            ip("link set veth-a master vmnet up");
            ip("link set veth-b up");
            forwards("veth-a");
            let outside = PacketSocket::open("veth-b", 0x8035).expect("another host");
            assert!(successor.speak(&cards));
            assert_eq!(outside.receive(soon).expect("received"), Some(rarp(mac)));
        };
        std::thread::spawn(run).join().expect("the test's thread");
    }
}
