//! What snapshotting decides: when another redo log is put over a disk that moves, and when the last one is small enough to hold its guest for.
//!
//! The disk is frozen under a redo log, to which its guest writes from then on, and what is frozen is copied. Then another log is put over,
//! and the one before is consolidated into the copy, and so on; at the end the guest's requests are held for the last log ("The Design and Evolution
//! of Live Storage Migration in VMware ESX", section 2.2). A laboratory method beside IO mirroring (`godwit_mirror`), which needs no end like that.
//!
//! Pure: no IO and no clock. Whoever drives it does each [`Step`], and tells that it is done and what it came to.
//!
//! Who owns the state: the value. Refuses: more logs than [`LOGS_MAX`], and to hold a guest for longer than [`DOWNTIME_MAX_S`] in all attempts
//! together, as far as that can be told beforehand.
//!
//! What holds at each moment:
//! 1. A log is durable before it is put over the disk: whoever finds the disk described as lying under it finds it.
//! 2. The former image and all logs together are the disk until [`Step::Record`] is done; so nothing of them is given up before.
//! 3. Only a log is consolidated that nobody writes to: one that lies under another, or the last one of a guest that is held.
//! 4. Logs are consolidated in their order, each of them, before the record is written: so the copy is the disk then.
//!
//! It comes to an end at every load that storage bears: as long as each log is much smaller than the one before, and small enough before there are as many as there may
//! be, it goes on, and a guest that writes as fast as its logs are consolidated is slowed until that is so ([`Redo::slows_to`]).

#![forbid(unsafe_code)]

#[macro_use]
mod plant;

#[cfg(feature = "planted-faults")]
pub use plant::Plant;

/// For so long a guest's requests may wait, s, in all attempts together: the paper's limit for dirty block tracking.
pub const DOWNTIME_MAX_S: f64 = 5.0;
/// For so long of it the last log may be consolidated, s, while another log can be put over instead. The rest is for what comes before and after: what the guest was told is made durable, a
/// record is written, a disk stands still.
pub const LAST_LOG_MAX_S: f64 = 3.0;
/// For so long a guest may be held for its last log in one attempt, s, beside [`DOWNTIME_MAX_S`] for all of them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bounds {
    /// While another log can be put over instead,
    pub ready_s: f64,
    /// and where there is no other try.
    pub last_try_s: f64,
    /// By so many logs each should be small enough, so that others are left for what comes between; a guest is slowed for that.
    pub logs: u32,
}

impl Bounds {
    /// Of a disk that moves on its host: it is held as soon as it may.
    pub const ON_ITS_HOST: Self = Self {
        ready_s: LAST_LOG_MAX_S,
        last_try_s: DOWNTIME_MAX_S,
        logs: LOGS_MAX,
    };
    /// Of a VM that goes to another host: its memory follows before it is held, and its log grows meanwhile.
    pub const TO_ANOTHER_HOST: Self = Self {
        ready_s: 1.0,
        last_try_s: LAST_LOG_MAX_S,
        logs: LOGS_MAX / 2,
    };
}

/// So short a wait is not worth another log, s.
pub const SHORT_S: f64 = 0.2;
/// Most logs of one disk: they lie over one another until its end, and each is looked into for what is read.
pub const LOGS_MAX: u32 = 24;
/// Bytes in a second that are counted on before anything was consolidated, and nobody knows how fast that goes: storage that is slower is rare.
const UNKNOWN: f64 = 20.0 * 1_048_576.0;
/// A consolidation has brought both sides nearer where the log that grew meanwhile holds no more than this part of what it took.
const NEARER: f64 = 0.75;
/// The same once the guest is slowed: a log that holds the whole disk does not tell how much faster it writes, so that it may have to be slowed again.
const NEARER_SLOWED: f64 = 0.5;
/// A guest that is slowed is to leave logs of this part of the one before: with that the largest disk comes to its end within [`LOGS_MAX`].
const WANTED: f64 = 0.35;
/// No guest is slowed to less than this part of what it did.
const PART_MIN: f64 = 0.02;
/// After so many consolidations in a row that brought nothing nearer a guest is held if that is short enough, and else slowed.
const STUCK: u32 = 2;
/// Nothing is faster than can be measured, s.
const SHORTEST_S: f64 = 0.001;

/// What a copying or a consolidation came to: `bytes` are those that the log took, as they are counted of the one that grows.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Work {
    pub bytes: u64,
    pub seconds: f64,
}

