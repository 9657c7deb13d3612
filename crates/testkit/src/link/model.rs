//! One direction of a link as a model: a queue with a tail drop, a transmitter, a line that delays and loses.
//!
//! Pure: no IO and no clock; whoever owns it says what time it is, in nanoseconds that never go back. Each packet's
//! departure is computed from the one before it, so that a late caller does not change the rate, and no packet is handed
//! out before it is due. It refuses to hold more than [`LinkSpec::held_bytes_max`] bytes.

use std::collections::VecDeque;
use std::ops::Range;

use super::spec::{DirectionCounters, FRAME_BYTES_MIN, LinkSpec, WIRE_OVERHEAD_BYTES};

/// How long packets of one train are gathered, from the first one's due time on, so that they are handed out together: what
/// the interrupt moderation of a network card does. No packet is later than this by it.
pub const GATHER_NS: u64 = 100_000;

/// Packets that came in together, as one large packet that the wire carries as several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Train {
    /// How many, at least 1.
    pub packets: u16,
    /// Bytes of each frame but the last.
    pub full_bytes: u32,
    /// Bytes of the last frame.
    pub last_bytes: u32,
}

impl Train {
    pub fn single(bytes: u32) -> Self {
        Self {
            packets: 1,
            full_bytes: bytes,
            last_bytes: bytes,
        }
    }

    /// Bytes of one packet's frame, padding included.
    fn frame_bytes(&self, index: u16) -> u32 {
        let bytes = if index + 1 == self.packets {
            self.last_bytes
        } else {
            self.full_bytes
        };
        bytes.max(FRAME_BYTES_MIN)
    }
}

/// A train of which at least one packet is on the link.
struct Held<P> {
    payload: P,
    train: Train,
    packets_left: u16,
}

/// A packet in front of the transmitter, or in it.
struct Waiting {
    train: u64,
    index: u16,
    arrived_ns: u64,
}

struct Flying {
    train: u64,
    index: u16,
    due_ns: u64,
}

pub struct Model<P> {
    spec: LinkSpec,
    random: Random,
    is_cut: bool,
    waiting: VecDeque<Waiting>,
    flying: VecDeque<Flying>,
    /// Trains by number, the first of which is `first_train`.
    trains: VecDeque<Option<Held<P>>>,
    first_train: u64,
    /// When the transmitter has sent all that it began, and the part of a nanosecond beyond it, in units of 1/rate.
    free_at_ns: u64,
    free_at_rest: u64,
    last_due_ns: u64,
    held_bytes: u64,
    counters: DirectionCounters,
}

impl<P> Model<P> {
    /// An empty direction. `stream` makes the random numbers of two directions differ.
    pub fn new(spec: LinkSpec, stream: u64) -> Self {
        Self {
            spec,
            random: Random::new(spec.seed, stream),
            is_cut: false,
            waiting: VecDeque::new(),
            flying: VecDeque::new(),
            trains: VecDeque::new(),
            first_train: 0,
            free_at_ns: 0,
            free_at_rest: 0,
            last_due_ns: 0,
            held_bytes: 0,
            counters: DirectionCounters::default(),
        }
    }

    pub fn spec(&self) -> LinkSpec {
        self.spec
    }

    /// Changes what it is like: what has left the transmitter arrives when it would have, the rest is sent anew.
    pub fn set(&mut self, now_ns: u64, spec: LinkSpec) {
        self.advance(now_ns);
        if spec.rate_bits_per_s != self.spec.rate_bits_per_s {
            self.free_at_rest = 0;
            self.free_at_ns = match self.waiting.is_empty() {
                true => self.free_at_ns,
                false => now_ns,
            };
        }
        self.spec = spec;
        self.advance(now_ns);
    }

    /// Drops everything from now on, or no longer.
    pub fn set_cut(&mut self, now_ns: u64, is_cut: bool) {
        self.advance(now_ns);
        self.is_cut = is_cut;
        if is_cut {
            self.counters.dropped_cut_packets += (self.waiting.len() + self.flying.len()) as u64;
            self.waiting.clear();
            self.flying.clear();
            self.first_train += self.trains.len() as u64;
            self.trains.clear();
            self.held_bytes = 0;
            self.counters.queue_bytes = 0;
        }
    }

    /// Takes packets in, or drops them.
    pub fn offer(&mut self, now_ns: u64, train: Train, payload: P) {
        self.advance(now_ns);
        let number = self.first_train + self.trains.len() as u64;
        let (limit, held_max) = (self.spec.queue_limit_bytes(), self.spec.held_bytes_max());
        let mut accepted = 0;
        for index in 0..train.packets {
            let bytes = u64::from(train.frame_bytes(index));
            self.counters.offered_packets += 1;
            self.counters.offered_bytes += bytes;
            let waiting = self.counters.queue_bytes;
            if self.is_cut {
                self.counters.dropped_cut_packets += 1;
            } else if waiting > 0 && waiting + bytes > limit {
                self.counters.dropped_queue_packets += 1;
            } else if self.held_bytes + bytes > held_max {
                self.counters.dropped_memory_packets += 1;
            } else {
                accepted += 1;
                self.held_bytes += bytes;
                self.wait(number, index, bytes, now_ns);
            }
        }
        if accepted > 0 {
            self.trains.push_back(Some(Held {
                payload,
                train,
                packets_left: accepted,
            }));
            self.advance(now_ns);
        }
    }

