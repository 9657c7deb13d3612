//! What a link is like, and what was counted on it.
//!
//! Plain values, owned by whoever holds them. Parsing refuses unknown names, units that are not spelled out, and figures
//! that no link has.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// What Ethernet adds to a frame on the wire: preamble, checksum and the gap before the next frame. A rate is that of the
/// wire, so 1 Gb/s carries 949 Mb/s of TCP payload in 1500-byte packets without options, as a real one does.
pub const WIRE_OVERHEAD_BYTES: u32 = 24;
/// Shortest frame on the wire, without [`WIRE_OVERHEAD_BYTES`].
pub const FRAME_BYTES_MIN: u32 = 60;
/// Longest round trip and jitter that can be set.
pub const DELAY_US_MAX: u64 = 10_000_000;
/// Largest queue that can be set.
pub const QUEUE_BYTES_MAX: u64 = 4 << 30;
/// What a link without a rate may hold in each direction.
pub const UNSHAPED_BYTES_MAX: u64 = 256 << 20;

/// What a link is like; the same in both directions unless set for one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LinkSpec {
    /// Round trip in microseconds; each direction delays by half of it.
    pub rtt_us: u64,
    /// Each packet is delayed by a further 0 to this many microseconds, evenly spread, in each direction.
    pub jitter_us: u64,
    /// Lets jitter change the order of packets; without it a packet waits for those before it.
    pub reorder: bool,
    /// Bits per second of the wire in each direction, [`WIRE_OVERHEAD_BYTES`] included; none: as fast as the machine.
    pub rate_bits_per_s: Option<u64>,
    /// Bytes of frames that may wait in front of the link, in each direction; more are dropped at the tail. None:
    /// [`LinkSpec::default_queue_bytes`].
    pub queue_bytes: Option<u64>,
    /// Share of packets lost on the way, per million, at random, in each direction.
    pub loss_ppm: u32,
    /// What the random numbers of a new link begin with.
    pub seed: u64,
}

impl LinkSpec {
    /// The queue of a link for which none is set: the round trip at its rate (what a router before a long line has), at
    /// least 5 ms at its rate and 256 KiB (what a port of a shallow switch has).
    pub fn default_queue_bytes(&self) -> u64 {
        let bytes_in = |rate: u64, us: u64| (u128::from(rate) * u128::from(us) / 8_000_000) as u64;
        let rate = self.rate_bits_per_s.unwrap_or(0);
        bytes_in(rate, self.rtt_us.max(5_000)).max(256 << 10)
    }

    /// The queue's length in force.
    pub fn queue_limit_bytes(&self) -> u64 {
        self.queue_bytes
            .unwrap_or_else(|| self.default_queue_bytes())
    }

    /// Bytes of frames that one direction may hold in all, waiting and on the way: what bounds the memory.
    pub fn held_bytes_max(&self) -> u64 {
        let Some(rate) = self.rate_bits_per_s else {
            return UNSHAPED_BYTES_MAX;
        };
        let on_the_way_us = self.rtt_us / 2 + self.jitter_us + 100_000;
        let on_the_way = u128::from(rate) * u128::from(on_the_way_us) / 8_000_000;
        self.queue_limit_bytes() + on_the_way as u64
    }

    /// Refuses what no link is like.
    pub fn check(&self) -> Result<(), SpecError> {
        let refuse = |text: &str| Err(SpecError(text.to_owned()));
        if self.rtt_us > DELAY_US_MAX || self.jitter_us > DELAY_US_MAX {
            return refuse("round trip and jitter of a link are at most 10 s");
        }
        if self
            .rate_bits_per_s
            .is_some_and(|rate| !(10_000..=1_000_000_000_000).contains(&rate))
        {
            return refuse("the rate of a link is between 10kbit and 1000gbit");
        }
        if self.queue_limit_bytes() > QUEUE_BYTES_MAX {
            return refuse("the queue of a link is at most 4 GiB");
        }
        if self.loss_ppm > 1_000_000 {
            return refuse("the loss of a link is at most 100%");
        }
        Ok(())
    }
}

/// Why a description of a link is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct SpecError(String);

