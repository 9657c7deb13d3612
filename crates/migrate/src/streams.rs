//! How many data channels a migration uses, chosen anew while it runs.
//!
//! A pure function of what each short interval of a pass showed. A channel is added only for a reason that another one
//! can cure: a core is full and there are more, a buffer or window holds the channels back, or loss does while nothing
//! queues on the way. A full link is no reason, and what another channel takes from others on this host is no gain, so that
//! several migrations on one link do not outbid each other. A channel is taken out when the others can do its work. Each
//! change is a trial: what it brought is measured, and
//! without gain it is taken back and not tried again for a while, twice as long each time.
//!
//! Owns: the history of one set of channels. Refuses: to judge while a cap holds the channels back, or before what a
//! change did can be seen.

/// From this round trip on a link counts as long.
const LONG_RTT_S: f64 = 0.005;
/// Up to this round trip without queues a window of 4 MiB, which any kernel gives, holds 4 GB/s.
const NEAR_RTT_S: f64 = 0.001;
/// Channels that a long link begins with: each has to find the link's speed, and several find it sooner.
const LONG_STREAMS: u32 = 8;
/// Most channels that a near link begins with.
const NEAR_STREAMS_MAX: u32 = 4;
/// Most channels that are open at a time.
pub const STREAMS_OPEN_MAX: u32 = 16;
/// A speed is a mean over at least so long, s, and so many round trips.
const LOOK_S: f64 = 0.2;
const LOOK_RTTS: f64 = 4.0;
/// A new channel finds its speed in so long, s, and so many round trips.
const SETTLE_S: f64 = 0.1;
const SETTLE_RTTS: f64 = 10.0;
/// After a trial without gain nothing is tried for so long, s; twice as long after each further one.
const REST_S: f64 = 2.0;
const REST_DOUBLINGS_MAX: u32 = 5;
/// Less time than this before a full window is none to speak of.
const HEMMED_FEW: f64 = 0.1;
/// Share of a channel's fair part that it must bring to stay.
const GAIN_SHARE: f64 = 0.3;
/// Speed that may be lost when a channel is taken out: less than noise is no loss.
const LOSS_ALLOWED: f64 = 0.03;

/// What an interval of a pass showed. Shares are 0 to 1, means over the channels.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Facts {
    /// Its length, s.
    pub seconds: f64,
    /// Bytes that left on all channels.
    pub bytes: u64,
    /// Bytes that left this host, whoever sent them; none where it does not tell.
    pub host_bytes: Option<u64>,
    /// Time in which a channel's thread had a core.
    pub busy: f64,
    /// Time in which it had work and no core.
    pub starved: f64,
    /// Time in which the bandwidth cap held it back.
    pub capped: f64,
    /// Time in which a send buffer or a receive window was the limit.
    pub hemmed: f64,
    /// Bytes that were sent again, by bytes sent.
    pub repeated: f64,
    /// Round trip with queues by round trip without, 1 or more.
    pub queued: f64,
    pub rtt_s: f64,
    /// Whether the congestion control takes loss for a full link (BBR does not).
    pub minds_loss: bool,
}

/// What the two hosts have for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    /// Cores of this host.
    pub cores: u32,
    /// Routes that work; each carries at least one channel.
    pub routes: u32,
}

/// How the number of data channels should change now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    Keep,
    Add,
    Remove,
}

/// Channels to begin with. A round trip that was measured while others on this host filled the link says nothing of its
/// length.
pub fn first_streams(room: Room, rtt_s: f64, others_send: bool) -> u32 {
    let wanted = if rtt_s >= LONG_RTT_S && !others_send {
        LONG_STREAMS
    } else {
        room.cores.clamp(1, NEAR_STREAMS_MAX)
    };
    wanted.max(room.routes).min(STREAMS_OPEN_MAX)
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Phase {
    /// Nothing was changed lately.
    Watching,
    /// A change shows what it brings.
    Trying {
        added: bool,
        before: Speed,
        settle_s: f64,
    },
    /// The last trial brought nothing.
    Resting { left_s: f64 },
}

/// Of the channels, and of all that this host sends, in bytes per second.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Speed {
    ours: f64,
    host: Option<f64>,
}

