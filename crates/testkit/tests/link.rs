//! Emulated links between real kernels. The model is judged exactly by its own tests; here is judged what holds on a busy
//! machine, and what was measured is printed (`--nocapture`).

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use godwit_testkit::lab::{EmulatedLink, Lab, LabConfig, Link as LabLink, Machine, Subnets};
use godwit_testkit::link::{Counters, Direction, End, Link, LinkSpec};

fn spec(text: &str) -> LinkSpec {
    text.parse().expect("a link")
}

/// A packet that does not come within this is lost, however busy the machine is.
const LONG: Duration = Duration::from_secs(60);
/// Silence that is expected lasts so long.
const SILENCE: Duration = Duration::from_secs(1);

fn lab(name: &str, link: &str, change: impl FnOnce(&mut LabConfig)) -> Lab {
    let mut config = LabConfig {
        name: format!("link-{name}-{}", std::process::id()),
        link: Some(spec(link)),
        ..LabConfig::default()
    };
    change(&mut config);
    let lab = Lab::new(config).expect("the lab is built");
    for nic in 0..lab.config().migration_nics {
        let (four, six) = lab.migration_addresses(1, nic);
        for address in [four, six] {
            await_answer(&lab, address);
        }
    }
    lab
}

/// The addresses of `b`'s first migration device.
fn of_b(lab: &Lab) -> [IpAddr; 2] {
    let addresses = lab.addresses(1);
    [addresses.migration4, addresses.migration6]
}

fn option(socket: &impl AsRawFd, level: i32, name: i32, value: &[u8]) {
    // SAFETY: the value is valid for its length, the socket is open.
    let result = unsafe {
        let length = value.len() as libc::socklen_t;
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            name,
            value.as_ptr().cast(),
            length,
        )
    };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
}

/// A UDP socket on a host, large enough that its kernel drops nothing.
fn udp(machine: &Machine, address: IpAddr) -> UdpSocket {
    let bind = || UdpSocket::bind(SocketAddr::new(address, 0));
    let socket = machine
        .in_network(bind)
        .expect("its network")
        .expect("bind");
    for name in [libc::SO_RCVBUFFORCE, libc::SO_SNDBUFFORCE] {
        option(
            &socket,
            libc::SOL_SOCKET,
            name,
            &(64_i32 << 20).to_ne_bytes(),
        );
    }
    socket.set_read_timeout(Some(LONG)).expect("a time-out");
    socket
}

/// Sockets of `a` and `b` that talk to each other, on the devices of the same number.
fn udp_pair(lab: &Lab, address: IpAddr) -> (UdpSocket, UdpSocket) {
    let is_its = |(four, six)| four == address || six == address;
    let nic = (0..lab.config().migration_nics)
        .find(|nic| is_its(lab.migration_addresses(1, *nic)))
        .expect("an address of b");
    let (four, six) = lab.migration_addresses(0, nic);
    let from = if address.is_ipv4() { four } else { six };
    let a = udp(lab.host(0).expect("a"), from);
    let b = udp(lab.host(1).expect("b"), address);
    a.connect(b.local_addr().expect("bound")).expect("connect");
    b.connect(a.local_addr().expect("bound")).expect("connect");
    (a, b)
}

/// Sends back what comes, until it is over.
fn echo(socket: &UdpSocket, is_over: &AtomicBool) {
    let look = Some(Duration::from_millis(20)); // how often it looks whether it is over
    socket.set_read_timeout(look).expect("a time-out");
    let mut buffer = [0; 2048];
    while !is_over.load(Ordering::Relaxed) {
        if let Ok(length) = socket.recv(&mut buffer) {
            let _ = socket.send(&buffer[..length]); // refused when the other socket is gone
        }
    }
}

/// The round trips that were measured, in order of length.
fn round_trips(lab: &Lab, address: IpAddr, count: u64, apart: Duration) -> Vec<Duration> {
    round_trips_within(lab, address, count, apart, LONG)
}

/// The same; nobody answers any more when nothing comes for so long.
fn round_trips_within(
    lab: &Lab,
    address: IpAddr,
    count: u64,
    apart: Duration,
    silence: Duration,
) -> Vec<Duration> {
    let (a, b) = udp_pair(lab, address);
    a.set_read_timeout(Some(silence)).expect("a time-out");
    let start = Instant::now();
    let (mut found, is_over) = (Vec::new(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| echo(&b, &is_over));
        scope.spawn(|| {
            for _ in 0..count {
                let sent = start.elapsed().as_nanos() as u64;
                a.send(&sent.to_ne_bytes()).expect("send");
                std::thread::sleep(apart); // the pace of the pings, not a wait for something
            }
        });
        let mut stamp = [0; 8];
        while found.len() < count as usize && a.recv(&mut stamp).is_ok() {
            let sent = Duration::from_nanos(u64::from_ne_bytes(stamp));
            found.push(start.elapsed() - sent);
        }
        is_over.store(true, Ordering::Relaxed);
    });
    found.sort();
    found
}

