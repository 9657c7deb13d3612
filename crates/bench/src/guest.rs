//! The guests of the bench, the same for every system: how each boots, is filled, is seen to be ready, and is checked.
//!
//! The idle guest is a few bytes that mark memory and halt with interrupts off, so its memory never changes again and can
//! be compared page for page long after the handover. Random data is written from outside after the guest is up. The
//! counter guests are the test kit's. Owns the kernel files below its directory.

use crate::memory::Memory;
use crate::plan::{Cell, Guest};
use anyhow::{Result, bail, ensure};
use godwit_testkit::guest::checker;
use godwit_testkit::guest::counter::{self, CounterSpec};
use godwit_testkit::guest::linux::{GuestNetwork, LinuxGuest, command_line, target_dir};
use godwit_testkit::stage::go_on;
use serde_json::{Value, json};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Address of the Redis guest.
pub const ADDRESS: &str = "10.77.0.10";
/// Address of the Redis guest, IPv6.
pub const ADDRESS6: &str = "fd77::10";
/// MAC address of the guests that have a card.
pub const MAC: &str = "52:54:00:67:77:10";

/// CPU model of all guests: emulated, a richer one would only be slower.
pub const CPU: &str = "qemu64";

/// Where the idle guest leaves its mark, guest-physical.
const MARK_AT: u64 = 0x8_0000;
const MARK: [u8; 4] = *b"GWS1";
/// Below this the firmware, the kernel and the mark live; from here on the bench may write.
const FREE_FROM: u64 = 2 << 20;
/// Longest wait for a small guest to come up, on a busy machine.
const BOOT: Duration = Duration::from_secs(60);

#[derive(Debug, Clone)]
pub struct Boot {
    pub kernel: PathBuf,
    pub initramfs: Option<PathBuf>,
    pub arguments: String,
    /// Whether it has a network card.
    pub card: bool,
}

impl Boot {
    /// Writes the guest's kernel below a directory that all hosts see.
    pub fn make(guest: &Guest, dir: &Path, spins: &Spins) -> Result<Self> {
        let (name, bytes) = match guest {
            Guest::Fresh | Guest::Idle => ("idle.kernel".to_owned(), idle_kernel()),
            Guest::Counter {
                mib,
                mib_per_s,
                reader,
            } => {
                let mut spec = CounterSpec::flat(*mib).slowed(spins.for_rate(*mib_per_s));
                if *reader {
                    spec = spec.with_reader();
                }
                let kind = if *reader { "reader-" } else { "" };
                (
                    format!("counter-{kind}{mib}-{}.kernel", spec.spin),
                    counter::build(&spec)?,
                )
            }
            Guest::Redis { .. } => return Self::linux(),
        };
        let kernel = dir.join(name);
        std::fs::write(&kernel, bytes)?;
        Ok(Self {
            kernel,
            initramfs: None,
            arguments: String::new(),
            card: false,
        })
    }

    fn linux() -> Result<Self> {
        let guest = LinuxGuest::find(&target_dir()?)?;
        let network = GuestNetwork {
            ip4: Some(format!("{ADDRESS}/24")),
            ip6: Some(format!("{ADDRESS6}/64")),
        };
        Ok(Self {
            kernel: guest.kernel,
            initramfs: Some(guest.initrd),
            arguments: command_line(&network),
            card: true,
        })
    }
}

/// How many idle turns a page slow the counter guest to a rate on this machine.
#[derive(Debug, Clone, Copy, Default)]
pub struct Spins {
    /// Seconds of a page without idle turns.
    pub page_s: f64,
    /// Seconds of one idle turn.
    pub turn_s: f64,
}

impl Spins {
    fn for_rate(&self, mib_per_s: Option<f64>) -> u32 {
        match mib_per_s {
            None => 0,
            // Not at all is one page in a very long time; the guest must still be seen to run.
            Some(rate) if rate <= 0.0 => u32::MAX,
            Some(rate) => {
                let wanted_s = 1.0 / (rate * 256.0);
                ((wanted_s - self.page_s) / self.turn_s.max(1e-12)).max(0.0) as u32
            }
        }
    }