/// Sums over several intervals.
#[derive(Debug, Clone, Copy)]
struct Seen {
    seconds: f64,
    ours_bytes: f64,
    host_bytes: Option<f64>,
}

impl Seen {
    const NOTHING: Self = Self {
        seconds: 0.0,
        ours_bytes: 0.0,
        host_bytes: Some(0.0),
    };

    fn add(&mut self, facts: Facts) {
        self.seconds += facts.seconds;
        self.ours_bytes += facts.bytes as f64;
        let host = self.host_bytes.zip(facts.host_bytes);
        self.host_bytes = host.map(|(sum, more)| sum + more as f64);
    }

    fn speed(&self) -> Speed {
        Speed {
            ours: self.ours_bytes / self.seconds,
            host: self.host_bytes.map(|bytes| bytes / self.seconds),
        }
    }
}

/// Chooses the number of channels.
#[derive(Debug, Clone)]
pub struct StreamPlan {
    room: Room,
    streams: u32,
    phase: Phase,
    fruitless: u32,
    seen: Seen,
}

impl StreamPlan {
    /// Begins with this many channels open.
    pub fn new(room: Room, streams: u32) -> Self {
        Self {
            room,
            streams,
            phase: Phase::Watching,
            fruitless: 0,
            seen: Seen::NOTHING,
        }
    }

    /// Channels that should be open.
    pub fn streams(&self) -> u32 {
        self.streams
    }

    /// Says how many are open in truth: a change that was asked for may not have come about.
    pub fn open(&mut self, streams: u32) {
        self.streams = streams;
    }

    /// A change that was asked for could not be made: as if it had brought nothing.
    pub fn failed(&mut self) {
        if let Phase::Trying { added, .. } = self.phase {
            self.streams = if added {
                self.streams.saturating_sub(1)
            } else {
                self.streams + 1
            };
            self.rest();
        }
    }

    /// Takes what an interval showed and says what to change.
    pub fn step(&mut self, facts: Facts) -> Step {
        if facts.seconds <= 0.0 || facts.capped > 0.2 {
            self.forget();
            return Step::Keep;
        }
        self.seen.add(facts);
        match self.phase {
            Phase::Watching => self.watch(facts),
            Phase::Resting { left_s } => {
                let left_s = left_s - facts.seconds;
                if left_s > 0.0 {
                    self.phase = Phase::Resting { left_s };
                } else {
                    self.phase = Phase::Watching;
                    self.forget();
                }
                Step::Keep
            }
            Phase::Trying {
                added,
                before,
                settle_s,
            } => self.judge(facts, added, before, settle_s),
        }
    }

    fn watch(&mut self, facts: Facts) -> Step {
        if self.seen.seconds < look_s(facts) {
            return Step::Keep;
        }
        let before = self.seen.speed();
        self.forget();
        let added = if self.another_would_help(facts) {
            true
        } else if self.others_would_do(facts) {
            false
        } else {
            return Step::Keep;
        };
        self.phase = Phase::Trying {
            added,
            before,
            settle_s: SETTLE_S.max(SETTLE_RTTS * facts.rtt_s),
        };
        self.change(added)
    }

    fn judge(&mut self, facts: Facts, added: bool, before: Speed, settle_s: f64) -> Step {
        if settle_s > 0.0 {
            self.forget();
            let settle_s = settle_s - facts.seconds;
            self.phase = Phase::Trying {
                added,
                before,
                settle_s,
            };
            return Step::Keep;
        }
        if self.seen.seconds < look_s(facts) {
            return Step::Keep;
        }
        let after = self.seen.speed();
        self.forget();
        let good = if added {
            // A fair part is what each of the others brings.
            let least = GAIN_SHARE / f64::from(self.streams.max(2) - 1);
            after.ours >= before.ours * (1.0 + least) && !taken_from_others(before, after)
        } else {
            after.ours >= before.ours * (1.0 - LOSS_ALLOWED)
        };
        if good {
            self.fruitless = 0;
            self.phase = Phase::Watching;
            return Step::Keep;
        }
        self.rest();
        self.change(!added)
    }

    fn change(&mut self, add: bool) -> Step {
        if add {
            self.streams += 1;
            Step::Add
        } else if self.streams > 1 {
            self.streams -= 1;
            Step::Remove
        } else {
            Step::Keep
        }
    }

