//! The model, judged exactly in simulated time.

use super::super::spec::{FRAME_BYTES_MIN, LinkSpec, WIRE_OVERHEAD_BYTES};
use super::*;

const FULL: u32 = 1514;
const SECOND_NS: u64 = 1_000_000_000;

fn spec(text: &str) -> LinkSpec {
    text.parse().expect("a link")
}

fn model(text: &str) -> Model<u64> {
    Model::new(spec(text), 1)
}

fn train(packets: u16) -> Train {
    Train {
        packets,
        full_bytes: FULL,
        last_bytes: FULL,
    }
}

/// What came out: when, of which train, which packets.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Out {
    at_ns: u64,
    payload: u64,
    run: Range<u16>,
}

/// Hands out all that there is, always at the time that the model asks for.
fn drain(model: &mut Model<u64>) -> Vec<Out> {
    let mut out = Vec::new();
    while let Some(at_ns) = model.next_wake_ns() {
        collect(model, at_ns, &mut out);
    }
    out
}

fn collect(model: &mut Model<u64>, at_ns: u64, out: &mut Vec<Out>) {
    model.deliver_due(at_ns, |&payload, run| {
        out.push(Out {
            at_ns,
            payload,
            run,
        });
        true
    });
}

#[test]
fn a_packet_arrives_after_half_the_round_trip() {
    for rtt_us in [0, 500, 5_000, 50_000, 150_000] {
        let mut model = model(&format!("rtt={rtt_us}us"));
        model.offer(1_000, Train::single(60), 7);
        let out = drain(&mut model);
        assert_eq!(out.len(), 1);
        assert_eq!(out[0].at_ns, 1_000 + rtt_us * 500);
    }
}

#[test]
fn departures_keep_the_rate_to_the_nanosecond_at_any_rate_and_size() {
    for rate in [
        1_000_000_u64,
        100_000_000,
        933_333_333,
        1_000_000_000,
        10_000_000_000,
    ] {
        for bytes in [FRAME_BYTES_MIN, 777, FULL, 9_014] {
            let mut model = model(&format!("rate={rate}bit,queue=1000mb"));
            let packets = 10_000;
            for number in 0..packets {
                model.offer(5, Train::single(bytes), number);
            }
            let wire_bits = u128::from(packets) * u128::from(bytes + WIRE_OVERHEAD_BYTES) * 8;
            let expected = 5 + (wire_bits * u128::from(SECOND_NS) / u128::from(rate)) as u64;
            let counters = model.counters(u64::MAX / 2);
            assert_eq!(counters.last_departure_ns, expected, "{rate} {bytes}");
            assert_eq!(u128::from(counters.sent_wire_bytes) * 8, wire_bits);
        }
    }
}

#[test]
fn a_late_caller_does_not_slow_the_link_down() {
    let mut model = model("rate=1gbit,queue=10mb,rtt=1ms");
    let mut out = Vec::new();
    for number in 0..100 {
        model.offer(0, train(40), number);
    }
    collect(&mut model, SECOND_NS, &mut out);
    let expected = 100 * 40 * u64::from(FULL + WIRE_OVERHEAD_BYTES) * 8;
    assert_eq!(model.counters(SECOND_NS).last_departure_ns, expected);
    assert_eq!(out.len(), 100, "what is due at once is handed out together");
}

#[test]
fn a_large_packet_fares_as_the_packets_that_it_stands_for() {
    for text in [
        "rate=1gbit,queue=20kb,rtt=2ms",
        "rate=100mbit,loss=3%,queue=1mb",
        "loss=10%,rtt=1ms",
    ] {
        let (mut large, mut small) = (model(text), model(text));
        let mut random = Random::new(11, 1);
        let mut now_ns = 0;
        for number in 0..200 {
            now_ns += random.below(800_000);
            let packets = 1 + random.below(44) as u16;
            large.offer(now_ns, train(packets), number);
            for _ in 0..packets {
                small.offer(now_ns, Train::single(FULL), number);
            }
        }
        let later = now_ns + 10 * SECOND_NS;
        let (mut of_large, mut of_small) = (large.counters(later), small.counters(later));
        (of_large.held_packets, of_small.held_packets) = (0, 0);
        assert_eq!(of_large, of_small, "{text}");
        assert!(of_large.dropped_queue_packets + of_large.dropped_loss_packets > 0);
        let packets = |out: Vec<Out>| out.iter().map(|out| out.run.len()).sum::<usize>();
        assert_eq!(packets(drain(&mut large)), packets(drain(&mut small)));
    }
}

