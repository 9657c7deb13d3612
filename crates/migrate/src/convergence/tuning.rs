//! The figures that [`super::Convergence`] decides with, each with its reason.
//!
//! Pure. They were chosen with the simulated guests and links of this crate's tests, which fail when one is far off.

/// What a migration is decided with.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tuning {
    /// The guest may dirty at most this share of what the link carries, so that each iteration leaves less than the last.
    pub allowed_share: f64,
    /// No allowance is below this share: a slower guest stands still for all practical purposes.
    pub allowed_share_min: f64,
    /// An iteration that would leave more than this share of the last one dirty is no progress.
    pub progress_share: f64,
    /// The guest is stopped when the predicted pause is at most this share of the target; the rest is for what a
    /// prediction cannot know.
    pub promise_share: f64,
    /// The time that is left to the deadline is used up to this share, since an iteration may take longer than predicted.
    pub deadline_share: f64,
    /// Last pages that take less than this are not worth another iteration, s.
    pub short_s: f64,
    /// Nor are those that take less than this share of a round trip: over a long link the pause is made of round trips,
    /// and each further iteration costs at least one.
    pub short_of_trip: f64,
    /// Another iteration is worth its time only if it shrinks the last pages below this share.
    pub worth_share: f64,
    /// The guest's allowance in an iteration whose only aim is a shorter pause.
    pub squeeze_share: f64,
    /// At most so many iterations have a shorter pause as their only aim.
    pub squeezes_max: u32,
    /// What is dirty counts as less than before only below this share of it; measured bytes differ by that much by chance.
    pub better_share: f64,
    /// A guest that dirties more than this times its allowance is not held; up to there it is the governor's error.
    pub overspent: f64,
    /// A guest that is not held has this long to converge, s, and `stuck_iterations`, whichever is later.
    pub stuck_s: f64,
    /// So many iterations at least pass before a guest that is not held is given up or slowed more.
    pub stuck_iterations: u32,
    /// One that could be slowed more has its allowance lowered by what it overspends, in each iteration by this factor
    /// at most, and it is raised by the same factor once the guest is held.
    pub stuck_factor: f64,
    /// The allowance is lowered by this factor at the least in one iteration, so that one odd measurement stops no guest.
    pub stuck_factor_min: f64,
    /// From this iteration on the allowance falls by `impatience` with each: what was measured is not what happens.
    pub patient_iterations: u32,
    /// Factor of the allowance in each iteration after `patient_iterations`.
    pub impatience: f64,
    /// A migration that has not ended after so many iterations is given up.
    pub iterations_max: u32,
    /// A pass over fewer bytes says more about its round trips than about the link.
    pub bytes_measurable: u64,
    /// A pass that took this long is believed to show the link's speed, s.
    pub seconds_measurable: f64,
    /// First estimate of what an iteration costs beside its pages and a round trip, s.
    pub overhead_s: f64,
    /// How much a short pass counts for the estimate of that cost; the rest is what was estimated before.
    pub overhead_weight: f64,
}

pub(super) const TUNING: Tuning = Tuning {
    allowed_share: 0.8,
    allowed_share_min: 0.02,
    progress_share: 0.85,
    promise_share: 0.85,
    deadline_share: 0.8,
    short_s: 0.002,
    short_of_trip: 0.2,
    worth_share: 0.7,
    squeeze_share: 0.5,
    squeezes_max: 8,
    better_share: 0.9,
    overspent: 1.15,
    stuck_s: 6.0,
    stuck_iterations: 5,
    stuck_factor: 0.6,
    stuck_factor_min: 0.25,
    patient_iterations: 40,
    impatience: 0.95,
    iterations_max: 500,
    bytes_measurable: 4 << 20,
    seconds_measurable: 0.1,
    overhead_s: 0.003,
    overhead_weight: 0.3,
};
