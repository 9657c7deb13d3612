//! Whether another iteration brings both sides nearer, whether the guest may be held for the last one, or whether it is of no use.
//!
//! As in "The Design and Evolution of Live Storage Migration in VMware ESX", section 2.5: as long as what is left becomes much less, it
//! goes on. Where it did not in the last two iterations, the guest is held if it would wait for less than the limit, and else the
//! move is given up. Two, and not one: a guest that writes much for a moment ends no move.
//!
//! Whoever could hold the guest and does not waits for something else, be it for hours: iterations go on, and no time counts. A burst
//! of writes ends nothing then either: the iterations after it are judged as the first ones were, for a hundred bursts.
//!
//! Pure: it is told what each iteration came to. Owns what it was told. Refuses: to hold a guest for longer than the limit, as far as can
//! be told beforehand, and to iterate for much longer than the first pass took before the guest could be held for the first time, or
//! after a burst.

/// For so long a guest's requests may wait, s: the paper's limit.
pub const DOWNTIME_MAX_S: f64 = 5.0;
/// For so long of it the last blocks may be copied, s. The rest is for what follows: a second image that is made durable, a record that is written,
/// a disk that stands still.
pub const LAST_COPY_MAX_S: f64 = 3.0;
/// So short a wait is not worth another iteration, s: it costs each block that is written meanwhile once more, and the change of images
/// alone takes as long on slow storage.
const SHORT_S: f64 = 0.2;
/// An iteration has brought both sides nearer where it leaves no more than this part of what the one before left.
const NEARER: f64 = 0.75;
/// All iterations together may take so many times as long as the first pass,
const PASSES_MAX: f64 = 3.0;
/// and so long besides, s: the first pass over a small disk takes a moment, in which nothing can be seen.
const LONGER_S: f64 = 60.0;
/// So many bursts are forgiven while the guest could be held and is not: who writes that often comes to no end.
const BURSTS_MAX: u32 = 100;

/// For so long the last blocks may be copied, s, of a guest whose requests have waited for so long before: what it may wait for in all
/// attempts together is [`DOWNTIME_MAX_S`].
pub fn last_copy_limit_s(held_s: f64) -> f64 {
    (DOWNTIME_MAX_S - held_s).clamp(0.0, LAST_COPY_MAX_S)
}

/// What an iteration came to.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Iteration {
    /// 1 is the first pass.
    pub number: u32,
    /// Bytes that were copied.
    pub copied: u64,
    /// How long it took, s.
    pub seconds: f64,
    /// Bytes of blocks that were dirty when it ended,
    pub dirty: u64,
    /// and of those of them that are hot.
    pub hot: u64,
    /// Bytes of dirty blocks that it left out, since they were hot.
    pub deferred: u64,
}

/// What an iteration is followed by.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Decision {
    /// Another iteration, without what is hot.
    GoOn,
    /// Another one, with all that is dirty.
    GoOnWithHot,
    /// The guest's requests may be held for the last one.
    Finish,
    /// It is of no use.
    Abort(Why),
}

/// Why it is of no use.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Why {
    /// What is left becomes no less, and the guest would wait for so long, s.
    NoNearer { wait_s: f64 },
    /// It has taken as long as it may, s, and the guest would wait for so long, s.
    TooLong { taken_s: f64, wait_s: f64 },
}

impl std::fmt::Display for Why {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let way_out = "the mirror, which is the default method, moves such a disk; or try again when the guest writes less";
        match self {
            Self::NoNearer { wait_s } => write!(
                f,
                "the guest writes as fast as its blocks are copied: it would wait for about {wait_s:.1} s for the last of them, and may for {DOWNTIME_MAX_S} s: {way_out}"
            ),
            Self::TooLong { taken_s, wait_s } => write!(
                f,
                "after {taken_s:.0} s the guest would still wait for about {wait_s:.1} s for its last blocks, and may for {DOWNTIME_MAX_S} s: {way_out}"
            ),
        }
    }
}

/// What the iterations of one disk came to.
#[derive(Debug, Clone)]
pub struct Convergence {
    /// The last two, as bytes and s.
    last: [(u64, f64); 2],
    /// Whether the last two brought both sides nearer.
    nearer: [bool; 2],
    /// Bytes that the iteration before left, but what is hot.
    left: u64,
    first_s: f64,
    taken_s: f64,
    /// Whether what is hot is copied, too,
    with_hot: bool,
    /// and whether the guest could have been held before, with no burst since.
    could_finish: bool,
    /// How many bursts were forgiven.
    bursts: u32,
    #[cfg(feature = "planted-faults")]
    plant: Option<crate::Plant>,
}

impl Default for Convergence {
    fn default() -> Self {
        Self {
            last: [(0, 0.0); 2],
            nearer: [true; 2],
            left: u64::MAX,
            first_s: 0.0,
            taken_s: 0.0,
            with_hot: false,
            could_finish: false,
            bursts: 0,
            #[cfg(feature = "planted-faults")]
            plant: None,
        }
    }
}