/// What is to be done next. Logs have numbers from 1 on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Step {
    /// This log is made, empty and durable; then [`Redo::done`].
    Make(u32),
    /// It is put over the disk: what the guest writes goes there from now on, and what is below is frozen; then [`Redo::done`].
    PutOver(u32),
    /// The former image, which is frozen, is copied; then [`Redo::ended`].
    CopyBase,
    /// This log, which is frozen, is consolidated into the copy; then [`Redo::ended`].
    Consolidate(u32),
    /// The guest's requests are held, and what it was told is durable; then [`Redo::done`]. Where the guest works on before the record is
    /// written, for whatever reason, [`Redo::let_go`].
    Hold,
    /// This log, the last one, is consolidated, and the copy is durable; then [`Redo::done`].
    ConsolidateLast(u32),
    /// It is written, durably, that the copy is the disk.
    Record,
    /// It is of no use.
    GiveUp(Why),
}

/// Why it is of no use.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Why {
    /// After the most logs that there may be the guest would wait for so long, s, and may for so long.
    TooMuch { wait_s: f64, may_s: f64 },
    /// The guest was held for so long in vain, s.
    HeldInVain { held_s: f64 },
}

impl std::fmt::Display for Why {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let way_out = "the mirror, which is the default method, moves such a disk; or try again when the guest writes less";
        match self {
            Self::TooMuch { wait_s, may_s } => write!(
                f,
                "after {LOGS_MAX} redo logs the guest would still wait for about {wait_s:.1} s for the last one, and may for {may_s:.1} s: {way_out}"
            ),
            Self::HeldInVain { held_s } => write!(
                f,
                "the guest was held for its last redo log for {held_s:.1} s in all attempts together, and had to go on each time before the move was complete: {way_out}"
            ),
        }
    }
}

/// How far one disk is.
#[derive(Debug, Clone)]
pub struct Redo {
    step: Step,
    /// The log that the guest writes to; 0 before there is one.
    top: u32,
    /// Bytes in a second of the last consolidation, if there was one.
    speed: Option<f64>,
    /// How many consolidations in a row brought nothing nearer.
    stuck: u32,
    /// How long the guest was held in vain, s.
    held_s: f64,
    slows_to: Option<f64>,
    was_slowed: bool,
    bounds: Bounds,
    #[cfg(feature = "planted-faults")]
    plant: Option<Plant>,
}

impl Default for Redo {
    fn default() -> Self {
        Self {
            step: Step::Make(1),
            top: 0,
            speed: None,
            stuck: 0,
            held_s: 0.0,
            slows_to: None,
            was_slowed: false,
            bounds: Bounds::ON_ITS_HOST,
            #[cfg(feature = "planted-faults")]
            plant: None,
        }
    }
}

impl Redo {
    /// The course of disks whose guest may be held within these.
    #[must_use]
    pub fn within(bounds: Bounds) -> Self {
        Self {
            bounds,
            ..Self::default()
        }
    }

    /// A disk's course that does this fault, for tests that must find it.
    #[cfg(feature = "planted-faults")]
    #[must_use]
    pub fn with(self, plant: Plant) -> Self {
        let mut redo = Self {
            plant: Some(plant),
            ..self
        };
        redo.another_log();
        redo
    }

    pub fn step(&self) -> Step {
        self.step
    }

    /// How many logs there are.
    pub fn logs(&self) -> u32 {
        self.top
    }

    /// To what part of what it did during the last consolidation the guest is to be slowed from now on; nothing where it goes on as it does.
    pub fn slows_to(&self) -> Option<f64> {
        self.slows_to
    }

    /// For how long the guest would wait, s, for a last log of so many bytes: at the speed of the last consolidation.
    pub fn wait_s(&self, bytes: u64) -> f64 {
        bytes as f64 / self.speed.unwrap_or(UNKNOWN)
    }

    /// For how long the guest may be held for its last log now, s: whoever holds it on its host lets it go then.
    pub fn limit_s(&self) -> f64 {
        let left = (DOWNTIME_MAX_S - self.held_s).max(0.0);
        match self.top >= LOGS_MAX {
            true => left.min(self.bounds.last_try_s),
            false => left.min(self.bounds.ready_s),
        }
    }

    /// What is to be done is done: of [`Step::Make`], [`Step::PutOver`], [`Step::Hold`] and [`Step::ConsolidateLast`]. Changes nothing else.
    pub fn done(&mut self) {
        self.step = match self.step {
            Step::Make(log) => Step::PutOver(log),
            Step::PutOver(log) => {
                self.top = log;
                match log {
                    0 | 1 => Step::CopyBase,
                    _ if planted!(self, LogForgotten) => Step::Hold,
                    log => Step::Consolidate(log - 1),
                }
            }
            Step::Hold if planted!(self, LastLogForgotten) => Step::Record,
            Step::Hold => Step::ConsolidateLast(self.top),
            Step::ConsolidateLast(_) => Step::Record,
            other => other,
        };
    }