    /// From two measured rates in pages a second, without idle turns and with so many.
    pub fn from_rates(fast: f64, slow: f64, turns: u32) -> Self {
        let (page_s, slow_s) = (1.0 / fast.max(1.0), 1.0 / slow.max(1.0));
        Self {
            page_s,
            turn_s: (slow_s - page_s).max(0.0) / f64::from(turns.max(1)),
        }
    }
}

/// Waits until a guest without a network is up, and gives it its data.
pub fn get_ready(guest: &Guest, memory: &Memory, seed: u64) -> Result<()> {
    let deadline = Instant::now() + BOOT;
    while !is_up(guest, memory)? {
        go_on()?;
        ensure!(
            Instant::now() < deadline,
            "the guest did not come up within {BOOT:?}"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
    match guest {
        Guest::Idle => memory.fill(FREE_FROM, seed),
        Guest::Counter { .. } => memory.fill(data_from(guest), seed),
        Guest::Fresh | Guest::Redis { .. } => Ok(()),
    }
}

fn is_up(guest: &Guest, memory: &Memory) -> Result<bool> {
    match guest {
        Guest::Fresh | Guest::Idle => {
            let mut mark = [0; 4];
            Ok(memory.read_exact_at(&mut mark, MARK_AT).is_ok() && mark == MARK)
        }
        Guest::Counter { .. } => Ok(memory.steps().is_ok()),
        Guest::Redis { .. } => bail!("the Redis guest is waited for on its network"),
    }
}

/// From here on nothing but the bench writes.
fn data_from(guest: &Guest) -> u64 {
    match guest {
        Guest::Counter { mib, .. } => u64::from(*mib) << 20,
        Guest::Fresh | Guest::Idle => 0,
        Guest::Redis { .. } => u64::MAX,
    }
}

/// Compares the stopped destination with the stopped source, as far as the guest lets that be done. Gives whether they
/// are equal and a sentence that says what was compared.
pub fn check(cell: &Cell, source: &Memory, destination: &Memory) -> Result<(bool, Value)> {
    let differing = match cell.guest {
        Guest::Redis { .. } => bail!("the Redis guest is checked by its client"),
        _ => source.differing_pages(destination, data_from(&cell.guest))?,
    };
    let compared = match cell.guest {
        Guest::Fresh | Guest::Idle => "every page of the stopped guest, source against destination",
        _ => "data pages, source against destination; every counted page for lost and stale steps",
    };
    let mut said = json!({"compared": compared, "differing_pages": differing});
    let mut equal = differing == 0;
    if let Guest::Counter { .. } = cell.guest {
        match checker::check(destination) {
            Ok(checked) => equal &= checked.control.boots == 1,
            Err(error) => {
                equal = false;
                said["counter"] = json!(error.to_string());
                said["source_counter"] = json!(match checker::check(source) {
                    Ok(checked) => format!("right, stopped in pass {}", checked.control.passes),
                    Err(error) => error.to_string(),
                });
            }
        }
    }
    Ok((equal, said))
}

/// The speed of a counter guest over time: when it was looked at, and pages stepped and read until then.
#[derive(Debug, Clone, Default)]
pub struct Steps {
    /// Seconds since 1970, pages.
    pub seen: Vec<(f64, u64)>,
    /// The same of the vCPU that reads; empty where there is none.
    pub read: Vec<(f64, u64)>,
}

impl Steps {
    /// Looks now; a moment at which the memory cannot be read is left out.
    pub fn look(&mut self, memory: &Memory, now: f64) {
        if let Ok(steps) = memory.steps() {
            self.seen.push((now, steps));
        }
        if let Ok(reads @ 1..) = checker::reads(memory) {
            self.read.push((now, u64::from(reads)));
        }
    }

    /// Pages a second between two moments; none when it was not looked at twice in between.
    pub fn rate(&self, from: f64, to: f64) -> Option<f64> {
        rate_of(&self.seen, from, to)
    }

    /// The same of pages read.
    pub fn read_rate(&self, from: f64, to: f64) -> Option<f64> {
        rate_of(&self.read, from, to)
    }

    /// What was stepped between two moments of what a rate, in pages a second, allowed: whoever is faster for a while
    /// makes up for nothing.
    pub fn share_of(&self, rate: f64, from: f64, to: f64) -> Option<f64> {
        let inside = self.seen.windows(2);
        let inside = inside.filter(|pair| pair[0].0 >= from && pair[1].0 <= to);
        let (mut stepped, mut allowed) = (0.0, 0.0);
        for pair in inside {
            let most = rate * (pair[1].0 - pair[0].0);
            stepped += (pair[1].1.saturating_sub(pair[0].1) as f64).min(most);
            allowed += most;
        }
        (allowed > 0.0).then(|| stepped / allowed)
    }

    /// Its course for the details: seconds since a moment, and MiB stepped a second since the look before.
    pub fn course(&self, zero: f64) -> Value {
        let rate = |pair: &[(f64, u64)]| {
            let pages = pair[1].1.saturating_sub(pair[0].1) as f64;
            let mib_per_s = pages / 256.0 / (pair[1].0 - pair[0].0).max(1e-6);
            json!([round(pair[1].0 - zero), round(mib_per_s)])
        };
        Value::Array(self.seen.windows(2).map(rate).collect())
    }
}

fn rate_of(seen: &[(f64, u64)], from: f64, to: f64) -> Option<f64> {
    let mut inside = seen.iter().filter(|(at, _)| (from..=to).contains(at));
    let first = inside.next()?;
    let last = inside.next_back()?;
    (last.0 > first.0).then(|| (last.1.saturating_sub(first.1)) as f64 / (last.0 - first.0))
}

fn round(value: f64) -> f64 {
    (value * 100.0).round() / 100.0
}

/// Real mode at 9020:0000: cli; mark the memory; halt for ever.
fn idle_kernel() -> Vec<u8> {
    const SETUP_SECTORS: u8 = 4;
    let segment = (MARK_AT >> 4) as u16;
    let mut code = vec![0xFA, 0xB8]; // cli; mov ax, segment
    code.extend(segment.to_le_bytes());
    code.extend([0x8E, 0xD8]); // mov ds, ax
    code.extend([0x66, 0xC7, 0x06, 0x00, 0x00]); // mov dword [0], mark
    code.extend(MARK);
    code.extend([0xF4, 0xEB, 0xFD]); // hlt; jmp to the hlt
    let mut file = vec![0; 512];
    file[0x1F1] = SETUP_SECTORS;
    file[0x1FE..0x200].copy_from_slice(&[0x55, 0xAA]);
    file.extend(code);
    file.resize((usize::from(SETUP_SECTORS) + 2) * 512, 0);
    file
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_idle_kernel_ends_in_a_loop_around_its_halt() {
        let file = idle_kernel();
        assert_eq!(file.len(), 6 * 512);
        assert_eq!(file[512..516], [0xFA, 0xB8, 0x00, 0x80]);
        let halt = file.iter().rposition(|byte| *byte == 0xF4).unwrap();
        assert_eq!(file[halt..halt + 3], [0xF4, 0xEB, 0xFD]);
    }

    #[test]
    fn spins_make_the_rate_that_is_asked_for() {
        let spins = Spins::from_rates(400_000.0, 4_000.0, 1_000);
        let turns = spins.for_rate(Some(16.0));
        let page_s = spins.page_s + spins.turn_s * f64::from(turns);
        assert!((1.0 / page_s - 4096.0).abs() < 20.0, "{page_s}");
        assert_eq!(spins.for_rate(None), 0);
        assert_eq!(spins.for_rate(Some(0.0)), u32::MAX);
    }

    #[test]
    fn speeds_are_taken_between_moments() {
        let steps = Steps {
            seen: vec![(0.0, 0), (1.0, 100), (2.0, 200), (3.0, 250)],
            read: vec![(0.0, 10), (2.0, 30)],
        };
        assert_eq!(steps.read_rate(0.0, 2.0), Some(10.0));
        assert_eq!(steps.read_rate(0.5, 2.0), None);
        assert_eq!(steps.rate(0.0, 2.0), Some(100.0));
        assert_eq!(steps.rate(2.0, 3.0), Some(50.0));
        assert_eq!(steps.rate(2.5, 3.0), None);
    }
}
