//! Power cuts, and the change to the other side.

use super::{Disk, Job, Kind, Mirror, Newest, Phase, SECTORS, Side, To, World};
use godwit_mirror::Flushes;

impl World {
    pub fn may_lose_power(&mut self) {
        // More often where there is more to lose.
        let was_flushed = std::mem::take(&mut self.was_flushed);
        let one_in = match (self.is_synchronised(), was_flushed) {
            (true, true) => self.rates.power_cuts / 50,
            (true, false) => self.rates.power_cuts / 12,
            _ => self.rates.power_cuts,
        };
        if was_flushed || self.numbers.below(40) == 0 {
            self.imagine_a_cut();
        }
        if !self.fails(one_in) {
            return;
        }
        match self.numbers.below(3) {
            0 if self.to != To::Far => self.lose_destination(),
            _ => self.lose_source(),
        }
    }

    /// What a power cut would leave now, of which nobody hears: where each is durable that has to be.
    pub fn imagine_a_cut(&mut self) {
        self.counts.imagined += 1;
        let mut here = self.source.clone();
        here.lose_power(&mut self.numbers);
        let judged = self
            .guest
            .check_survives(&here.content(), "source, were its power cut");
        self.judge(judged);
        if self.to == To::Far || !self.is_synchronised() {
            return;
        }
        self.counts.imagined_there += 1;
        let mut there = self.destination.clone();
        there.lose_power(&mut self.numbers);
        let judged = self
            .guest
            .check_survives(&there.content(), "destination, were its power cut");
        self.judge(judged);
    }

    /// What was under way at the cut is torn.
    fn tear_all(&mut self) {
        for job in std::mem::take(&mut self.jobs) {
            let is_torn = match job {
                Job::Put(put) => self.tear(&put),
                Job::Change(change) => self.arrive(&change, false),
                Job::Copy(copy, Some(read)) => self.apply_some(&copy.range, &read),
                _ => false,
            };
            self.counts.torn_by_cut += u64::from(is_torn);
        }
    }

    /// The source's host, with the guest, and in some cases the destination's at the same moment. Where both sides were equal either may go
    /// on.
    fn lose_source(&mut self) {
        self.counts.power_cuts += 1;
        let may_be_left = self.is_synchronised() && self.to != To::Far;
        self.tear_all();
        self.counts.unanswered += self.guest.is_told_nothing();
        self.counts.lost_sectors += self.source.lose_power(&mut self.numbers);
        let judged = self
            .guest
            .check_survives(&self.source.content(), "source after a cut");
        self.judge(judged);
        let both = self.numbers.below(2) == 0;
        if both {
            self.counts.lost_sectors += self.destination.lose_power(&mut self.numbers);
        }
        if may_be_left {
            self.counts.judged_there += 1;
            let there = self.destination.content();
            let judged = match both {
                true => self
                    .guest
                    .check_survives(&there, "destination after both lost their power"),
                false => self.guest.check_answered(&there),
            };
            self.judge(judged);
            if self.numbers.below(2) == 0 {
                self.counts.left_alone += 1;
                std::mem::swap(&mut self.source, &mut self.destination);
            }
        }
        self.guest.finds(&self.source.content());
        // What is read after a cut is read by whoever looks first: all of it becomes durable.
        self.source = Disk::of(&self.source.content());
        self.begin_anew();
    }

    /// The destination's host alone: the guest goes on, and nobody mirrors its disk any more.
    fn lose_destination(&mut self) {
        self.counts.cuts_there += 1;
        let counts = self.is_synchronised();
        let all = std::mem::take(&mut self.jobs);
        let (here, there) = all.into_iter().partition(|job| match job {
            Job::Put(put) => put.side == Side::Source,
            Job::Flush(flush) => flush.side == Side::Source,
            Job::Read(_, side) => *side == Side::Source,
            _ => false,
        });
        self.jobs = there;
        self.tear_all();
        self.jobs = here;
        self.counts.lost_sectors += self.destination.lose_power(&mut self.numbers);
        if counts {
            self.counts.judged_there += 1;
            let there = self.destination.content();
            let judged = self.guest.check_survives(&there, "destination after a cut");
            self.judge(judged);
        }
        self.give_up();
    }

