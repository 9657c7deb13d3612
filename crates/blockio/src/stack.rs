//! A disk's filters one above the other, and what carries requests out below them.
//!
//! Who owns the state: the disk's thread owns the stack; requests that are under way belong to the layer that they are in.
//! Steps are taken from a queue and not by calls into one another, so that a filter may do anything from anywhere and no
//! chain of filters is too long.

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::time::Instant;

use crate::{Filter, Flow, Outcome, Request};

/// What carries requests out.
pub trait Bottom {
    /// Begins a request. One that cannot even begin comes back with its outcome; of the others the outcome is given to
    /// [`Stack::completed`] later.
    fn start(&mut self, request: Request) -> Option<(Request, Outcome)>;

    /// Hears the bell of the filter at this place from now on, or no longer. One that is not heard is woken in time all the same.
    fn listen(&mut self, _place: usize, _bell: Option<BorrowedFd<'_>>) {}
}

/// A request on its way through the stack.
#[derive(Debug)]
pub(crate) enum Step {
    /// To the filter at this place, or below the last one.
    Down(usize, Request),
    /// Away from the filter at this place, to the one above, or out at the top.
    Up(usize, Request, Outcome),
}

/// What came out at the top.
pub type Finished = (Request, Outcome);

/// Filters above a bottom.
pub struct Stack<B> {
    filters: Vec<Box<dyn Filter>>,
    /// What carries requests out.
    pub bottom: B,
    steps: VecDeque<Step>,
    finished: VecDeque<Finished>,
    under_way: usize,
    bytes: u64,
    /// Requests of filters' own that are not finished.
    made: usize,
    /// Whether the last filter, but for the foot, was put there while the disk was served.
    has_lowest: bool,
    /// Whether the last one is the foot.
    has_foot: bool,
}

impl<B: Bottom> Stack<B> {
    /// The first filter is at the top, nearest to the guest.
    pub fn new(filters: Vec<Box<dyn Filter>>, mut bottom: B) -> Self {
        for (place, filter) in filters.iter().enumerate() {
            if let Some(bell) = filter.bell() {
                bottom.listen(place, Some(bell));
            }
        }
        Self {
            filters,
            bottom,
            steps: VecDeque::new(),
            finished: VecDeque::new(),
            under_way: 0,
            bytes: 0,
            made: 0,
            has_lowest: false,
            has_foot: false,
        }
    }

    /// Puts a filter below all others but the foot, in place of the one that was put there before. Only where nothing is under way;
    /// else it comes back.
    pub fn put_lowest(&mut self, filter: Box<dyn Filter>) -> Result<(), Box<dyn Filter>> {
        if !self.is_idle() {
            return Err(filter);
        }
        if std::mem::replace(&mut self.has_lowest, true) {
            self.pop();
        }
        let place = self.filters.len() - usize::from(self.has_foot);
        if let Some(bell) = filter.bell() {
            self.bottom.listen(place, Some(bell));
        }
        self.filters.insert(place, filter);
        Ok(())
    }

    /// Puts a filter, which has no bell, below all others until [`Self::take_foot`] is called. Only where nothing is under way; else it comes
    /// back.
    pub(crate) fn put_foot(&mut self, filter: Box<dyn Filter>) -> Result<(), Box<dyn Filter>> {
        if !self.is_idle() || filter.bell().is_some() {
            return Err(filter);
        }
        self.take_foot();
        self.filters.push(filter);
        self.has_foot = true;
        Ok(())
    }

    /// Takes the foot away. Returns whether there is none now: only where nothing is under way it can.
    pub(crate) fn take_foot(&mut self) -> bool {
        if self.is_idle() && std::mem::take(&mut self.has_foot) {
            self.filters.pop();
        }
        !self.has_foot
    }

    /// Takes the filter away that was put there last. Returns whether there was one and it could: only where nothing is under
    /// way.
    pub fn take_lowest(&mut self) -> bool {
        let takes = self.is_idle() && std::mem::take(&mut self.has_lowest);
        if takes {
            self.pop();
        }
        takes
    }