    /// Counts a frame that could not be understood.
    pub fn refuse(&mut self) {
        self.counters.offered_packets += 1;
        self.counters.dropped_error_packets += 1;
    }

    fn wait(&mut self, train: u64, index: u16, bytes: u64, arrived_ns: u64) {
        let counters = &mut self.counters;
        // Without a rate nothing waits; the transmitter takes it in the next call.
        if self.spec.rate_bits_per_s.is_some() {
            counters.queue_bytes += bytes;
            counters.queue_peak_bytes = counters.queue_peak_bytes.max(counters.queue_bytes);
        }
        self.waiting.push_back(Waiting {
            train,
            index,
            arrived_ns,
        });
    }

    /// When there is something to hand out next.
    pub fn next_wake_ns(&self) -> Option<u64> {
        let Some(head) = self.flying.front() else {
            return self.first_arrival_ns();
        };
        let (until, mut last) = (head.due_ns + GATHER_NS, head);
        for next in self.flying.iter().skip(1) {
            if next.train != head.train || next.index != last.index + 1 || next.due_ns > until {
                return Some(last.due_ns);
            }
            last = next;
        }
        // The rest of this train may still be in front of the transmitter.
        let next = self.waiting.front();
        match next.filter(|next| next.train == last.train && self.gathers(next.train)) {
            Some(next) => Some(until.min(self.train_arrives_ns(next)?.max(last.due_ns))),
            None => Some(last.due_ns),
        }
    }

    /// When the last packet of a train arrives, of which this one is next in the transmitter.
    fn train_arrives_ns(&self, next: &Waiting) -> Option<u64> {
        let train = &self.held(next.train)?.train;
        let (departs_ns, _) = self.departure(next, train.frame_bytes(next.index));
        let wire = |index| u64::from(train.frame_bytes(index) + WIRE_OVERHEAD_BYTES);
        let behind = u64::from(train.packets - next.index - 1);
        let bytes = match behind {
            0 => 0,
            _ => (behind - 1) * wire(next.index) + wire(train.packets - 1),
        };
        let rate = self.spec.rate_bits_per_s.unwrap_or(u64::MAX);
        Some(departs_ns + bytes * 8 * 1_000_000_000 / rate + self.delay_ns())
    }

    /// Whether the packets of a train follow each other so fast that it pays to wait for the next.
    fn gathers(&self, train: u64) -> bool {
        let bits = |held: &Held<P>| u64::from(held.train.full_bytes) * 8;
        let rate = self.spec.rate_bits_per_s.unwrap_or(u64::MAX);
        self.held(train)
            .is_some_and(|held| bits(held) * 1_000_000_000 / rate < GATHER_NS)
    }

    /// Nothing is on the line: the earliest time at which what waits can arrive.
    fn first_arrival_ns(&self) -> Option<u64> {
        let head = self.waiting.front()?;
        let held = self.held(head.train)?;
        let (departs_ns, _) = self.departure(head, held.train.frame_bytes(head.index));
        let arrives_ns = departs_ns + self.delay_ns();
        match self.gathers(head.train) {
            true => Some(self.train_arrives_ns(head)?.min(arrives_ns + GATHER_NS)),
            false => Some(arrives_ns),
        }
    }

    /// Hands out what is due, runs of neighbours together. `deliver` says whether it could.
    pub fn deliver_due(&mut self, now_ns: u64, mut deliver: impl FnMut(&P, Range<u16>) -> bool) {
        self.advance(now_ns);
        while let Some(first) = self.flying.pop_front_if(|head| head.due_ns <= now_ns) {
            let mut last = Flying { ..first };
            while let Some(next) = self.flying.pop_front_if(|next| {
                next.due_ns <= now_ns && next.train == last.train && next.index == last.index + 1
            }) {
                last = next;
            }
            let run = first.index..last.index + 1;
            let late_ns = now_ns - last.due_ns;
            let Some(held) = self.held(first.train) else {
                continue; // as above: there is one
            };
            let bytes: u64 = run
                .clone()
                .map(|index| u64::from(held.train.frame_bytes(index)))
                .sum();
            let is_delivered = deliver(&held.payload, run.clone());
            self.count_delivery(run.len() as u64, bytes, late_ns, is_delivered);
            self.release(first.train, run.len() as u16, bytes);
        }
    }