    /// [`Step::CopyBase`] or [`Step::Consolidate`] has come to this, and the log that the guest writes to holds so many bytes by now.
    pub fn ended(&mut self, work: Work, top_bytes: u64) {
        self.slows_to = None;
        match self.step {
            Step::CopyBase => match self.wait_s(top_bytes) <= SHORT_S {
                true => self.hold(),
                false => self.another_log(),
            },
            Step::Consolidate(_) => self.decide(work, top_bytes),
            _ => {}
        }
    }

    fn decide(&mut self, work: Work, top_bytes: u64) {
        if work.bytes > 0 {
            self.speed = Some(work.bytes as f64 / work.seconds.max(SHORTEST_S));
        }
        let part = if self.was_slowed {
            NEARER_SLOWED
        } else {
            NEARER
        };
        let shrinks_to = top_bytes as f64 / (work.bytes as f64).max(1.0);
        let is_nearer = shrinks_to <= part && self.comes_to_its_end(shrinks_to, top_bytes);
        self.stuck = match is_nearer {
            true => 0,
            false => self.stuck.saturating_add(1),
        };
        let wait_s = self.wait_s(top_bytes);
        let is_stuck = self.stuck >= STUCK;
        let may_hold = wait_s <= self.limit_s() || planted!(self, WaitsForEver) && is_stuck;
        if wait_s <= SHORT_S || is_stuck && may_hold {
            return self.hold();
        }
        if self.top >= LOGS_MAX && !planted!(self, LogsForEver) {
            return match may_hold {
                true => self.hold(),
                false => self.give_up(wait_s),
            };
        }
        if is_stuck && !planted!(self, NeverSlowed) {
            let part = WANTED * work.bytes as f64 / (top_bytes as f64).max(1.0);
            self.slows_to = Some(part.clamp(PART_MIN, 1.0));
            self.was_slowed = true;
        }
        self.another_log();
    }

    /// Whether a log of so many bytes is small enough before there are as many as there should be, if each one shrinks to this part of the one before.
    fn comes_to_its_end(&self, shrinks_to: f64, bytes: u64) -> bool {
        let too_long = self.wait_s(bytes) / SHORT_S;
        if too_long <= 1.0 || planted!(self, LogsNotCounted) {
            return true;
        }
        let left = f64::from(self.bounds.logs.saturating_sub(self.top));
        too_long.ln() <= left * -shrinks_to.max(f64::MIN_POSITIVE).ln()
    }

    /// The guest was held for so long, s, and works on, since the record could not be written then.
    pub fn let_go(&mut self, held_s: f64) {
        self.held_s += held_s.max(0.0);
        match self.top >= LOGS_MAX || self.limit_s() <= 0.0 {
            true => {
                self.step = Step::GiveUp(Why::HeldInVain {
                    held_s: self.held_s,
                });
            }
            false => self.another_log(),
        }
    }

    /// The guest could be held and was not, since something else was not ready, and the log that it writes to holds so many bytes by now, which are
    /// too many: another log is put over.
    pub fn grown(&mut self, top_bytes: u64) {
        if self.step != Step::Hold {
            return;
        }
        self.slows_to = None;
        let wait_s = self.wait_s(top_bytes);
        match self.top >= LOGS_MAX {
            true if wait_s > self.limit_s() => self.give_up(wait_s),
            true => {}
            false => self.another_log(),
        }
    }

    fn give_up(&mut self, wait_s: f64) {
        let may_s = self.limit_s();
        self.step = Step::GiveUp(Why::TooMuch { wait_s, may_s });
    }

    fn another_log(&mut self) {
        let next = self.top + 1;
        self.step = match planted!(self, PutOverBeforeMade) {
            true => Step::PutOver(next),
            false => Step::Make(next),
        };
    }

