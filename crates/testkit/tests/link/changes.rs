//! Links that are cut, changed, joined and ended.

use super::*;

#[test]
fn a_cut_link_is_silent_at_both_ends_and_heals() {
    let lab = lab("cut", "rtt=1ms", |_| ());
    let link = lab.link(0).expect("a link");
    for address in of_b(&lab) {
        assert_answers(&lab, address);
        link.cut().expect("cut");
        assert!(!answers(&lab, address));
        for host in [0, 1] {
            let carrier = run(
                lab.host(host).expect("a host"),
                "cat /sys/class/net/mig0/carrier",
            );
            assert_eq!(carrier, "1", "it is cut far away");
        }
        let counters = link.counters().expect("counters");
        assert!(counters.a_to_b.dropped_cut_packets > 0);
        link.heal().expect("heal");
        assert_answers(&lab, address);
    }
}

#[test]
fn directions_can_differ() {
    let lab = lab("directions", "", |_| ());
    let link = lab.link(0).expect("a link");
    link.set_direction(Direction::BToA, spec("rtt=40ms"))
        .expect("set");
    assert_eq!(link.spec(Direction::AToB).expect("spec"), spec(""));
    // Half of 40 ms, one way.
    assert_least(&lab, of_b(&lab)[0], Duration::from_millis(20));
}

/// Bytes that each link carried while packets went from each of `a`'s devices to the one of the same number of `b`.
fn carried_by_each(lab: &Lab, of_family: fn((IpAddr, IpAddr)) -> IpAddr) {
    for nic in 0..4 {
        let read = || -> Vec<u64> {
            let bytes =
                |link: &EmulatedLink| link.counters().expect("counters").a_to_b.delivered_bytes;
            lab.links().iter().map(bytes).collect()
        };
        let a = udp(
            lab.host(0).expect("a"),
            of_family(lab.migration_addresses(0, nic)),
        );
        let b = udp(
            lab.host(1).expect("b"),
            of_family(lab.migration_addresses(1, nic)),
        );
        a.connect(b.local_addr().expect("bound")).expect("connect");
        a.send(&[0; 100]).expect("send");
        b.recv(&mut [0; 2048]).expect("the neighbour is found");
        let before = read();
        for _ in 0..50 {
            a.send(&[0; 1000]).expect("send");
            b.recv(&mut [0; 2048]).expect("it arrives");
        }
        let carried: Vec<u64> = read()
            .iter()
            .zip(before)
            .map(|(after, before)| after - before)
            .collect();
        for (other, bytes) in carried.iter().enumerate() {
            let is_this = other == usize::from(nic);
            assert_eq!(*bytes >= 50_000, is_this, "device {nic}: {carried:?}");
            assert!(is_this || *bytes < 5_000, "device {nic}: {carried:?}");
        }
    }
}

#[test]
fn each_of_four_devices_sends_through_its_own_link_on_one_subnet_and_on_different_ones() {
    for subnets in [Subnets::One, Subnets::Each] {
        let lab = lab("nics", "rtt=1ms", |config| {
            (config.migration_nics, config.migration_subnets) = (4, subnets);
        });
        carried_by_each(&lab, |(four, _)| four);
        carried_by_each(&lab, |(_, six)| six);
        lab.cut_link("b", LabLink::Migration).expect("cut");
        let carriers = run(lab.host(1).expect("b"), "cat /sys/class/net/mig?/carrier");
        assert_eq!(carriers, "0\n0\n0\n0");
    }
}

#[test]
fn a_routed_lab_has_its_link_between_the_router_and_b() {
    let lab = lab("routed", "rtt=20ms", |config| config.routed = true);
    for address in of_b(&lab) {
        assert_least(&lab, address, Duration::from_millis(20));
    }
    let counters = lab.link(0).expect("a link").counters().expect("counters");
    assert!(counters.a_to_b.delivered_packets >= 100 && counters.b_to_a.delivered_packets >= 100);
}