    /// The guest stands still, and goes on with the other side, which has to be equal then: all that was given has come, and is
    /// durable.
    pub fn may_switch(&mut self) {
        if !self.is_synchronised() || self.numbers.below(2) == 0 {
            return;
        }
        while self.is_busy() {
            self.work();
        }
        if !self.is_synchronised() || self.guest.waits() > 0 {
            return;
        }
        self.counts.switched += 1;
        let began = self.destination.begin_flush();
        self.destination.end_flush(began);
        std::mem::swap(&mut self.source, &mut self.destination);
        let there = self.source.content();
        let judged = self.guest.check_survives(&there, "destination switched to");
        self.judge(judged);
        self.begin_anew();
    }

    /// The disk is mirrored once more, from the beginning.
    fn begin_anew(&mut self) {
        let (region, copies) = self.made_with;
        self.mirror = Mirror::new(SECTORS, region);
        self.flushes = Flushes::default();
        #[cfg(feature = "planted-faults")]
        if let Some(plant) = self.plant {
            self.mirror.plant(plant);
            self.flushes.plant(plant);
        }
        self.mirror.allow(copies);
        self.newest = self.newest.take().map(|_| Newest::default());
        self.looked = (0, 0);
        self.awaited.clear();
        self.passing.clear();
        self.outcomes.clear();
    }

    /// One side is of no use any more.
    pub fn give_up(&mut self) {
        if self.numbers.below(2) == 0 {
            let steps = self.mirror.detach();
            self.carry_out(steps);
        }
        let steps = self.mirror.give_up();
        self.carry_out(steps);
        self.await_nothing();
    }

    /// What is awaited of the destination has ended for whoever waits.
    pub fn await_nothing(&mut self) {
        for id in std::mem::take(&mut self.awaited) {
            self.has_ended_there(id);
        }
    }

    /// The destination takes nothing for now.
    pub fn detach(&mut self) {
        let steps = self.mirror.detach();
        self.carry_out(steps);
        // Over a link what was given may come or not: it is copied again, which comes later.
        let mut given = Vec::new();
        for job in &mut self.jobs {
            if let Job::Change(change) = job {
                given.extend(change.write.take().map(|id| (id, change.range.clone())));
            }
        }
        for (id, range) in given {
            let steps = self.mirror.lost(&range);
            self.carry_out(steps);
            self.has_ended_there(id);
        }
        self.await_nothing();
    }

    /// The link is lost, with what was on it; it is made anew at once or later. Who waits is told some time.
    pub fn lose_the_link(&mut self) {
        if self.to == To::Far || self.numbers.below(2) == 0 {
            self.detach();
        }
        let is_there = |job: &Job| match job {
            Job::Change(_) => true,
            Job::Flush(flush) => flush.side == Side::Destination,
            _ => false,
        };
        let all = std::mem::take(&mut self.jobs);
        let (lost, kept) = all.into_iter().partition(is_there);
        self.jobs = kept;
        // Before anything of a new link comes.
        let lost: Vec<Job> = lost;
        for job in &lost {
            if let Job::Change(change) = job {
                let is_torn = self.arrive(change, false);
                self.counts.torn_on_link += u64::from(is_torn);
            }
        }
        self.newest = Some(Newest::default());
        for job in lost {
            self.flushes.lost();
            let told = match job {
                Job::Change(change) => {
                    let steps = self.mirror.lost(&change.range);
                    self.carry_out(steps);
                    change.write
                }
                Job::Flush(flush) => Some(flush.id),
                _ => None,
            };
            self.jobs.extend(told.map(Job::Told));
        }
        self.carry_out(Vec::new());
    }

    /// What must hold now.
    pub fn check(&mut self) -> Result<(), String> {
        if let Some(wrong) = self.wrong.take() {
            return Err(wrong);
        }
        let now = (self.source.now(), self.guest.now());
        if self.looked != now {
            self.looked = now;
            self.guest.check(&self.source.content())?;
        }
        if self.mirror.phase() == Phase::Ended {
            self.guest.is_held_by_writes_alone()?;
        }
        if self.mirror.phase() != Phase::Synchronised || self.is_busy() {
            return Ok(());
        }
        self.counts.equal += 1;
        let (source, destination) = (self.source.content(), self.destination.content());
        match source == destination {
            true => Ok(()),
            false => Err(format!("{destination:?} is not {source:?}")),
        }
    }

    pub fn erases(kind: Kind) -> bool {
        matches!(kind, Kind::Discard | Kind::Zeroes)
    }
}