    fn count_delivery(&mut self, packets: u64, bytes: u64, late_ns: u64, is_delivered: bool) {
        let counters = &mut self.counters;
        if is_delivered {
            counters.delivered_packets += packets;
            counters.delivered_bytes += bytes;
            counters.late_max_ns = counters.late_max_ns.max(late_ns);
            counters.late_sum_ns += late_ns * packets;
        } else {
            counters.dropped_error_packets += packets;
        }
    }

    /// What was counted up to this time.
    pub fn counters(&mut self, now_ns: u64) -> DirectionCounters {
        self.advance(now_ns);
        DirectionCounters {
            held_packets: (self.waiting.len() + self.flying.len()) as u64,
            ..self.counters
        }
    }

    /// Moves what the transmitter has finished by now onto the line.
    fn advance(&mut self, now_ns: u64) {
        while let Some(head) = self.waiting.front() {
            let Some(held) = self.held(head.train) else {
                return; // a train is let go with its last packet, not before
            };
            let bytes = held.train.frame_bytes(head.index);
            let (departs_ns, rest) = self.departure(head, bytes);
            if departs_ns > now_ns {
                return;
            }
            (self.free_at_ns, self.free_at_rest) = (departs_ns, rest);
            if let Some(packet) = self.waiting.pop_front() {
                self.depart(&packet, bytes, departs_ns);
            }
        }
    }

    /// When the transmitter has sent the packet, and the rest beyond it in units of 1/rate.
    fn departure(&self, packet: &Waiting, frame_bytes: u32) -> (u64, u64) {
        let Some(rate) = self.spec.rate_bits_per_s else {
            return (self.free_at_ns.max(packet.arrived_ns), 0);
        };
        let (start_ns, rest) = match packet.arrived_ns > self.free_at_ns {
            true => (packet.arrived_ns, 0),
            false => (self.free_at_ns, self.free_at_rest),
        };
        let bits = u64::from(frame_bytes + WIRE_OVERHEAD_BYTES) * 8;
        let units = bits * 1_000_000_000 + rest;
        (start_ns + units / rate, units % rate)
    }

    fn depart(&mut self, packet: &Waiting, bytes: u32, departs_ns: u64) {
        let counters = &mut self.counters;
        counters.queue_bytes = counters.queue_bytes.saturating_sub(bytes.into());
        counters.sent_packets += 1;
        counters.sent_bytes += u64::from(bytes);
        counters.sent_wire_bytes += u64::from(bytes + WIRE_OVERHEAD_BYTES);
        counters.last_departure_ns = departs_ns;
        if self.random.below(1_000_000) < u64::from(self.spec.loss_ppm) {
            counters.dropped_loss_packets += 1;
            return self.release(packet.train, 1, bytes.into());
        }
        let jitter_ns = match self.spec.jitter_us {
            0 => 0,
            us => self.random.below(us * 1_000 + 1),
        };
        self.fly(packet, departs_ns + self.delay_ns() + jitter_ns);
    }

    fn fly(&mut self, packet: &Waiting, due_ns: u64) {
        let keeps_order = !self.spec.reorder;
        let due_ns = if keeps_order {
            due_ns.max(self.last_due_ns)
        } else {
            due_ns
        };
        self.last_due_ns = self.last_due_ns.max(due_ns);
        let packet = Flying {
            train: packet.train,
            index: packet.index,
            due_ns,
        };
        match self.flying.back().is_some_and(|last| last.due_ns > due_ns) {
            true => {
                let place = self.flying.partition_point(|other| other.due_ns <= due_ns);
                self.flying.insert(place, packet);
            }
            false => self.flying.push_back(packet),
        }
    }

    fn delay_ns(&self) -> u64 {
        self.spec.rtt_us * 500
    }

    fn held(&self, train: u64) -> Option<&Held<P>> {
        let index = train.checked_sub(self.first_train)?;
        self.trains.get(index as usize)?.as_ref()
    }

    /// Lets packets of a train go, and the train with the last of them.
    fn release(&mut self, train: u64, packets: u16, bytes: u64) {
        self.held_bytes -= bytes;
        let index = (train - self.first_train) as usize;
        if let Some(slot) = self.trains.get_mut(index)
            && let Some(held) = slot
        {
            held.packets_left -= packets;
            if held.packets_left == 0 {
                *slot = None;
            }
        }
        while self
            .trains
            .pop_front_if(|oldest| oldest.is_none())
            .is_some()
        {
            self.first_train += 1;
        }
    }
}

/// A small generator (splitmix64).
struct Random(u64);

impl Random {
    fn new(seed: u64, stream: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ stream.wrapping_mul(0xd1b5_4a32_d192_ed03))
    }

    /// Evenly spread from 0 to below `limit`.
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((u128::from(mixed ^ (mixed >> 31)) * u128::from(limit)) >> 64) as u64
    }
}

#[cfg(test)]
#[path = "model_tests.rs"]
mod tests;