/// `rtt=50ms,rate=1gbit,loss=0.1%,queue=10ms,jitter=200us,reorder,seed=7`, in any order, each part optional; the queue in
/// `b`, `kb`, `mb` (of 1000), `kib`, `mib` (of 1024) or in the time that the rate needs for it.
impl FromStr for LinkSpec {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<Self, SpecError> {
        let mut spec = Self::default();
        let mut queue = None;
        for part in text
            .split(',')
            .map(str::trim)
            .filter(|part| !part.is_empty())
        {
            let (name, value) = part.split_once('=').unwrap_or((part, ""));
            match name {
                "rtt" => spec.rtt_us = time_us(value)?,
                "jitter" => spec.jitter_us = time_us(value)?,
                "rate" => spec.rate_bits_per_s = Some(scaled(value, &RATES)?),
                "queue" => queue = Some(value),
                "loss" => spec.loss_ppm = scaled(value, &SHARES)? as u32,
                "seed" => spec.seed = scaled(value, &[("", 1.0)])?,
                "reorder" if value.is_empty() => spec.reorder = true,
                _ => {
                    return Err(SpecError(format!(
                        "'{part}' is no part of a link, those are: rtt=50ms, jitter=1ms, \
                                                   reorder, rate=1gbit, queue=10ms or 1mb, loss=0.1%, seed=7"
                    )));
                }
            }
        }
        spec.queue_bytes = queue
            .map(|text| queue_bytes(text, spec.rate_bits_per_s))
            .transpose()?;
        spec.check().map(|()| spec)
    }
}

/// The form that parses back to the same value.
impl fmt::Display for LinkSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rtt={}us", self.rtt_us)?;
        if self.jitter_us > 0 {
            write!(f, ",jitter={}us", self.jitter_us)?;
        }
        if self.reorder {
            write!(f, ",reorder")?;
        }
        if let Some(rate) = self.rate_bits_per_s {
            write!(f, ",rate={rate}bit")?;
        }
        if let Some(queue) = self.queue_bytes {
            write!(f, ",queue={queue}b")?;
        }
        if self.loss_ppm > 0 {
            write!(f, ",loss={}ppm", self.loss_ppm)?;
        }
        if self.seed > 0 {
            write!(f, ",seed={}", self.seed)?;
        }
        Ok(())
    }
}

