//! A way to a destination, which a test opens, closes, shuffles and cuts.

use godwit_blockio::Arriving;
use godwit_blockio::filters::{Change, Course, Origin, Outlet};
use std::ops::Range;
use std::sync::{Arc, Mutex};

/// Changes that may be under way.
const MOST: usize = 40;

/// The way to the destination, which the test opens, closes, shuffles and cuts.
#[derive(Default)]
pub struct Way {
    pub given: Vec<(u64, Range<u64>, Change)>,
    count: u64,
    pub is_cut: bool,
}

#[derive(Clone, Default)]
pub struct ToTheFile(pub Arc<Mutex<Way>>);

impl Outlet for ToTheFile {
    fn is_silent(&mut self) -> bool {
        self.0.lock().unwrap().is_cut
    }

    fn takes(&mut self, origin: Origin) -> bool {
        let way = self.0.lock().unwrap();
        let most = if origin == Origin::Copy {
            MOST / 2
        } else {
            MOST
        };
        !way.is_cut && way.given.len() < most
    }

    fn give(&mut self, _origin: Origin, range: Range<u64>, change: Change) {
        let mut way = self.0.lock().unwrap();
        assert!(
            !way.is_cut,
            "nothing is given to a destination that is silent"
        );
        way.count += 1;
        let number = way.count;
        way.given.push((number, range, change));
    }
}

impl ToTheFile {
    /// Any of those under way arrives.
    pub fn carry_one(&self, to: &Arriving, mut number: impl FnMut(u64) -> u64) {
        let mut way = self.0.lock().unwrap();
        if way.given.is_empty() {
            return;
        }
        let index = number(way.given.len() as u64) as usize;
        let below = way.given.iter().map(|given| given.0).min().unwrap();
        let (number, range, change) = way.given.swap_remove(index);
        let len = (range.end - range.start) as usize;
        let content = match &change {
            Change::Written(buffer, at) => Some(&buffer.bytes()[*at..*at + len]),
            Change::Zeroed => None,
        };
        to.apply(number, below, &range, content).unwrap();
    }

    pub fn cut(&self, to: &Arriving, course: &Course) {
        let mut way = self.0.lock().unwrap();
        let given = std::mem::take(&mut way.given);
        given
            .into_iter()
            .for_each(|(_, range, _)| course.lose(range));
        way.is_cut = true;
        to.begin_anew();
    }
}