#[test]
fn the_queue_drops_at_its_tail_what_exceeds_it_and_nothing_else() {
    let mut model = model("rate=1gbit,queue=15140b");
    model.offer(0, train(44), 1);
    let counters = model.counters(0);
    assert_eq!(
        (counters.dropped_queue_packets, counters.queue_bytes),
        (34, 15_140)
    );
    // After the time of one packet there is room for one.
    let packet_ns = u64::from(FULL + WIRE_OVERHEAD_BYTES) * 8;
    model.offer(packet_ns - 1, train(1), 2);
    assert_eq!(model.counters(packet_ns - 1).dropped_queue_packets, 35);
    model.offer(packet_ns, train(2), 3);
    let counters = model.counters(packet_ns);
    assert_eq!(
        (counters.dropped_queue_packets, counters.queue_peak_bytes),
        (36, 15_140)
    );
    let out = drain(&mut model);
    let runs: u16 = out.iter().map(|out| out.run.len() as u16).sum();
    assert_eq!(runs, 11);
    assert_eq!(
        out.last().map(|out| (out.payload, out.run.clone())),
        Some((3, 0..1))
    );
}

#[test]
fn a_queue_shorter_than_a_packet_still_passes_one_at_a_time() {
    let mut model = model("rate=1gbit,queue=100b");
    model.offer(0, train(3), 1);
    assert_eq!(model.counters(0).dropped_queue_packets, 2);
    assert_eq!(drain(&mut model).len(), 1);
}

#[test]
fn losses_hit_packets_independently_at_the_set_share() {
    for (loss, seed) in [("0.01%", 1), ("0.1%", 2), ("5%", 3), ("50%", 4)] {
        let text = format!("loss={loss},seed={seed}");
        let mut model = model(&text);
        let trains = 50_000_u64;
        for number in 0..trains {
            model.offer(number, train(40), number);
            drain(&mut model);
        }
        let counters = model.counters(trains);
        let share = f64::from(spec(&text).loss_ppm) / 1e6;
        let sent = (trains * 40) as f64;
        let deviation = (sent * share * (1.0 - share)).sqrt();
        let error = (counters.dropped_loss_packets as f64 - sent * share).abs();
        assert!(error < 5.0 * deviation, "{loss}: {counters:?}");
        assert_eq!(
            counters.delivered_packets + counters.dropped_loss_packets,
            trains * 40
        );
    }
}

#[test]
fn losses_repeat_with_the_seed_and_differ_between_directions_and_seeds() {
    let lost = |seed: u64, stream: u64| {
        let mut model = Model::new(spec(&format!("loss=10%,seed={seed}")), stream);
        for number in 0..1_000 {
            model.offer(0, train(1), number);
        }
        drain(&mut model)
            .iter()
            .map(|out| out.payload)
            .collect::<Vec<_>>()
    };
    assert_eq!(lost(7, 1), lost(7, 1));
    assert_ne!(lost(7, 1), lost(7, 2));
    assert_ne!(lost(7, 1), lost(8, 1));
}

#[test]
fn all_packets_can_be_lost_and_none() {
    for (loss, delivered) in [("100%", 0), ("0%", 4_000)] {
        let mut model = model(&format!("loss={loss}"));
        (0..100).for_each(|number| model.offer(0, train(40), number));
        drain(&mut model);
        assert_eq!(model.counters(0).delivered_packets, delivered);
    }
}

/// The packets of what came out, in order, each with its time.
fn single(out: &[Out]) -> Vec<(u64, u64, u16)> {
    let of = |out: &Out| {
        let (at_ns, payload) = (out.at_ns, out.payload);
        out.run.clone().map(move |index| (at_ns, payload, index))
    };
    out.iter().flat_map(of).collect()
}