/// The least round trip is the one that was set, or less than 10 ms more. A busy machine delays many in a row, so that
/// pings are sent until one was not delayed; one that is early is wrong whenever it comes.
fn assert_least(lab: &Lab, address: IpAddr, set: Duration) {
    let deadline = Instant::now() + LONG;
    loop {
        let found = round_trips(lab, address, 50, Duration::from_millis(1));
        let least = *found.first().expect("an answer");
        assert!(least >= set, "early: {least:?} instead of {set:?}");
        if least < set + Duration::from_millis(10) {
            return;
        }
        assert!(Instant::now() < deadline, "late: {least:?}, not {set:?}");
    }
}

fn answers(lab: &Lab, address: IpAddr) -> bool {
    !round_trips_within(lab, address, 3, Duration::from_millis(1), SILENCE).is_empty()
}

/// Asks until there is an answer to any of it: kernels take their time to notice that a new device has a carrier.
fn await_answer(lab: &Lab, address: IpAddr) {
    let (a, b) = udp_pair(lab, address);
    let pace = Some(Duration::from_millis(100));
    a.set_read_timeout(pace).expect("a time-out");
    let (deadline, is_over) = (Instant::now() + LONG, AtomicBool::new(false));
    let answered = std::thread::scope(|scope| {
        scope.spawn(|| echo(&b, &is_over));
        let mut answered = false;
        while !answered && Instant::now() < deadline {
            let _ = a.send(b"there?"); // refused while there is no way
            answered = a.recv(&mut [0; 8]).is_ok();
        }
        is_over.store(true, Ordering::Relaxed);
        answered
    });
    assert!(answered, "no way to {address}");
}

/// Waits for answers, which must come.
fn assert_answers(lab: &Lab, address: IpAddr) {
    let found = round_trips(lab, address, 3, Duration::from_millis(1));
    assert!(!found.is_empty(), "{address} does not answer");
}

#[test]
fn the_round_trip_is_within_a_millisecond_of_the_set_one() {
    let lab = lab("rtt", "rtt=10ms", |_| ());
    let link = lab.link(0).expect("a link");
    for rtt_us in [500, 5_000, 50_000, 150_000] {
        link.set(spec(&format!("rtt={rtt_us}us"))).expect("set");
        for address in of_b(&lab) {
            let found = round_trips(&lab, address, 200, Duration::from_millis(2));
            assert_eq!(found.len(), 200);
            let (least, middle) = (found[0], found[found.len() / 2]);
            println!("round trip {rtt_us} us to {address}: least {least:?}, median {middle:?}");
            let set = Duration::from_micros(rtt_us);
            assert!(least >= set, "a packet was early");
            // Within 1 ms on a machine with a core to spare; printed above.
            assert_least(&lab, address, set);
        }
    }
}

/// A stream from `a` to `b` that is sent while `during` runs; gives its answer and the bytes that arrived.
fn stream<T: Send>(lab: &Lab, address: IpAddr, during: impl FnOnce() -> T + Send) -> (T, u64) {
    let b = lab.host(1).expect("b");
    let listen = || TcpListener::bind(SocketAddr::new(address, 0));
    let listener = b.in_network(listen).expect("its network").expect("bind");
    let to = listener.local_addr().expect("bound");
    let a = lab.host(0).expect("a");
    let connect = || TcpStream::connect_timeout(&to, LONG);
    let mut sender = a
        .in_network(connect)
        .expect("its network")
        .expect("connect");
    option(&sender, libc::IPPROTO_TCP, libc::TCP_CONGESTION, b"cubic");
    let (mut receiver, _) = listener.accept().expect("accept");
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let received = scope.spawn(move || check_stream(&mut receiver));
        scope.spawn(|| send_stream(&mut sender, &is_over));
        let answer = during();
        is_over.store(true, Ordering::Relaxed);
        (answer, received.join().expect("the stream is intact"))
    })
}

/// What the stream holds: a byte that tells its place, with a period that no packet size divides.
const PERIOD: usize = 65_521;

fn pattern() -> Vec<u8> {
    (0..4 * PERIOD)
        .map(|at| (at % PERIOD % 253) as u8)
        .collect()
}

fn send_stream(sender: &mut TcpStream, is_over: &AtomicBool) {
    let pattern = pattern();
    while !is_over.load(Ordering::Relaxed) {
        sender.write_all(&pattern).expect("send");
    }
    sender.shutdown(std::net::Shutdown::Write).expect("end");
}