    fn rest(&mut self) {
        let doublings = self.fruitless.min(REST_DOUBLINGS_MAX);
        let left_s = REST_S * f64::from(1_u32 << doublings);
        self.fruitless += 1;
        self.phase = Phase::Resting { left_s };
        self.forget();
    }

    fn forget(&mut self) {
        self.seen = Seen::NOTHING;
    }

    fn another_would_help(&self, facts: Facts) -> bool {
        let core = facts.busy >= 0.7 && facts.starved < 0.15 && self.streams < self.room.cores;
        // Over a near link every window is large enough: a full one waits for the peer's thread, and another thread
        // needs a core of its own.
        let near = facts.rtt_s <= NEAR_RTT_S * facts.queued.max(1.0);
        let hemmed = facts.hemmed >= 0.3 && (!near || self.streams < self.room.cores);
        let loss = facts.minds_loss
            && facts.rtt_s >= LONG_RTT_S
            && facts.repeated >= 1e-5
            && facts.queued <= 1.25;
        self.streams < STREAMS_OPEN_MAX && (core || hemmed || loss)
    }

    /// The work of all fits on one thread less, and on a near link nothing else speaks for so many. A full window does: it
    /// waits for the peer's threads, which are as many.
    fn others_would_do(&self, facts: Facts) -> bool {
        let others = f64::from(self.streams.saturating_sub(1));
        let fits = (facts.busy + facts.starved) * f64::from(self.streams) <= 0.6 * others;
        let floor = self.room.routes.max(1);
        self.streams > floor && fits && facts.rtt_s < LONG_RTT_S && facts.hemmed < HEMMED_FEW
    }
}

/// Whether less than half of what the channels gained is more for the host as a whole.
fn taken_from_others(before: Speed, after: Speed) -> bool {
    let gained = after.ours - before.ours;
    let host = before.host.zip(after.host);
    host.is_some_and(|(before, after)| after - before < gained / 2.0)
}