/// A busy time on a link: offers at random times and of random sizes, a caller that comes when asked.
fn busy_time(model: &mut Model<u64>, seed: u64, trains: u64) -> Vec<Out> {
    let mut random = Random::new(seed, 9);
    let (mut now_ns, mut out) = (0, Vec::new());
    for number in 0..trains {
        let next_ns = now_ns + random.below(600_000);
        while let Some(wake_ns) = model.next_wake_ns().filter(|&wake_ns| wake_ns <= next_ns) {
            assert!(wake_ns >= now_ns, "asks for a time that has passed");
            now_ns = wake_ns;
            collect(model, now_ns, &mut out);
        }
        now_ns = next_ns;
        let offered = Train {
            packets: 1 + random.below(44) as u16,
            full_bytes: FULL,
            last_bytes: 60 + random.below(1454) as u32,
        };
        model.offer(now_ns, offered, number);
        collect(model, now_ns, &mut out);
    }
    out.extend(drain(model));
    out
}

#[test]
fn jitter_keeps_the_order_unless_asked_for_and_never_shortens_the_way() {
    for seed in 0..20 {
        let text = format!("rtt=2ms,jitter=3ms,rate=1gbit,loss=1%,seed={seed}");
        let packets = single(&busy_time(&mut model(&text), seed, 400));
        assert!(
            packets.is_sorted_by_key(|&(_, train, index)| (train, index)),
            "seed {seed}"
        );
        let packets = single(&busy_time(
            &mut model(&format!("{text},reorder")),
            seed,
            400,
        ));
        assert!(
            !packets.is_sorted_by_key(|&(_, train, index)| (train, index)),
            "seed {seed}"
        );
        assert!(packets.is_sorted_by_key(|&(at_ns, _, _)| at_ns));
    }
}

#[test]
fn jitter_is_spread_evenly_over_its_range() {
    let mut model = model("rtt=10ms,jitter=4ms");
    let mut delays = Vec::new();
    for number in 0..10_000_u64 {
        let sent_ns = number * SECOND_NS;
        model.offer(sent_ns, Train::single(60), number);
        delays.push(drain(&mut model)[0].at_ns - sent_ns);
    }
    let mean_us = delays.iter().sum::<u64>() / 10_000 / 1_000;
    assert!(
        delays
            .iter()
            .all(|&delay| (5_000_000..=9_000_000).contains(&delay))
    );
    assert!((6_950..7_050).contains(&mean_us), "{mean_us}");
}

#[test]
fn every_packet_is_accounted_for_once_in_random_runs() {
    for seed in 0..200_u64 {
        let mut random = Random::new(seed, 5);
        let rate = 20_000_000 * (1 + random.below(200));
        let (rtt, jitter, loss) = (random.below(9_000), random.below(500), random.below(30_000));
        let text = format!(
            "rtt={rtt}us,jitter={jitter}us,rate={rate}bit,queue=200kb,loss={loss}ppm,seed={seed}"
        );
        let mut model = model(&text);
        let packets = single(&busy_time(&mut model, seed, 150));
        let counters = model.counters(u64::MAX / 2);
        assert_eq!(counters.delivered_packets, packets.len() as u64, "{text}");
        let dropped = counters.dropped_queue_packets + counters.dropped_loss_packets;
        assert_eq!(
            counters.offered_packets,
            counters.delivered_packets + dropped,
            "{text}"
        );
        assert_eq!(
            (counters.queue_bytes, counters.held_packets),
            (0, 0),
            "{text}"
        );
        assert!(counters.late_max_ns <= GATHER_NS, "{text}");
        assert!(counters.queue_peak_bytes <= 200_000, "{text}");
        assert!(
            model.trains.is_empty() && model.held_bytes == 0,
            "{text}: memory is kept"
        );
    }
}

