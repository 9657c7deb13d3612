//! Taps and frames in a network namespace of the test's own.

use super::*;
use crate::announce::{self, PROBE_ETHERTYPE, parse_probe, probe};
use crate::packet::PacketSocket;
use std::process::Command;
use std::time::{Duration, Instant};

/// Runs `test` in a thread with a fresh network namespace, or says why it cannot.
fn in_own_network(test: impl FnOnce() + Send + 'static) {
    let run = move || {
        // SAFETY: moves this thread, which ends with the test, into a namespace of its own; nothing else depends on it.
        if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
            println!(
                "skipped: network namespaces need root ({})",
                io::Error::last_os_error()
            );
            return;
        }
        test();
    };
    std::thread::spawn(run).join().expect("the test's thread");
}

fn ip(arguments: &str) {
    let output = Command::new("ip")
        .args(arguments.split(' '))
        .output()
        .expect("ip");
    assert!(
        output.status.success(),
        "ip {arguments}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
fn a_missing_bridge_is_named_with_its_remedy() {
    in_own_network(|| {
        let error = Tap::create("gwtap0", "vmnet")
            .expect_err("no bridge")
            .to_string();
        let want = "bridge 'vmnet' does not exist on this host: create it (ip link add vmnet type bridge && ip link set vmnet up) or change the port group";
        assert_eq!(error, want);
        let error = Tap::create("gwtap0", "lo")
            .expect_err("no bridge")
            .to_string();
        assert_eq!(
            error,
            "network interface 'lo' is not a bridge: change the port group"
        );
        assert!(index_of("gwtap0").is_err(), "nothing is left behind");
    });
}

#[test]
fn names_that_the_kernel_would_expand_or_cut_are_refused() {
    for name in ["", "tap%d", "a/b", "..", "sixteen-bytes-ab", "a b"] {
        assert!(
            matches!(check_name(name), Err(TapError::Name { .. })),
            "{name}"
        );
    }
    assert!(check_name("fifteen-bytes-a").is_ok());
}

#[test]
fn a_tap_hangs_on_its_bridge_and_goes_with_its_descriptor() {
    in_own_network(|| {
        ip("link add vmnet type bridge");
        ip("link set vmnet mtu 1400 up");
        let tap = Tap::create("gwtap0", "vmnet").expect("a tap");
        let shown = Command::new("ip")
            .args(["-d", "link", "show", tap.name()])
            .output()
            .expect("ip")
            .stdout;
        let shown = String::from_utf8_lossy(&shown).into_owned();
        for want in [
            "mtu 1400",
            "master vmnet",
            "link/ether fe:67:",
            "vnet_hdr on",
            "persist off",
            ",UP",
        ] {
            assert!(shown.contains(want), "{want} is not in {shown}");
        }
        assert!(matches!(
            Tap::create("gwtap0", "vmnet"),
            Err(TapError::InUse { .. })
        ));
        drop(tap);
        // A child that a test beside this one has just forked holds a copy of the descriptor until its exec.
        let deadline = Instant::now() + Duration::from_secs(60);
        while index_of("gwtap0").is_ok() {
            assert!(Instant::now() < deadline, "it outlives its descriptor");
            std::thread::yield_now();
        }
    });
}

#[test]
fn a_probe_passes_from_bridge_to_bridge() {
    in_own_network(|| {
        ip("link add pga type bridge");
        ip("link add pgb type bridge");
        ip("link add veth-a type veth peer name veth-b");
        ip("link set veth-a master pga up");
        ip("link set veth-b master pgb up");
        ip("link set pga up");
        ip("link set pgb up");
        let sender = PacketSocket::open("pga", PROBE_ETHERTYPE).expect("sender");
        let receiver = PacketSocket::open("pgb", PROBE_ETHERTYPE).expect("receiver");
        // Bridges drop frames until their ports forward, so a probe is repeated until it is heard.
        let deadline = Instant::now() + Duration::from_secs(10);
        let heard = std::iter::from_fn(|| {
            sender
                .send(&probe([2, 0, 0, 0, 0, 1], [9; 16]))
                .expect("sent");
            let soon = Instant::now() + Duration::from_millis(50);
            (Instant::now() < deadline).then(|| receiver.receive(soon).expect("received"))
        });
        let frame = heard.flatten().next().expect("heard in time");
        assert_eq!(parse_probe(&frame), Some([9; 16]));
        let unheard = PacketSocket::open("pgb", PROBE_ETHERTYPE).expect("another receiver");
        assert_eq!(unheard.receive(Instant::now()).expect("nothing yet"), None);
    });
}

#[test]
fn what_a_card_says_of_itself_enters_by_its_port_and_is_heard() {
    in_own_network(|| {
        ip("link add vmnet type bridge");
        ip("link set vmnet up");
        let tap = Tap::create("gwtap0", "vmnet").expect("a tap");
        let mac = [0x52, 0x54, 0, 1, 2, 3];
        let claims = PacketSocket::open_for_claims(tap.name(), mac).expect("the guest's port");
        let bridge = PacketSocket::open("vmnet", 0x0806).expect("the bridge");
        let address: std::net::Ipv4Addr = "192.0.2.7".parse().expect("address");
        let frames = announce::announcement(
            mac,
            &[address.into(), "2001:db8::7".parse().expect("address")],
        );
        let others = announce::gratuitous_arp([0x52, 0x54, 0, 9, 9, 9], address);
        bridge.send(&frames[1]).expect("from the host to the guest");
        tap.send(&others).expect("another sender");
        for frame in &frames {
            tap.send(frame).expect("sent");
        }
        let deadline = Instant::now() + Duration::from_secs(10);
        let heard = || {
            claims
                .receive(deadline)
                .expect("received")
                .expect("in time")
        };
        assert_eq!(heard(), frames[1], "neither the other sender's, nor RARP");
        assert_eq!(heard(), frames[2]);
        assert_eq!(claims.receive(Instant::now()).expect("no more"), None);
        let seen = || {
            bridge
                .receive(deadline)
                .expect("received")
                .expect("in time")
        };
        while seen() != frames[1] {}
    });
}