fn look_s(facts: Facts) -> f64 {
    LOOK_S.max(LOOK_RTTS * facts.rtt_s)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOM: Room = Room {
        cores: 8,
        routes: 1,
    };

    fn interval(bytes_per_s: f64) -> Facts {
        Facts {
            seconds: 0.1,
            bytes: (bytes_per_s * 0.1) as u64,
            queued: 1.0,
            rtt_s: 0.0005,
            ..Facts::default()
        }
    }

    /// Runs until a change is asked for.
    fn next_change(plan: &mut StreamPlan, facts: Facts) -> Step {
        (0..10_000)
            .map(|_| plan.step(facts))
            .find(|step| *step != Step::Keep)
            .unwrap_or(Step::Keep)
    }

    #[test]
    fn a_full_core_is_relieved_and_a_full_link_is_not_pressed() {
        let mut plan = StreamPlan::new(ROOM, 1);
        let full = Facts {
            busy: 0.95,
            ..interval(2e9)
        };
        assert_eq!(next_change(&mut plan, full), Step::Add);
        let mut plan = StreamPlan::new(ROOM, 1);
        let link = Facts {
            busy: 0.1,
            ..interval(1.2e8)
        };
        assert_eq!(next_change(&mut plan, link), Step::Keep);
    }

    #[test]
    fn a_window_that_a_busy_peer_leaves_full_adds_no_thread_without_a_core() {
        let full_window = |rtt_s| Facts {
            hemmed: 0.6,
            busy: 0.3,
            starved: 0.1,
            queued: 4.0,
            rtt_s,
            ..interval(2e9)
        };
        let of_cores = |cores| StreamPlan::new(Room { cores, routes: 1 }, 2);
        assert_eq!(
            next_change(&mut of_cores(2), full_window(0.002)),
            Step::Keep
        );
        assert_eq!(next_change(&mut of_cores(4), full_window(0.002)), Step::Add);
        assert_eq!(next_change(&mut of_cores(2), full_window(0.02)), Step::Add);
        let little_to_do = Facts {
            busy: 0.1,
            ..full_window(0.002)
        };
        assert_eq!(next_change(&mut of_cores(2), little_to_do), Step::Keep);
    }

    #[test]
    fn what_is_taken_from_others_on_this_host_is_no_gain() {
        let far = |ours: f64, host: f64| Facts {
            hemmed: 0.9,
            rtt_s: 0.05,
            host_bytes: Some((host * 0.1) as u64),
            ..interval(ours)
        };
        let after = |ours: f64, host: f64| {
            let mut plan = StreamPlan::new(ROOM, 1);
            assert_eq!(next_change(&mut plan, far(1e8, 4e8)), Step::Add);
            next_change(&mut plan, far(ours, host))
        };
        assert_eq!(after(2e8, 4e8), Step::Remove);
        assert_eq!(after(2e8, 5e8), Step::Add, "a gain for all is one");
    }

    #[test]
    fn a_queue_that_others_fill_is_no_long_link() {
        assert_eq!(first_streams(ROOM, 0.02, false), 8);
        assert_eq!(first_streams(ROOM, 0.02, true), 4);
    }

    #[test]
    fn the_last_channel_stays_when_one_that_left_could_not_be_made_again() {
        let mut plan = StreamPlan::new(ROOM, 2);
        let idle = Facts {
            busy: 0.05,
            ..interval(1e8)
        };
        assert_eq!(next_change(&mut plan, idle), Step::Remove);
        // It brought less, so it is taken back; that fails.
        let slower = Facts {
            busy: 0.05,
            ..interval(1e7)
        };
        assert_eq!(next_change(&mut plan, slower), Step::Add);
        plan.failed();
        let changes = (0..10_000).map(|_| {
            plan.open(1);
            plan.step(idle)
        });
        assert!(changes.into_iter().all(|step| step != Step::Remove));
    }

    #[test]
    fn a_channel_that_brings_nothing_goes_and_the_next_trial_comes_later() {
        let mut plan = StreamPlan::new(ROOM, 1);
        let full = Facts {
            busy: 0.95,
            ..interval(2e9)
        };
        let mut changes = Vec::new();
        for at in 0..1200 {
            match plan.step(full) {
                Step::Keep => {}
                step => changes.push((at, step)),
            }
        }
        assert_eq!(plan.streams(), 1);
        assert!(
            changes.len() <= 14,
            "two minutes and {} changes",
            changes.len()
        );
        let added: Vec<_> = changes.iter().filter(|c| c.1 == Step::Add).collect();
        let gaps: Vec<_> = added.windows(2).map(|two| two[1].0 - two[0].0).collect();
        assert!(gaps.windows(2).all(|two| two[1] >= two[0]), "{gaps:?}");
    }

    #[test]
    fn a_cap_stops_all_trials() {
        let mut plan = StreamPlan::new(ROOM, 4);
        let capped = Facts {
            capped: 0.9,
            ..interval(1e6)
        };
        assert_eq!(next_change(&mut plan, capped), Step::Keep);
    }

    #[test]
    fn every_route_keeps_a_channel() {
        let room = Room {
            cores: 8,
            routes: 4,
        };
        assert_eq!(first_streams(room, 0.0002, false), 4);
        let mut plan = StreamPlan::new(room, 4);
        assert_eq!(next_change(&mut plan, interval(1e8)), Step::Keep);
    }

    #[test]
    fn a_change_that_could_not_be_made_is_a_trial_without_gain() {
        let mut plan = StreamPlan::new(ROOM, 1);
        let full = Facts {
            busy: 0.95,
            ..interval(2e9)
        };
        assert_eq!(next_change(&mut plan, full), Step::Add);
        plan.failed();
        assert_eq!(plan.streams(), 1);
        assert_eq!(plan.step(full), Step::Keep);
    }

    #[test]
    fn loss_is_met_with_channels_only_where_it_is_taken_for_a_full_link() {
        let lossy = Facts {
            repeated: 1e-3,
            rtt_s: 0.15,
            ..interval(1e6)
        };
        let mut plan = StreamPlan::new(ROOM, 8);
        assert_eq!(next_change(&mut plan, lossy), Step::Keep);
        let minded = Facts {
            minds_loss: true,
            ..lossy
        };
        assert_eq!(next_change(&mut plan, minded), Step::Add);
    }
}