#[test]
fn no_packet_is_early_or_gathered_for_longer_than_allowed() {
    for (rate, rtt_us) in [
        (100_000_000_u64, 700),
        (1_000_000_000, 700),
        (10_000_000_000, 50),
    ] {
        let mut model = model(&format!("rate={rate}bit,rtt={rtt_us}us,queue=100mb"));
        for number in 0..50 {
            model.offer(0, train(44), number);
        }
        let packets = single(&drain(&mut model));
        assert_eq!(packets.len(), 50 * 44);
        let bits = u128::from(FULL + WIRE_OVERHEAD_BYTES) * 8 * u128::from(SECOND_NS);
        for (number, (at_ns, ..)) in (1_u128..).zip(&packets) {
            let due_ns = (bits * number / u128::from(rate)) as u64 + rtt_us * 500;
            let late_ns = at_ns.checked_sub(due_ns).expect("early");
            assert!(late_ns <= GATHER_NS, "{rate}: {late_ns} ns late");
        }
    }
}

#[test]
fn packets_of_a_fast_link_are_gathered_and_those_of_a_slow_one_are_not() {
    for (rate, calls) in [("10gbit", 1..=2), ("1gbit", 5..=6), ("50mbit", 44..=44)] {
        let mut model = model(&format!("rate={rate},rtt=1ms"));
        model.offer(0, train(44), 1);
        let out = drain(&mut model);
        assert!(calls.contains(&out.len()), "{rate}: {} calls", out.len());
    }
}

#[test]
fn a_short_train_is_handed_out_with_its_last_packet_and_no_later() {
    let mut model = model("rate=1gbit,rtt=1ms");
    let short = Train {
        packets: 3,
        full_bytes: FULL,
        last_bytes: 500,
    };
    model.offer(0, short, 1);
    let out = drain(&mut model);
    let bytes = u64::from(2 * FULL + 500 + 3 * WIRE_OVERHEAD_BYTES);
    assert_eq!(out.len(), 1);
    assert_eq!(out[0].at_ns, bytes * 8 + 500_000);
}

#[test]
fn a_cut_link_loses_what_is_on_it_and_what_comes_until_it_heals() {
    let mut model = model("rate=1gbit,rtt=10ms,queue=1mb");
    model.offer(0, train(40), 1);
    model.counters(200_000); // some packets are on the line, the others wait
    model.set_cut(200_000, true);
    model.offer(300_000, train(5), 2);
    assert_eq!(drain(&mut model), []);
    model.set_cut(400_000, false);
    model.offer(500_000, train(1), 3);
    let out = drain(&mut model);
    assert_eq!(out.len(), 1);
    assert_eq!(out[0].payload, 3);
    let counters = model.counters(SECOND_NS);
    assert_eq!(
        (counters.dropped_cut_packets, counters.delivered_packets),
        (45, 1)
    );
    assert_eq!((model.held_bytes, counters.queue_bytes), (0, 0));
}

#[test]
fn what_waits_is_sent_at_a_new_rate_and_what_is_on_the_way_arrives_as_it_would_have() {
    let mut model = model("rate=1gbit,rtt=10ms,queue=1mb");
    model.offer(0, train(20), 1);
    let packet_ns = u64::from(FULL + WIRE_OVERHEAD_BYTES) * 8;
    model.set(10 * packet_ns, spec("rate=100mbit,rtt=2ms,queue=1mb"));
    let packets = single(&drain(&mut model));
    let at = |number: usize| packets[number].0;
    assert!(at(9).abs_diff(5_000_000 + 10 * packet_ns) <= GATHER_NS);
    // The tenth has left at 1 Gb/s, the others follow at a tenth of it and do not overtake.
    let last_departs_ns = 10 * packet_ns + 10 * 10 * packet_ns;
    assert_eq!(at(19), (last_departs_ns + 1_000_000).max(at(9)));
    assert!(packets.is_sorted());
    model.set(2 * SECOND_NS, spec(""));
    model.offer(2 * SECOND_NS, train(1), 2);
    assert_eq!(drain(&mut model)[0].at_ns, 2 * SECOND_NS);
}