    fn hold(&mut self) {
        self.step = match planted!(self, NotHeld) {
            true => Step::ConsolidateLast(self.top),
            false => Step::Hold,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// A disk whose base is copied, with a log of so many MiB.
    fn copied(top_mib: u64) -> Redo {
        let mut redo = Redo::default();
        redo.done();
        assert_eq!(redo.step(), Step::PutOver(1));
        redo.done();
        assert_eq!(redo.step(), Step::CopyBase);
        redo.ended(Work::default(), top_mib * MIB);
        redo
    }

    /// The next log is put over, and the one before, of so many MiB, consolidated in so long; the next one holds so many MiB.
    fn consolidates(redo: &mut Redo, (mib, seconds): (u64, f64), top_mib: u64) {
        redo.done();
        redo.done();
        assert!(matches!(redo.step(), Step::Consolidate(_)), "{redo:?}");
        let bytes = mib * MIB;
        redo.ended(Work { bytes, seconds }, top_mib * MIB);
    }

    #[test]
    fn logs_follow_one_another_until_the_last_is_small_at_the_speed_that_was_measured() {
        let mut redo = copied(1000);
        consolidates(&mut redo, (1000, 10.0), 300);
        assert_eq!(redo.step(), Step::Make(3));
        consolidates(&mut redo, (300, 3.0), 90);
        consolidates(&mut redo, (90, 0.9), 15);
        assert_eq!((redo.step(), redo.logs()), (Step::Hold, 4));
        redo.done();
        assert_eq!(redo.step(), Step::ConsolidateLast(4));
        redo.done();
        assert_eq!(redo.step(), Step::Record);
    }

    #[test]
    fn a_small_log_beside_the_copying_needs_no_other() {
        assert_eq!(copied(3).step(), Step::Hold);
        assert_eq!(copied(5).step(), Step::Make(2));
        // Whoever was held in vain goes on, also where nothing was written.
        let mut redo = copied(1);
        redo.let_go(0.1);
        consolidates(&mut redo, (0, 0.0), 1);
        assert_eq!((redo.step(), redo.logs()), (Step::Hold, 2));
    }

    #[test]
    fn a_guest_that_writes_as_fast_is_held_if_that_is_short_and_else_slowed() {
        let mut redo = copied(200);
        consolidates(&mut redo, (200, 2.0), 200);
        assert_eq!((redo.step(), redo.slows_to()), (Step::Make(3), None));
        consolidates(&mut redo, (200, 2.0), 200);
        assert_eq!(redo.step(), Step::Hold);
        let mut redo = copied(2000);
        consolidates(&mut redo, (2000, 20.0), 2000);
        consolidates(&mut redo, (2000, 20.0), 4000);
        assert_eq!(redo.slows_to(), Some(WANTED / 2.0));
        consolidates(&mut redo, (4000, 40.0), 2000);
        assert_eq!((redo.step(), redo.slows_to()), (Step::Make(5), None));
    }

    #[test]
    fn a_log_that_has_grown_before_its_guest_was_held_gets_another_one_over_it_while_there_may_be_one()
     {
        let mut redo = copied(1);
        redo.grown(300 * MIB);
        assert_eq!(redo.step(), Step::Make(2));
        redo.grown(300 * MIB);
        assert_eq!(
            redo.step(),
            Step::Make(2),
            "nothing but a wait is broken off"
        );
        consolidates(&mut redo, (300, 3.0), 1);
        for _ in 2..LOGS_MAX {
            redo.grown(300 * MIB);
            consolidates(&mut redo, (300, 3.0), 1);
        }
        assert_eq!((redo.step(), redo.logs()), (Step::Hold, LOGS_MAX));
        redo.grown(300 * MIB);
        assert_eq!(redo.step(), Step::Hold, "it may be held for that");
        redo.grown(3000 * MIB);
        assert!(matches!(redo.step(), Step::GiveUp(Why::TooMuch { .. })));
    }

    #[test]
    fn a_guest_whose_logs_shrink_too_slowly_for_as_many_as_there_may_be_is_slowed() {
        const GIB: u64 = 1024;
        // Each log is 0.7 of the one before: 30 logs from 20000 s to 0.2 s, and 20 from 300 s.
        let shrinks = |seconds: f64| {
            let mut redo = copied(400 * GIB);
            consolidates(&mut redo, (400 * GIB, seconds), 280 * GIB);
            consolidates(&mut redo, (280 * GIB, seconds * 0.7), 196 * GIB);
            redo.slows_to()
        };
        assert_eq!(shrinks(300.0), None);
        let part = shrinks(20_000.0).unwrap();
        assert!((part - WANTED / 0.7).abs() < 1e-6, "{part}");
    }

    #[test]
    fn a_guest_that_was_held_in_vain_waits_for_less_the_next_time_and_not_for_ever() {
        let mut redo = copied(1);
        redo.let_go(3.0);
        assert_eq!((redo.step(), redo.limit_s()), (Step::Make(2), 2.0));
        redo.let_go(2.0);
        let Step::GiveUp(why) = redo.step() else {
            panic!("{redo:?}");
        };
        assert!(why.to_string().contains("for 5.0 s in all"), "{why}");
    }
}
