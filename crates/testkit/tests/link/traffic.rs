//! What a link does to the packets that it carries: their time, their rate, their loss and their order.

use super::*;

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
