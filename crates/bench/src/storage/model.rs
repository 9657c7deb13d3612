//! What volumes are like, and what follows from that without measuring anything.
//!
//! Pure. Refuses nothing.

use godwit_testkit::testvol::Settings;
use serde::Serialize;
use std::time::Duration;

/// A volume: how long each request takes at least, and how many bytes it carries in a second, which all requests share.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Model {
    pub latency_ms: f64,
    /// 10^6 bytes a second, reads and writes together.
    pub mb_per_s: f64,
}

impl Model {
    pub fn settings(&self) -> Settings {
        Settings {
            latency: Duration::from_secs_f64(self.latency_ms / 1e3),
            bytes_per_second: Some((self.mb_per_s * 1e6) as u64),
            shares: true,
            ..Settings::default()
        }
    }

    pub fn slower(self, latency: f64, rate: f64) -> Self {
        Self {
            latency_ms: self.latency_ms * latency,
            mb_per_s: self.mb_per_s / rate,
        }
    }

    fn seconds(&self, bytes: f64) -> f64 {
        bytes / (self.mb_per_s * 1e6)
    }
}

/// What a load did while a disk was moved.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Carried {
    pub reads: u64,
    pub writes: u64,
    pub io_bytes: u64,
}

/// Seconds that a move takes at least: the source reads the disk once beside what the load does there; the destination writes
/// it once and, of what the load writes, what lies in the part that was copied, which is a half on average.
pub fn bound_s(source: &Model, destination: &Model, disk_bytes: u64, load: Carried) -> f64 {
    let bytes = |ios: u64| (ios * load.io_bytes) as f64;
    let at_source = disk_bytes as f64 + bytes(load.reads) + bytes(load.writes);
    let at_destination = disk_bytes as f64 + bytes(load.writes) / 2.0;
    let needs = [
        source.seconds(at_source),
        destination.seconds(at_destination),
    ];
    needs[0].max(needs[1])
}

/// Requests a second of a load whose writes to the destination are waited for ("The Design and Evolution of Live Storage
/// Migration in VMware ESX", equation 1, with the source's part of the time added): `part` of its requests go there.
pub fn equation_1(outstanding: u32, part: f64, source_ms: f64, destination_ms: f64) -> f64 {
    let took_ms = (1.0 - part) * source_ms + part * source_ms.max(destination_ms);
    f64::from(outstanding) / took_ms * 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    const FAST: Model = Model {
        latency_ms: 1.0,
        mb_per_s: 100.0,
    };

    #[test]
    fn the_bound_is_that_of_the_side_with_more_to_do() {
        let load = Carried {
            reads: 7000,
            writes: 3000,
            io_bytes: 10_000,
        };
        // 100 MB of the disk and 100 MB of the load at the source.
        assert_eq!(bound_s(&FAST, &FAST, 100_000_000, load), 2.0);
        // 100 MB of the disk and a half of 30 MB at a tenth of the rate.
        let slow = FAST.slower(1.0, 10.0);
        assert_eq!(bound_s(&FAST, &slow, 100_000_000, load), 11.5);
        let none = Carried {
            reads: 0,
            writes: 0,
            io_bytes: 10_000,
        };
        assert_eq!(bound_s(&FAST, &FAST, 100_000_000, none), 1.0);
    }

    #[test]
    fn a_slow_destination_slows_the_part_that_goes_there() {
        assert_eq!(equation_1(16, 0.0, 1.0, 10.0), 16_000.0);
        assert_eq!(equation_1(16, 1.0, 1.0, 10.0), 1_600.0);
        // 0.7 ms and 3 ms.
        let some = equation_1(16, 0.3, 1.0, 10.0);
        assert!((some - 16_000.0 / 3.7).abs() < 1e-6, "{some}");
        // A destination that is faster than the source slows nothing.
        assert_eq!(equation_1(16, 0.3, 1.0, 0.1), 16_000.0);
    }
}