impl Convergence {
    /// The same with a fault.
    #[cfg(feature = "planted-faults")]
    pub fn plant(&mut self, plant: crate::Plant) {
        self.plant = Some(plant);
    }

    /// For how long the guest would wait, s, if so many bytes were left now: at the speed of the last two iterations.
    pub fn wait_s(&self, bytes: u64) -> f64 {
        let copied: u64 = self.last.iter().map(|(bytes, _)| bytes).sum();
        let seconds: f64 = self.last.iter().map(|(_, seconds)| seconds).sum();
        match (bytes, copied) {
            (0, _) => 0.0,
            // Nothing was copied: nobody knows.
            (_, 0) => f64::INFINITY,
            _ => bytes as f64 * seconds / copied as f64,
        }
    }

    /// An iteration has ended.
    pub fn decide(&mut self, ended: Iteration) -> Decision {
        if ended.number <= 1 {
            self.first_s = ended.seconds;
        }
        // Whoever could be held and is not waits for something else.
        if !self.could_finish {
            self.taken_s += ended.seconds;
        }
        if ended.copied > 0 {
            self.last = [self.last[1], (ended.copied, ended.seconds)];
        }
        if self.is_burst(ended) {
            return self.begin_anew();
        }
        let had_hot = self.with_hot;
        let left = match had_hot {
            true => ended.dirty,
            false => ended.dirty.saturating_sub(ended.hot),
        };
        let is_nearer = left as f64 <= NEARER * self.left as f64;
        self.nearer = [self.nearer[1], is_nearer];
        self.left = left;
        let may_end = self.wait_s(left) <= SHORT_S
            || self.nearer == [false; 2]
            || self.has_taken_too_long()
            || had_hot && self.wait_s(ended.dirty) <= LAST_COPY_MAX_S;
        let decision = match may_end {
            true => self.end(ended),
            false if had_hot => Decision::GoOnWithHot,
            false => Decision::GoOn,
        };
        self.could_finish |= decision == Decision::Finish;
        decision
    }

    /// Whether the guest could be held before this iteration and no more after it, and that is to be forgiven.
    fn is_burst(&self, ended: Iteration) -> bool {
        if planted!(self, BurstEndsIt) {
            return false;
        }
        let is_too_much = self.could_finish && self.wait_s(ended.dirty) > LAST_COPY_MAX_S;
        is_too_much && (self.bursts < BURSTS_MAX || planted!(self, BurstsForgivenForEver))
    }

    /// What is left is judged as if no iteration had been before, and time counts from here on.
    fn begin_anew(&mut self) -> Decision {
        self.bursts += 1;
        (self.left, self.nearer) = (u64::MAX, [true; 2]);
        (self.could_finish, self.taken_s) = (false, 0.0);
        Decision::GoOnWithHot
    }

    fn has_taken_too_long(&self) -> bool {
        self.taken_s > PASSES_MAX * self.first_s + LONGER_S
    }