    fn pop(&mut self) {
        let after = 1 + usize::from(self.has_foot);
        let Some(place) = self.filters.len().checked_sub(after) else {
            return;
        };
        if self.filters.remove(place).bell().is_some() {
            self.bottom.listen(place, None);
        }
    }

    /// Has filters begin nothing of their own, or begin again.
    pub fn rest(&mut self, rests: bool) {
        for filter in &mut self.filters {
            filter.rest(rests);
        }
    }

    /// Lets a request in at the top.
    pub fn submit(&mut self, request: Request, now: Instant) {
        self.under_way += 1;
        self.bytes = self.bytes.saturating_add(request.work.transfers());
        self.steps.push_back(Step::Down(0, request));
        self.run(now);
    }

    /// The bottom is done with a request.
    pub fn completed(&mut self, request: Request, outcome: Outcome, now: Instant) {
        let bottom = self.filters.len();
        self.steps.push_back(Step::Up(bottom, request, outcome));
        self.run(now);
    }

    /// Wakes the filters whose time has come.
    pub fn wake(&mut self, now: Instant) {
        for place in 0..self.filters.len() {
            let filter = &self.filters[place];
            if filter.wake_at().is_some_and(|at| at <= now) {
                self.wake_one(place, now);
            }
        }
        self.run(now);
    }

    /// The bell of the filter at this place has rung.
    pub(crate) fn rings(&mut self, place: usize, now: Instant) {
        self.wake_one(place, now);
        self.run(now);
    }

    fn wake_one(&mut self, place: usize, now: Instant) {
        if let Some(filter) = self.filters.get_mut(place) {
            let steps = &mut self.steps;
            filter.wake(&mut Flow { steps, place, now });
        }
    }

    /// When a filter wants to be woken next.
    pub fn wake_at(&self) -> Option<Instant> {
        self.filters
            .iter()
            .filter_map(|filter| filter.wake_at())
            .min()
    }

    /// What came out at the top, oldest first.
    pub fn finished(&mut self) -> Option<Finished> {
        self.finished.pop_front()
    }

    /// Requests that were let in and are not finished.
    pub fn under_way(&self) -> usize {
        self.under_way
    }

    /// Whether nothing is under way, of filters' own neither.
    pub fn is_idle(&self) -> bool {
        self.under_way == 0 && self.made == 0
    }

    /// Bytes that these transfer.
    pub fn bytes_under_way(&self) -> u64 {
        self.bytes
    }

    /// When all filters take a request, if that is later than `now`.
    pub fn opens_at(&self, now: Instant) -> Option<Instant> {
        let times = self.filters.iter().filter_map(|filter| filter.opens_at());
        times.max().filter(|&at| at > now)
    }

    fn run(&mut self, now: Instant) {
        while let Some(step) = self.steps.pop_front() {
            match step {
                Step::Down(place, request) => self.down(place, request, now),
                Step::Up(place, request, outcome) => self.up(place, request, outcome, now),
            }
        }
    }

    fn down(&mut self, from: usize, request: Request, now: Instant) {
        self.made += usize::from(request.maker.is_some_and(|maker| maker + 1 == from));
        let mut filters = self.filters.iter_mut().enumerate().skip(from);
        let taker = filters.find_map(|(place, filter)| {
            let takes = !filter.passes_down(&request, now);
            takes.then_some((place, filter))
        });
        if let Some((place, filter)) = taker {
            let steps = &mut self.steps;
            return filter.down(request, &mut Flow { steps, place, now });
        }
        if let Some((request, outcome)) = self.bottom.start(request) {
            let bottom = self.filters.len();
            self.steps.push_back(Step::Up(bottom, request, outcome));
        }
    }

