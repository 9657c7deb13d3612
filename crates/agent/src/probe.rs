//! Probe frames: whether a frame from the source's port group arrives at the destination's.
//!
//! Owns, for each nonce, what has arrived; a nonce is forgotten after a minute. Listening and sending happen on
//! blocking threads with a deadline. Refuses: nonces that are not 32 hex digits, more probes at once than
//! [`PROBES_MAX`].

use crate::config::HostConfig;
use godwit_qemu::announce::{PROBE_ETHERTYPE, parse_probe, probe};
use godwit_qemu::packet::{PacketError, PacketSocket};
use godwit_types::host_api::ProbeResult;
use godwit_types::vm::VmSpec;
use godwit_types::{ApiError, ErrorCode, HostName, PortGroup};
use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// Most nonces listened for at once.
const PROBES_MAX: usize = 64;
/// How long a nonce is listened for.
const LISTEN: Duration = Duration::from_secs(30);
/// How soon a thread that listens sees that nobody waits for it any more.
const LOOK_EACH: Duration = Duration::from_secs(1);
/// How long a result is kept after it was begun.
const KEEP: Duration = Duration::from_secs(60);
/// How long an answer waits for what has not arrived.
const RESULT_WAIT: Duration = Duration::from_secs(2);

type Arrived = BTreeMap<PortGroup, bool>;

struct Probe {
    begun: Instant,
    /// What listens ends with it.
    arrived: Arc<watch::Sender<Arrived>>,
}

/// All probes of this host.
#[derive(Default)]
pub struct Probes(Mutex<BTreeMap<[u8; 16], Probe>>);

fn invalid(message: String) -> ApiError {
    ApiError::new(ErrorCode::InvalidRequest, message)
}

/// Reads a nonce: 32 hex digits.
pub fn parse_nonce(text: &str) -> Result<[u8; 16], ApiError> {
    let wrong = || invalid(format!("'{text}' is not a nonce: it has 32 hex digits"));
    if text.len() != 32 || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Err(wrong());
    }
    let number = u128::from_str_radix(text, 16).map_err(|_| wrong())?;
    Ok(number.to_be_bytes())
}

/// Port groups of a VM and the bridge of each on this host; those without one are left out.
pub fn bridges_of(config: &HostConfig, spec: &VmSpec) -> BTreeMap<PortGroup, String> {
    let groups: BTreeSet<&PortGroup> = spec.nics.iter().map(|nic| &nic.port_group).collect();
    groups
        .into_iter()
        .filter_map(|group| Some((group.clone(), config.port_groups.get(group)?.clone())))
        .collect()
}

impl Probes {
    /// Begins to listen on each bridge; listening has begun when this returns.
    pub fn listen(
        &self,
        nonce: [u8; 16],
        bridges: &BTreeMap<PortGroup, String>,
        host: &HostName,
    ) -> Result<(), ApiError> {
        let arrived: Arrived = bridges.keys().map(|group| (group.clone(), false)).collect();
        let sender = Arc::new(watch::Sender::new(arrived));
        let mut probes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        probes.retain(|_, probe| probe.begun.elapsed() < KEEP);
        if probes.len() >= PROBES_MAX {
            return Err(invalid(
                "too many probes at once: try again in a minute".into(),
            ));
        }
        for (group, bridge) in bridges {
            let socket = PacketSocket::open(bridge, PROBE_ETHERTYPE)
                .map_err(|error| unusable(&error, bridge, host))?;
            let (group, sender) = (group.clone(), Arc::downgrade(&sender));
            tokio::task::spawn_blocking(move || wait_for(&socket, nonce, &group, &sender));
        }
        let begun = Instant::now();
        probes.insert(
            nonce,
            Probe {
                begun,
                arrived: sender,
            },
        );
        Ok(())
    }

    /// What has arrived, waiting a moment for the rest; the probe is over with that.
    pub async fn result(&self, nonce: [u8; 16]) -> Result<ProbeResult, ApiError> {
        let found = {
            let probes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            probes.get(&nonce).map(|probe| probe.arrived.subscribe())
        };
        let unknown = || {
            ApiError::new(
                ErrorCode::NotFound,
                "no such probe is listened for: begin preflight again",
            )
        };
        let mut arrived = found.ok_or_else(unknown)?;
        let all = arrived.wait_for(|arrived| arrived.values().all(|arrived| *arrived));
        let _ = tokio::time::timeout(RESULT_WAIT, all).await;
        let arrived = arrived.borrow().clone();
        // It is asked for once; the next one may have its place.
        let mut probes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        probes.remove(&nonce);
        Ok(ProbeResult { arrived })
    }
}