    /// No more iterations without what is hot.
    fn end(&mut self, ended: Iteration) -> Decision {
        if ended.hot > 0 && !self.with_hot {
            // The last but one: what is hot then is to be seen, and no iteration before it had that.
            (self.with_hot, self.left, self.nearer) = (true, u64::MAX, [true; 2]);
            return Decision::GoOnWithHot;
        }
        self.with_hot = true;
        let wait_s = self.wait_s(ended.dirty);
        if wait_s <= LAST_COPY_MAX_S {
            return Decision::Finish;
        }
        Decision::Abort(match self.has_taken_too_long() {
            true => Why::TooLong {
                taken_s: self.taken_s,
                wait_s,
            },
            false => Why::NoNearer { wait_s },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// Iterations of a disk that is copied with 100 MiB a second, each of what the one before left.
    fn decisions(first: u64, left: &[u64]) -> Vec<Decision> {
        let (mut convergence, mut copied) = (Convergence::default(), first);
        let decided = left.iter().zip(1..).map(|(left, number)| {
            let ended = Iteration {
                number,
                copied: copied * MIB,
                seconds: copied as f64 / 100.0,
                dirty: left * MIB,
                ..Iteration::default()
            };
            copied = *left;
            convergence.decide(ended)
        });
        decided.collect()
    }

    #[test]
    fn it_goes_on_while_ever_less_is_left_and_ends_once_little_is() {
        use Decision::{Finish, GoOn};
        let decided = decisions(10_000, &[5000, 2500, 1000, 300, 100, 20]);
        assert_eq!(decided, [GoOn, GoOn, GoOn, GoOn, GoOn, Finish]);
        assert_eq!(decisions(10_000, &[0]), [Finish]);
    }

    #[test]
    fn one_iteration_that_is_no_nearer_ends_nothing_and_two_end_it_either_way() {
        use Decision::{Abort, Finish, GoOn};
        // A burst, and then on as before.
        let decided = decisions(10_000, &[1000, 1200, 500, 200, 10]);
        assert_eq!(decided, [GoOn, GoOn, GoOn, GoOn, Finish]);
        let decided = decisions(10_000, &[1000, 280, 270, 290]);
        assert_eq!(
            decided,
            [GoOn, GoOn, GoOn, Finish],
            "it would wait for 2.9 s"
        );
        let decided = decisions(10_000, &[1000, 900, 950]);
        let [.., Abort(why)] = &decided[..] else {
            panic!("{decided:?}");
        };
        let said = why.to_string();
        assert!(said.contains("would wait for about 9.5 s"), "{said}");
        assert!(said.contains("the mirror"), "{said}");
    }

    #[test]
    fn what_comes_no_nearer_on_the_whole_ends_some_time() {
        let swinging: Vec<u64> = (0..100).map(|round| 1000 + round % 2 * 1000).collect();
        let decided = decisions(10_000, &swinging);
        let ends = decided.iter().position(|one| *one != Decision::GoOn);
        let ends = ends.expect("it goes on for ever");
        assert!((15..40).contains(&ends), "{ends}");
        let Decision::Abort(Why::TooLong { taken_s, .. }) = decided[ends] else {
            panic!("{:?}", decided[ends]);
        };
        assert!((360.0..400.0).contains(&taken_s), "{taken_s}");
    }

    #[test]
    fn what_is_hot_is_copied_in_the_last_iteration_but_one() {
        let mut convergence = Convergence::default();
        let mut ended = |number, copied: u64, cold: u64, hot: u64| {
            convergence.decide(Iteration {
                number,
                copied: copied * MIB,
                seconds: copied as f64 / 100.0,
                dirty: (cold + hot) * MIB,
                hot: hot * MIB,
                deferred: 0,
            })
        };
        assert_eq!(ended(1, 10_000, 1000, 200), Decision::GoOn);
        assert_eq!(ended(2, 1000, 100, 200), Decision::GoOn);
        assert_eq!(ended(3, 100, 10, 200), Decision::GoOnWithHot);
        assert_eq!(ended(4, 210, 20, 190), Decision::Finish, "2.1 s");
        // Nobody has held it, and the guest writes more than it did, from then on.
        assert_eq!(ended(5, 210, 300, 190), Decision::GoOnWithHot);
        assert_eq!(ended(6, 490, 300, 190), Decision::GoOnWithHot);
        assert_eq!(ended(7, 490, 300, 190), Decision::GoOnWithHot);
        assert!(matches!(ended(8, 490, 300, 190), Decision::Abort(_)));
    }

    #[test]
    fn a_burst_of_writes_while_the_guest_waits_for_something_else_ends_nothing() {
        use Decision::{Abort, Finish, GoOn, GoOnWithHot};
        let waits = [1000, 280, 270, 290];
        let decided = decisions(10_000, &[&waits[..], &[1000, 290, 290]].concat());
        let expected = [GoOn, GoOn, GoOn, Finish, GoOnWithHot, Finish, Finish];
        assert_eq!(decided, expected);
        // What does not pass is no burst.
        let decided = decisions(10_000, &[&waits[..], &[1000; 4]].concat());
        assert_eq!(decided[4..7], [GoOnWithHot; 3]);
        assert!(matches!(decided[7], Abort(_)), "{decided:?}");
    }

    #[test]
    fn after_a_burst_time_counts_again() {
        // Hours of waiting before it count for nothing; then it swings.
        let waits = [5000, 10].into_iter().chain([280; 5000]);
        let swings = (0..1000).map(|round| 1000 + round % 2 * 1000);
        let decided = decisions(10_000, &waits.chain(swings).collect::<Vec<_>>());
        assert_eq!(decided[5001], Decision::Finish);
        let ends = decided
            .iter()
            .rposition(|one| *one == Decision::GoOnWithHot);
        let ends = ends.expect("it ends at once") + 1;
        assert!((5015..5040).contains(&ends), "{ends}");
        let why = decided[ends];
        assert!(
            matches!(why, Decision::Abort(Why::TooLong { .. })),
            "{why:?}"
        );
    }

    #[test]
    fn a_guest_that_bursts_for_ever_comes_to_an_end() {
        let bursts = (0..1000).flat_map(|_| [1000, 100, 100]);
        let left: Vec<u64> = [100; 3].into_iter().chain(bursts).collect();
        let decided = decisions(10_000, &left);
        let is_over = |one: &Decision| matches!(one, Decision::Abort(_));
        let ends = decided.iter().position(is_over);
        let before = &decided[..ends.expect("it goes on for ever")];
        let is_forgiven = |one: &&Decision| **one == Decision::GoOnWithHot;
        let forgiven = before.iter().filter(is_forgiven).count();
        assert_eq!(forgiven, BURSTS_MAX as usize);
    }

    #[test]
    fn all_attempts_together_hold_a_guest_for_no_longer_than_the_limit() {
        let limits = [0.0, 1.0, 3.0, 4.5, 5.0, 7.0].map(last_copy_limit_s);
        assert_eq!(limits, [3.0, 3.0, 2.0, 0.5, 0.0, 0.0]);
    }

    #[test]
    fn nobody_knows_how_long_a_guest_would_wait_before_anything_was_copied() {
        let convergence = Convergence::default();
        assert_eq!(convergence.wait_s(0), 0.0);
        assert!(convergence.wait_s(1).is_infinite());
    }
}
