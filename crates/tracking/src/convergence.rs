//! Whether another iteration brings both sides nearer, whether the guest may be held for the last one, or whether it is of no use.
//!
//! As in "The Design and Evolution of Live Storage Migration in VMware ESX", section 2.5: as long as what is left becomes much less, it
//! goes on. Where it did not in the last two iterations, the guest is held if it would wait for less than the limit, and else the
//! move is given up. Two, and not one: a guest that writes much for a moment ends no move.
//!
//! Pure: it is told what each iteration came to. Owns what it was told. Refuses: to hold a guest for longer than the limit, as far as can
//! be told beforehand, and to go on for much longer than the first pass took.

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
    /// and whether the guest could have been held before.
    could_finish: bool,
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
        }
    }
}

impl Convergence {
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
        // Nobody has held it, and the guest writes more than it did.
        assert_eq!(ended(5, 210, 300, 190), Decision::GoOnWithHot);
        assert!(matches!(ended(6, 490, 300, 190), Decision::Abort(_)));
    }

    #[test]
    fn nobody_knows_how_long_a_guest_would_wait_before_anything_was_copied() {
        let convergence = Convergence::default();
        assert_eq!(convergence.wait_s(0), 0.0);
        assert!(convergence.wait_s(1).is_infinite());
    }
}