/// Why no frame passes through a bridge of this host, and what helps.
fn unusable(error: &PacketError, bridge: &str, host: &HostName) -> ApiError {
    let is_down =
        matches!(error, PacketError::Io { source, .. } if source.kind() == ErrorKind::NetworkDown);
    let message = match error {
        PacketError::NoInterface { .. } => format!(
            "bridge '{bridge}' does not exist on host '{host}': make it with 'ip link add {bridge} type bridge && ip link set {bridge} up'"
        ),
        _ if is_down => format!(
            "bridge '{bridge}' is down on host '{host}': bring it up with 'ip link set {bridge} up'"
        ),
        error => format!("host '{host}' {error}"),
    };
    ApiError::new(ErrorCode::MissingBridge, message)
}

fn wait_for(
    socket: &PacketSocket,
    nonce: [u8; 16],
    group: &PortGroup,
    sender: &Weak<watch::Sender<Arrived>>,
) {
    let deadline = Instant::now() + LISTEN;
    while Instant::now() < deadline && sender.strong_count() > 0 {
        let look = deadline.min(Instant::now() + LOOK_EACH);
        let frame = match socket.receive(look) {
            Ok(Some(frame)) => frame,
            Ok(None) => continue,
            Err(_) => return,
        };
        if parse_probe(&frame) == Some(nonce) {
            if let Some(sender) = sender.upgrade() {
                sender.send_modify(|arrived| {
                    arrived.insert(group.clone(), true);
                });
            }
            return;
        }
    }
}

/// Sends one frame from each bridge.
pub fn send(
    nonce: [u8; 16],
    bridges: &BTreeMap<PortGroup, String>,
    host: &HostName,
) -> Result<(), ApiError> {
    // A locally administered address that no guest of ours has.
    let [a, b, c, ..] = nonce;
    let frame = probe([0x02, 0x67, 0x77, a, b, c], nonce);
    for bridge in bridges.values() {
        PacketSocket::open(bridge, PROBE_ETHERTYPE)
            .and_then(|socket| socket.send(&frame))
            .map_err(|error| unusable(&error, bridge, host))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host() -> HostName {
        HostName::new("b").unwrap()
    }

    #[test]
    fn a_bridge_that_is_down_is_said_with_its_host_and_what_helps() {
        let down = PacketError::Io {
            name: "vmbr0".into(),
            source: std::io::Error::from_raw_os_error(libc::ENETDOWN),
        };
        let error = unusable(&down, "vmbr0", &host());
        assert_eq!(
            error.message,
            "bridge 'vmbr0' is down on host 'b': bring it up with 'ip link set vmbr0 up'"
        );
    }

    #[test]
    fn only_32_hex_digits_are_a_nonce() {
        assert_eq!(
            parse_nonce("000102030405060708090a0b0c0d0e0f").unwrap()[15],
            15
        );
        for bad in [
            "",
            "00",
            "+00102030405060708090a0b0c0d0e0f",
            "g00102030405060708090a0b0c0d0e0f",
        ] {
            assert!(parse_nonce(bad).is_err(), "{bad}");
        }
    }

    #[tokio::test]
    async fn a_missing_bridge_is_refused_and_an_unknown_nonce_is_said() {
        let probes = Probes::default();
        let bridges = [(PortGroup::new("vm").unwrap(), "nobridge0".to_string())].into();
        let error = probes.listen([1; 16], &bridges, &host()).unwrap_err();
        assert!(
            error.message.contains("nobridge0") || error.message.contains("permitted"),
            "{error}"
        );
        assert_eq!(
            probes.result([2; 16]).await.unwrap_err().code,
            ErrorCode::NotFound
        );
    }

    #[tokio::test]
    async fn without_port_groups_nothing_is_waited_for() {
        let probes = Probes::default();
        probes.listen([1; 16], &BTreeMap::new(), &host()).unwrap();
        assert!(probes.result([1; 16]).await.unwrap().arrived.is_empty());
    }

    #[tokio::test]
    async fn a_probe_that_was_answered_makes_room_for_others() {
        let probes = Probes::default();
        for number in 0..=u8::try_from(PROBES_MAX).unwrap() {
            probes
                .listen([number; 16], &BTreeMap::new(), &host())
                .unwrap();
            probes.result([number; 16]).await.unwrap();
        }
        for number in 0..u8::try_from(PROBES_MAX).unwrap() {
            probes
                .listen([number; 16], &BTreeMap::new(), &host())
                .unwrap();
        }
        let full = probes.listen([255; 16], &BTreeMap::new(), &host());
        assert!(full.unwrap_err().message.contains("too many probes"));
    }

    #[test]
    fn a_thread_that_listens_for_a_probe_ends_once_nobody_waits_for_it() {
        let socket = match PacketSocket::open("lo", PROBE_ETHERTYPE) {
            Ok(socket) => socket,
            Err(error) => return eprintln!("skipped: no packet socket here: {error}"),
        };
        let begun = Instant::now();
        let sender = Arc::new(watch::Sender::new(Arrived::new()));
        let (group, weak) = (PortGroup::new("vm").unwrap(), Arc::downgrade(&sender));
        drop(sender);
        wait_for(&socket, [7; 16], &group, &weak);
        assert!(begun.elapsed() < LISTEN);
    }
}