fn check_stream(receiver: &mut TcpStream) -> u64 {
    let (pattern, mut buffer, mut total) = (pattern(), vec![0; 2 * PERIOD], 0);
    loop {
        let length = receiver.read(&mut buffer).expect("receive");
        let at = total as usize % PERIOD;
        assert!(
            buffer[..length] == pattern[at..at + length],
            "at byte {total}"
        );
        total += length as u64;
        if length == 0 {
            return total;
        }
    }
}

/// The rate between two readings, by the times at which packets left.
fn rate(before: &Counters, after: &Counters) -> f64 {
    let bytes = after.a_to_b.sent_wire_bytes - before.a_to_b.sent_wire_bytes;
    let ns = after.a_to_b.last_departure_ns - before.a_to_b.last_departure_ns;
    bytes as f64 * 8e9 / ns.max(1) as f64
}

/// Readings 50 ms apart, at least `count`, and more until they are enough: a busy machine keeps a stream waiting for long.
fn readings_until(
    link: &EmulatedLink,
    count: usize,
    enough: impl Fn(&[Counters]) -> bool,
) -> Vec<Counters> {
    let deadline = Instant::now() + LONG;
    let mut found = Vec::new();
    while found.len() < count || (!enough(&found) && Instant::now() < deadline) {
        std::thread::sleep(Duration::from_millis(50)); // the length of a window of the measurement
        found.push(link.counters().expect("counters"));
    }
    found
}

/// The highest rate between two readings that follow each other.
fn best_rate(readings: &[Counters]) -> f64 {
    let rates = readings.windows(2).map(|pair| rate(&pair[0], &pair[1]));
    rates.fold(0.0, f64::max)
}

#[test]
fn a_stream_gets_the_set_rate_and_never_more() {
    let lab = lab("rate", "", |_| ());
    let link = lab.link(0).expect("a link");
    for (text, set) in [("100mbit", 100e6), ("1gbit", 1e9)] {
        link.set(spec(&format!("rtt=1ms,rate={text},queue=200ms")))
            .expect("set");
        // Faster links are filled only while sender, relay and receiver have cores to run on.
        let wanted = if set < 5e8 { set * 0.97 } else { 0.0 };
        for address in of_b(&lab) {
            let is_full = |found: &[Counters]| best_rate(found) > wanted;
            let (found, bytes) = stream(&lab, address, || readings_until(link, 40, is_full));
            let best = best_rate(&found);
            let (first, last) = (&found[10], &found[found.len() - 1]);
            let (cpu_ns, ns) = (
                (last.cpu_ns - first.cpu_ns) as f64,
                (last.taken_at_ns - first.taken_at_ns) as f64,
            );
            println!(
                "rate {text} to {address}: {:.4} of it over {:.1} s, best 50 ms {:.4}, {bytes} bytes arrived, {:.3} cores",
                rate(first, last) / set,
                ns / 1e9,
                best / set,
                cpu_ns / ns
            );
            // A packet more or less at the edges of a window of 50 ms.
            assert!(best < set * 1.003, "{best}");
            assert!(best > wanted, "{best}");
        }
    }
}

#[test]
fn lost_packets_are_counted_and_as_many_as_set() {
    let lab = lab("loss", "", |_| ());
    let link = lab.link(0).expect("a link");
    for address in of_b(&lab) {
        link.set(spec("loss=2%,rtt=1ms")).expect("set");
        let before = link.counters().expect("counters").a_to_b;
        let received = numbered_flow(&lab, address, 20_000, 100);
        let after = link.counters().expect("counters").a_to_b;
        let lost = after.dropped_loss_packets - before.dropped_loss_packets;
        println!(
            "loss 2 % to {address}: {lost} of 20000 lost, {} arrived",
            received.len()
        );
        // Five standard deviations; neighbour discovery sends a few packets of its own.
        assert!((300..500).contains(&lost));
        assert!((20_000 - received.len() as u64).abs_diff(lost) <= 20);
        assert_eq!(
            after.dropped_queue_packets + after.dropped_memory_packets,
            0
        );
        link.set(spec("")).expect("set");
    }
}

/// Numbered packets from `a` to `b`; gives the numbers in the order in which they arrived.
fn numbered_flow(lab: &Lab, address: IpAddr, count: u32, bytes: usize) -> Vec<u32> {
    let (a, b) = udp_pair(lab, address);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut packet = vec![0; bytes];
            for number in 0..count {
                packet[..4].copy_from_slice(&number.to_ne_bytes());
                a.send(&packet).expect("send");
                if number % 50 == 49 {
                    std::thread::sleep(Duration::from_micros(500)); // the pace of the flow
                }
            }
        });
        let (mut packet, mut numbers) = ([0; 2048], Vec::new());
        while numbers.last() != Some(&(count - 1)) {
            match b.recv(&mut packet) {
                Ok(_) => numbers.push(u32::from_ne_bytes([
                    packet[0], packet[1], packet[2], packet[3],
                ])),
                Err(_) => break, // nothing for so long: the last one was dropped
            }
        }
        numbers
    })
}