type Units = [(&'static str, f64)];
const TIMES: [(&str, f64); 3] = [("us", 1.0), ("ms", 1e3), ("s", 1e6)];
const RATES: [(&str, f64); 4] = [("bit", 1.0), ("kbit", 1e3), ("mbit", 1e6), ("gbit", 1e9)];
const SHARES: [(&str, f64); 2] = [("%", 1e4), ("ppm", 1.0)];
const SIZES: [(&str, f64); 5] = [
    ("b", 1.0),
    ("kb", 1e3),
    ("mb", 1e6),
    ("kib", 1024.0),
    ("mib", 1048576.0),
];

fn time_us(text: &str) -> Result<u64, SpecError> {
    scaled(text, &TIMES)
}

fn queue_bytes(text: &str, rate: Option<u64>) -> Result<u64, SpecError> {
    match (time_us(text), rate) {
        (Ok(us), Some(rate)) => Ok((u128::from(rate) * u128::from(us) / 8_000_000) as u64),
        (Ok(_), None) => Err(SpecError(format!(
            "the queue '{text}' is a time, which needs a rate"
        ))),
        (Err(_), _) => scaled(text, &SIZES),
    }
}

/// A number with one of the units, as a whole number of the smallest.
fn scaled(text: &str, units: &Units) -> Result<u64, SpecError> {
    let number = text.trim_end_matches(|c: char| c.is_ascii_alphabetic() || c == '%');
    let unit = &text[number.len()..];
    let factor = units
        .iter()
        .find(|(name, _)| unit.eq_ignore_ascii_case(name));
    let value = number.parse::<f64>().ok().zip(factor);
    match value.map(|(number, (_, factor))| (number * factor).round()) {
        Some(value) if (0.0..9e15).contains(&value) => Ok(value as u64),
        _ => {
            let names: Vec<&str> = units.iter().map(|(name, _)| *name).collect();
            Err(SpecError(format!(
                "'{text}' is not a number with one of the units {}",
                names.join(", ")
            )))
        }
    }
}

/// Which way packets go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Direction {
    /// From the first end to the second.
    AToB,
    /// From the second end to the first.
    BToA,
}

/// What one direction counted since it was made. Packets and bytes are those of the wire: what the sender's kernel hands
/// over as one large packet counts as the packets that a network card would have made of it. Bytes are those of frames
/// from the Ethernet header on, unless said otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DirectionCounters {
    pub offered_packets: u64,
    pub offered_bytes: u64,
    /// Packets that went through the transmitter, lost ones included.
    pub sent_packets: u64,
    /// Bytes that went through the transmitter.
    pub sent_bytes: u64,
    /// The same with [`WIRE_OVERHEAD_BYTES`] for each packet: what the rate is about.
    pub sent_wire_bytes: u64,
    /// When the last packet left the transmitter, by the link's clock: `sent_wire_bytes` over the time between two of
    /// these is the rate, exactly, however busy the machine.
    pub last_departure_ns: u64,
    /// Packets that came out at the far end.
    pub delivered_packets: u64,
    /// Bytes that came out at the far end.
    pub delivered_bytes: u64,
    /// Packets dropped since the queue was full.
    pub dropped_queue_packets: u64,
    /// Packets lost at random on the way.
    pub dropped_loss_packets: u64,
    /// Packets dropped since the link was cut.
    pub dropped_cut_packets: u64,
    /// Packets dropped since the emulator held more than [`LinkSpec::held_bytes_max`]: the machine cannot keep up.
    pub dropped_memory_packets: u64,
    /// Frames that the sender's kernel dropped before the emulator took them: the machine cannot keep up. They are in no
    /// other counter.
    pub dropped_kernel_frames: u64,
    /// Packets that the receiver's kernel refused or that make no sense as a frame.
    pub dropped_error_packets: u64,
    /// Bytes waiting in front of the transmitter now.
    pub queue_bytes: u64,
    /// The most that ever waited.
    pub queue_peak_bytes: u64,
    /// Packets waiting or on the way now.
    pub held_packets: u64,
    /// The most time that a packet was delivered after it was due: up to 0.1 ms by gathering, more on a busy machine.
    pub late_max_ns: u64,
    /// The sum of these times over all delivered packets.
    pub late_sum_ns: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Counters {
    /// From the first end to the second.
    pub a_to_b: DirectionCounters,
    /// From the second end to the first.
    pub b_to_a: DirectionCounters,
    /// Processor time of the emulator, which includes the receiving kernel's work up to its socket.
    pub cpu_ns: u64,
    /// When these were taken, by the link's clock (CLOCK_MONOTONIC).
    pub taken_at_ns: u64,
}

impl Counters {
    pub fn of(&self, direction: Direction) -> &DirectionCounters {
        match direction {
            Direction::AToB => &self.a_to_b,
            Direction::BToA => &self.b_to_a,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_description_says_what_it_seems_to() {
        let text = "rtt=50ms,rate=1gbit,loss=0.1%,queue=10ms,jitter=200us,reorder,seed=7";
        let expected = LinkSpec {
            rtt_us: 50_000,
            jitter_us: 200,
            reorder: true,
            rate_bits_per_s: Some(1_000_000_000),
            queue_bytes: Some(1_250_000),
            loss_ppm: 1_000,
            seed: 7,
        };
        assert_eq!(text.parse(), Ok(expected));
        assert_eq!("".parse(), Ok(LinkSpec::default()));
        let small: LinkSpec = "rtt=0.5ms, loss=0.01%, queue=64kib"
            .parse()
            .expect("a link");
        assert_eq!(
            (small.rtt_us, small.loss_ppm, small.queue_bytes),
            (500, 100, Some(65_536))
        );
    }

    #[test]
    fn what_is_printed_parses_to_the_same() {
        let texts = [
            "",
            "rtt=1s,reorder,jitter=3ms",
            "rate=2.5gbit,loss=100%",
            "rate=10mbit,queue=1mb,seed=3",
        ];
        for text in texts {
            let spec: LinkSpec = text.parse().expect(text);
            assert_eq!(spec.to_string().parse(), Ok(spec), "{spec}");
        }
    }

    #[test]
    fn descriptions_of_no_link_are_refused_with_the_reason() {
        let cases = [
            ("rtt=50", "units us, ms, s"),
            ("rtt=-1ms", "not a number"),
            ("rtt=NaNms", "not a number"),
            ("rtt=11s", "at most 10 s"),
            ("loss=101%", "at most 100%"),
            ("rate=1", "units bit"),
            ("rate=0bit", "between"),
            ("queue=10ms", "needs a rate"),
            ("queue=5000mb", "at most 4 GiB"),
            ("reorder=yes", "no part"),
            ("delay=3ms", "no part"),
        ];
        for (text, reason) in cases {
            let error = text.parse::<LinkSpec>().expect_err(text).to_string();
            assert!(error.contains(reason), "{text}: {error}");
        }
    }

    #[test]
    fn a_queue_that_is_not_set_is_the_round_trip_or_what_a_small_switch_has() {
        let bytes = |text: &str| text.parse::<LinkSpec>().expect(text).queue_limit_bytes();
        assert_eq!(bytes("rate=1gbit,rtt=150ms"), 18_750_000);
        assert_eq!(bytes("rate=10gbit,rtt=150ms"), 187_500_000);
        assert_eq!(bytes("rate=1gbit,rtt=0.5ms"), 625_000);
        assert_eq!(bytes("rate=10mbit,rtt=1ms"), 262_144);
    }
}