    fn up(&mut self, from: usize, request: Request, outcome: Outcome, now: Instant) {
        let steps = &mut self.steps;
        for (place, filter) in self.filters.iter_mut().enumerate().take(from).rev() {
            if request.maker == Some(place) {
                self.made = self.made.saturating_sub(1);
                return filter.made(request, outcome, &mut Flow { steps, place, now });
            }
            if !filter.passes_up(&request, outcome, now) {
                return filter.up(request, outcome, &mut Flow { steps, place, now });
            }
        }
        self.under_way = self.under_way.saturating_sub(1);
        self.bytes = self.bytes.saturating_sub(request.work.transfers());
        self.finished.push_back((request, outcome));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Data, Work};
    use std::sync::{Arc, Mutex};

    type Log = Arc<Mutex<Vec<String>>>;

    struct Named(&'static str, Log);

    impl Filter for Named {
        fn down(&mut self, request: Request, flow: &mut Flow<'_>) {
            let line = format!("{} down {}", self.0, request.token);
            self.1.lock().unwrap().push(line);
            flow.down(request);
        }

        fn up(&mut self, request: Request, outcome: Outcome, flow: &mut Flow<'_>) {
            let line = format!("{} up {}", self.0, request.token);
            self.1.lock().unwrap().push(line);
            flow.up(request, outcome);
        }
    }

    /// Reads before each write what is there, as one that copies would.
    struct ReadsFirst(Vec<Request>);

    impl Filter for ReadsFirst {
        fn down(&mut self, request: Request, flow: &mut Flow<'_>) {
            let range = request.work.range().unwrap().clone();
            flow.make(Work::Read(range), Data::None, request.token + 100);
            self.0.push(request);
        }

        fn made(&mut self, request: Request, outcome: Outcome, flow: &mut Flow<'_>) {
            assert_eq!(outcome, Outcome::Done);
            let at = self
                .0
                .iter()
                .position(|held| held.token + 100 == request.token);
            flow.down(self.0.remove(at.unwrap()));
        }
    }

    #[derive(Default)]
    struct Kept(Vec<Request>);

    impl Bottom for Kept {
        fn start(&mut self, request: Request) -> Option<(Request, Outcome)> {
            if request.token == 13 {
                return Some((request, Outcome::Unsupported));
            }
            self.0.push(request);
            None
        }
    }

    fn write(token: u64) -> Request {
        Request::new(Work::Write(0..512), Data::None, token, Instant::now())
    }

    #[test]
    fn requests_go_down_in_order_and_outcomes_come_up_the_same_way() {
        let log = Log::default();
        let named = |name| Box::new(Named(name, Arc::clone(&log))) as Box<dyn Filter>;
        let mut stack = Stack::new(vec![named("a"), named("b")], Kept::default());
        let now = Instant::now();
        stack.submit(write(1), now);
        stack.submit(write(13), now);
        assert_eq!(stack.under_way(), 1, "the other was answered at once");
        let request = stack.bottom.0.remove(0);
        stack.completed(request, Outcome::Done, now);
        let order = [
            "a down 1",
            "b down 1",
            "a down 13",
            "b down 13",
            "b up 13",
            "a up 13",
            "b up 1",
            "a up 1",
        ];
        assert_eq!(*log.lock().unwrap(), order);
        assert_eq!(stack.finished().unwrap().1, Outcome::Unsupported);
        assert_eq!(stack.finished().unwrap().0.token, 1);
        assert_eq!((stack.under_way(), stack.finished().is_none()), (0, true));
    }

    #[test]
    fn a_filter_is_put_below_the_others_only_while_nothing_is_under_way() {
        let log = Log::default();
        let named = |name| Box::new(Named(name, Arc::clone(&log))) as Box<dyn Filter>;
        let mut stack = Stack::new(vec![named("a")], Kept::default());
        let now = Instant::now();
        stack.submit(write(1), now);
        assert!(stack.put_lowest(named("b")).is_err());
        let request = stack.bottom.0.remove(0);
        stack.completed(request, Outcome::Done, now);
        assert!(stack.put_lowest(named("b")).is_ok());
        assert!(stack.put_lowest(named("c")).is_ok());
        stack.submit(write(13), now);
        let order = [
            "a down 1",
            "a up 1",
            "a down 13",
            "c down 13",
            "c up 13",
            "a up 13",
        ];
        assert_eq!(*log.lock().unwrap(), order);
    }

    #[test]
    fn what_is_put_lowest_is_above_the_foot_and_comes_and_goes_without_it() {
        let log = Log::default();
        let named = |name| Box::new(Named(name, Arc::clone(&log))) as Box<dyn Filter>;
        let mut stack = Stack::new(vec![named("a")], Kept::default());
        let now = Instant::now();
        assert!(stack.put_foot(named("foot")).is_ok());
        assert!(stack.put_lowest(named("b")).is_ok() && stack.put_lowest(named("c")).is_ok());
        let goes_through = |stack: &mut Stack<Kept>| {
            stack.submit(write(13), now);
            let mut names: Vec<String> = std::mem::take(&mut *log.lock().unwrap());
            names.truncate(names.len() / 2);
            names
        };
        let all = ["a down 13", "c down 13", "foot down 13"];
        assert_eq!(goes_through(&mut stack), all);
        assert!(stack.take_lowest() && !stack.take_lowest());
        assert_eq!(goes_through(&mut stack), ["a down 13", "foot down 13"]);
        stack.submit(write(1), now);
        assert!(!stack.take_foot(), "a request is under way");
        let request = stack.bottom.0.remove(0);
        stack.completed(request, Outcome::Done, now);
        log.lock().unwrap().clear();
        assert!(stack.take_foot());
        assert_eq!(goes_through(&mut stack), ["a down 13"]);
    }

    /// Lets everything pass, and must not be given anything.
    struct Looks;

    impl Filter for Looks {
        fn passes_down(&mut self, _request: &Request, _now: Instant) -> bool {
            true
        }

        fn passes_up(&mut self, _request: &Request, _outcome: Outcome, _now: Instant) -> bool {
            true
        }

        fn down(&mut self, request: Request, _flow: &mut Flow<'_>) {
            panic!("it is given {request:?}");
        }

        fn up(&mut self, request: Request, _outcome: Outcome, _flow: &mut Flow<'_>) {
            panic!("it is given {request:?}");
        }
    }

    #[test]
    fn what_a_filter_lets_pass_goes_by_it_both_ways() {
        let log = Log::default();
        let named = |name| Box::new(Named(name, Arc::clone(&log))) as Box<dyn Filter>;
        let looks = || Box::new(Looks) as Box<dyn Filter>;
        let filters = vec![looks(), named("a"), looks(), named("b"), looks()];
        let mut stack = Stack::new(filters, Kept::default());
        let now = Instant::now();
        stack.submit(write(1), now);
        let request = stack.bottom.0.remove(0);
        stack.completed(request, Outcome::Done, now);
        assert_eq!(
            *log.lock().unwrap(),
            ["a down 1", "b down 1", "b up 1", "a up 1"]
        );
        assert!(stack.finished().is_some() && stack.is_idle());
    }

    #[test]
    fn a_request_that_a_filter_made_comes_back_to_it_and_goes_no_further() {
        let log = Log::default();
        let filters: Vec<Box<dyn Filter>> = vec![
            Box::new(Named("top", Arc::clone(&log))),
            Box::new(ReadsFirst(Vec::new())),
        ];
        let mut stack = Stack::new(filters, Kept::default());
        let now = Instant::now();
        stack.submit(write(1), now);
        let read = stack.bottom.0.remove(0);
        assert_eq!(read.work, Work::Read(0..512));
        assert_eq!((stack.under_way(), stack.made), (1, 1));
        stack.completed(read, Outcome::Done, now);
        assert_eq!((stack.under_way(), stack.made), (1, 0));
        let written = stack.bottom.0.remove(0);
        assert_eq!(written.token, 1);
        stack.completed(written, Outcome::Done, now);
        assert_eq!(*log.lock().unwrap(), ["top down 1", "top up 1"]);
        assert!(stack.is_idle());
    }
}