#[test]
fn a_stream_over_a_losing_link_arrives_intact() {
    let lab = lab("lossy", "rtt=2ms,rate=500mbit,loss=1%", |_| ());
    let link = lab.link(0).expect("a link");
    for address in of_b(&lab) {
        let before = link.counters().expect("counters").a_to_b.delivered_bytes;
        let is_enough = |found: &[Counters]| {
            let delivered = found
                .last()
                .map(|last| last.a_to_b.delivered_bytes - before);
            delivered.is_some_and(|bytes| bytes > 2 << 20)
        };
        let (_, bytes) = stream(&lab, address, || readings_until(link, 30, is_enough));
        assert!(bytes > 1 << 20, "{bytes}");
        println!("loss 1 % to {address}: {bytes} bytes arrived");
    }
    let statistics = run(lab.host(1).expect("b"), "cat /proc/net/snmp");
    for name in ["InErrs", "InCsumErrors"] {
        assert_eq!(statistic(&statistics, name), 0, "{name}");
    }
    let counters = link.counters().expect("counters").a_to_b;
    assert!(counters.dropped_loss_packets > 0);
    assert_eq!(counters.dropped_error_packets, 0);
}

/// A figure of the kernel's about TCP: a line of names, then one of figures.
fn statistic(statistics: &str, name: &str) -> u64 {
    let mut lines = statistics.lines().filter(|line| line.starts_with("Tcp:"));
    let (names, figures) = (lines.next().expect("names"), lines.next().expect("figures"));
    let mut pairs = names.split_whitespace().zip(figures.split_whitespace());
    let (_, figure) = pairs.find(|(other, _)| *other == name).expect(name);
    figure.parse().expect("a figure")
}

fn run(machine: &Machine, script: &str) -> String {
    let output = machine
        .command("sh")
        .args(["-c", script])
        .output()
        .expect("sh runs");
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

#[test]
fn a_full_queue_drops_the_rest_of_a_burst() {
    let lab = lab("queue", "", |_| ());
    let link = lab.link(0).expect("a link");
    for address in of_b(&lab) {
        assert_answers(&lab, address);
        link.set(spec("rate=2mbit,queue=20kb")).expect("set");
        let before = link.counters().expect("counters").a_to_b;
        let (a, b) = udp_pair(&lab, address);
        for _ in 0..200 {
            a.send(&[7; 958]).expect("send"); // 1,000 bytes and a little more as a frame
        }
        let dropped = || {
            let now = link
                .counters()
                .expect("counters")
                .a_to_b
                .dropped_queue_packets;
            now - before.dropped_queue_packets
        };
        let mut received = 0;
        while received + dropped() < 200 {
            b.recv(&mut [0; 2048])
                .expect("what was not dropped arrives");
            received += 1;
        }
        let (after, dropped) = (link.counters().expect("counters").a_to_b, dropped());
        println!("queue of 20 kB to {address}: {received} of 200 arrived, {dropped} dropped");
        // Neighbour discovery sends a few packets of its own.
        assert!(received + dropped <= 205);
        assert!(received >= 15 && dropped > 0);
        assert!(after.queue_peak_bytes <= 20_000);
        link.set(spec("")).expect("set");
    }
}

#[test]
fn jitter_keeps_the_order_unless_asked_for() {
    let lab = lab("jitter", "rtt=2ms,jitter=3ms", |_| ());
    let link = lab.link(0).expect("a link");
    for address in of_b(&lab) {
        assert_answers(&lab, address);
        let numbers = numbered_flow(&lab, address, 5_000, 1_000);
        assert_eq!(numbers.len(), 5_000);
        assert!(numbers.is_sorted());
    }
    link.set(spec("rtt=2ms,jitter=3ms,reorder")).expect("set");
    let numbers = numbered_flow(&lab, of_b(&lab)[0], 5_000, 1_000);
    assert!(!numbers.is_sorted());
}

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

/// Lets a child that waits go on, whatever becomes of the test: it holds a copy of the pipe itself.
struct GoOn(std::io::PipeWriter);

impl Drop for GoOn {
    fn drop(&mut self) {
        let _ = self.0.write_all(b"!"); // nobody reads when the fork has failed
    }
}

/// A child of another thread, between its fork and its exec, holds a copy of the device's descriptor; so did children of
/// tests beside this one, and the device outlived its link.
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