#[test]
fn the_link_of_a_kept_lab_is_changed_by_others_and_ends_with_it() {
    let mut first = lab("kept", "rtt=5ms,rate=1gbit", |config| config.keep = true);
    let opened = Lab::open(&first.config().name).expect("open");
    let link = opened.link(0).expect("a link");
    assert_eq!(
        link.spec(Direction::AToB).expect("spec"),
        spec("rtt=5ms,rate=1gbit")
    );
    link.set(spec("rtt=30ms")).expect("set");
    assert_least(&opened, of_b(&opened)[1], Duration::from_millis(30));
    assert!(link.counters().expect("counters").b_to_a.delivered_packets >= 50);
    let senseless = LinkSpec {
        loss_ppm: 2_000_000,
        ..LinkSpec::default()
    };
    let refused = link.set(senseless).expect_err("refused").to_string();
    assert!(refused.contains("at most 100%"), "{refused}");
    link.cut().expect("cut");
    assert!(!answers(&opened, of_b(&opened)[0]));
    link.heal().expect("heal");
    first.end().expect("end");
    assert!(link.counters().is_err(), "it has ended with the lab");
}

#[test]
fn a_link_joins_any_two_namespaces_and_its_devices_end_with_it() {
    let lab = Lab::new(LabConfig::default()).expect("a lab");
    let (a, b) = (lab.host(0).expect("a"), lab.host(1).expect("b"));
    let end =
        |machine: &Machine, four, six| End::of_process(machine.init_pid(), "wan0", &[four, six]);
    let first = end(a, "10.90.0.1/24", "fd90::1/64").expect("an end");
    let second = end(b, "10.90.0.2/24", "fd90::2/64").expect("an end");
    let link = Link::between(first, second, spec("rtt=4ms")).expect("a link");
    for (from, to) in [("10.90.0.1", "10.90.0.2"), ("fd90::1", "fd90::2")] {
        let (from, to) = (from.parse().expect("address"), to.parse().expect("address"));
        let (one, other) = (udp(a, from), udp(b, to));
        one.connect(other.local_addr().expect("bound"))
            .expect("connect");
        let start = Instant::now();
        one.send(b"there").expect("send");
        other.recv(&mut [0; 64]).expect("it arrives");
        assert!(start.elapsed() >= Duration::from_millis(2));
    }
    let taken = end(a, "10.91.0.1/24", "fd91::1/64").expect("an end");
    let other = end(b, "10.91.0.2/24", "fd91::2/64").expect("an end");
    let again = Link::between(taken, other, spec(""))
        .err()
        .expect("refused");
    assert!(
        again.to_string().contains("cannot make device wan0"),
        "{again}"
    );
    drop(link);
    assert_eq!(run(a, "ls /sys/class/net | grep -c wan0"), "0");
}

/// A child of another thread, between its fork and its exec, holds a copy of the device's descriptor; so did children of
/// tests beside this one, and the device outlived its link.
/// Lets a child that waits go on, whatever becomes of the test: it holds a copy of the pipe itself.
struct GoOn(std::io::PipeWriter);

impl Drop for GoOn {
    fn drop(&mut self) {
        let _ = self.0.write_all(b"!"); // nobody reads when the fork has failed
    }
}

#[test]
fn a_device_ends_with_its_link_while_a_child_is_being_started() {
    let lab = Lab::new(LabConfig::default()).expect("a lab");
    let (a, b) = (lab.host(0).expect("a"), lab.host(1).expect("b"));
    let end = |machine: &Machine| End::of_process(machine.init_pid(), "wan1", &[]);
    let (first, second) = (end(a).expect("an end"), end(b).expect("an end"));
    let link = Link::between(first, second, spec("")).expect("a link");
    let (mut has_forked, mut forked) = std::io::pipe().expect("a pipe");
    let (mut may_exec, exec) = std::io::pipe().expect("a pipe");
    let mut command = std::process::Command::new("true");
    // SAFETY: reads and writes descriptors only; nothing is allocated after the fork.
    unsafe {
        command.pre_exec(move || {
            forked.write_all(b"!")?;
            may_exec.read_exact(&mut [0; 1])
        });
    }
    std::thread::scope(|scope| {
        let child = scope.spawn(move || command.status());
        let go_on = GoOn(exec);
        has_forked.read_exact(&mut [0; 1]).expect("it forks");
        drop(link);
        let left = a.in_network(|| std::fs::read_to_string("/proc/thread-self/net/dev"));
        drop(go_on);
        let status = child.join().expect("a child").expect("it ran");
        assert!(status.success());
        let left = left.expect("its network").expect("a table");
        assert!(!left.contains("wan1"), "{left}");
    });
}