#[test]
fn a_link_that_loses_its_rate_sends_at_once_what_waited() {
    let mut model = model("rate=1mbit,queue=1mb");
    model.offer(0, train(20), 1);
    model.set(1_000, spec("rtt=2ms"));
    let out = drain(&mut model);
    assert_eq!(out.last().map(|out| out.at_ns), Some(1_001_000));
    assert_eq!(out.iter().map(|out| out.run.len()).sum::<usize>(), 20);
    assert_eq!(model.counters(SECOND_NS).queue_bytes, 0);
}

#[test]
fn memory_is_bounded_for_a_caller_that_never_takes_anything() {
    for text in ["rtt=10s", "rate=1gbit,rtt=150ms", "rate=10gbit,rtt=150ms"] {
        let mut model = model(text);
        let limit = spec(text).held_bytes_max();
        for number in 0..20_000 {
            model.offer(number * 50_000, train(44), number);
            assert!(model.held_bytes <= limit, "{text}");
        }
        assert!(
            model.counters(SECOND_NS).dropped_memory_packets > 0,
            "{text}"
        );
    }
}

/// A sender with a fixed window of bytes on the wire and a receiver that acknowledges what arrives, for as long as asked.
struct WindowFlow {
    there: Model<u64>,
    back: Model<u64>,
    window_bytes: u64,
    in_flight_bytes: u64,
}

impl WindowFlow {
    const PACKET_BYTES: u64 = (FULL + WIRE_OVERHEAD_BYTES) as u64;
    const TRAIN_PACKETS: u16 = 44;

    fn new(text: &str, window_bytes: u64) -> Self {
        Self {
            there: Model::new(spec(text), 1),
            back: Model::new(spec(text), 2),
            window_bytes,
            in_flight_bytes: 0,
        }
    }

    fn run(&mut self, from_ns: u64, end_ns: u64) {
        let mut now_ns = from_ns;
        while now_ns < end_ns {
            self.send(now_ns);
            let back = &mut self.back;
            self.there.deliver_due(now_ns, |_, run| {
                back.offer(now_ns, Train::single(66), run.len() as u64);
                true
            });
            let in_flight = &mut self.in_flight_bytes;
            self.back.deliver_due(now_ns, |&packets, _| {
                *in_flight -= packets * Self::PACKET_BYTES;
                true
            });
            self.send(now_ns);
            let wakes = [self.there.next_wake_ns(), self.back.next_wake_ns()];
            now_ns = wakes
                .into_iter()
                .flatten()
                .min()
                .expect("something is on the way");
        }
    }

    fn send(&mut self, now_ns: u64) {
        let train_bytes = u64::from(Self::TRAIN_PACKETS) * Self::PACKET_BYTES;
        while self.in_flight_bytes + train_bytes <= self.window_bytes {
            self.in_flight_bytes += train_bytes;
            self.there.offer(now_ns, train(Self::TRAIN_PACKETS), 0);
        }
    }
}

#[test]
fn a_window_of_rate_times_round_trip_fills_10_gigabits_at_150_ms_and_half_of_it_fills_half() {
    const WINDOW_BYTES: u64 = 187_500_000;
    let reached = |window_bytes| {
        let mut flow = WindowFlow::new("rate=10gbit,rtt=150ms", window_bytes);
        flow.run(0, SECOND_NS);
        let before = flow.there.counters(SECOND_NS);
        flow.run(SECOND_NS, 4 * SECOND_NS);
        let after = flow.there.counters(4 * SECOND_NS);
        let dropped = after.offered_packets - after.delivered_packets - after.held_packets;
        assert_eq!(
            dropped, 0,
            "nothing is lost with a queue of the round trip: {after:?}"
        );
        assert!(after.queue_peak_bytes <= WINDOW_BYTES);
        let bits = (after.sent_wire_bytes - before.sent_wire_bytes) * 8;
        bits as f64 / 3.0 / 10e9
    };
    let (whole, half) = (reached(WINDOW_BYTES), reached(WINDOW_BYTES / 2));
    assert!((0.97..=1.0001).contains(&whole), "{whole}");
    assert!((0.485..=0.5).contains(&half), "{half}");
}
