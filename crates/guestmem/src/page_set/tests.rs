//! Sets of pages beside a plain model of them.

use super::*;

/// A small generator: the same numbers in every run.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }

    fn range(&mut self, limit: u64) -> Range<u64> {
        let start = self.below(limit);
        let len = self.below(200);
        start..start + len
    }
}

fn pages_of(set: &PageSet) -> Vec<bool> {
    (0..set.page_count())
        .map(|page| set.contains(page))
        .collect()
}

fn runs(set: &PageSet) -> Vec<Range<u64>> {
    set.runs().collect()
}

fn runs_of(model: &[bool]) -> Vec<Range<u64>> {
    let mut runs: Vec<Range<u64>> = Vec::new();
    for (page, _) in model.iter().enumerate().filter(|(_, set)| **set) {
        let page = page as u64;
        match runs.last_mut().filter(|run| run.end == page) {
            Some(run) => run.end = page + 1,
            None => runs.push(page..page + 1),
        }
    }
    runs
}

#[test]
fn agrees_with_a_plain_model_under_random_operations() {
    for page_count in [1, 63, 64, 65, 511, 512, 1000, 4096] {
        let mut numbers = Numbers(0x9e37_79b9 + page_count);
        let mut set = PageSet::new(page_count);
        let mut model = vec![false; page_count as usize];
        for _ in 0..300 {
            let range = numbers.range(page_count);
            let value = numbers.below(2) == 0;
            match value {
                true => set.insert_range(range.clone()),
                false => set.remove_range(range.clone()),
            }
            for page in range.start..range.end.min(page_count) {
                model[page as usize] = value;
            }
        }
        assert_eq!(pages_of(&set), model);
        assert_eq!(runs(&set), runs_of(&model));
        assert_eq!(set.count(), model.iter().filter(|set| **set).count() as u64);
    }
}

#[test]
fn chunks_hold_the_same_pages_as_the_set() {
    let mut numbers = Numbers(77);
    let mut set = PageSet::new(5000);
    for _ in 0..20 {
        set.insert_range(numbers.range(5000));
    }
    let mut rebuilt = PageSet::new(5000);
    for chunk in set.chunks() {
        assert_eq!(chunk.first_page % 512, 0);
        assert!(chunk.count() > 0);
        chunk.runs().for_each(|run| rebuilt.insert_range(run));
    }
    assert_eq!(rebuilt, set);
}

#[test]
fn granule_runs_cover_the_set_and_do_not_touch() {
    let mut set = PageSet::new(2000);
    for page in [3, 511, 512, 1500, 1999] {
        set.insert(page);
    }
    assert_eq!(set.granule_runs(512).collect::<Vec<_>>(), [0..2000]);
    let mut apart = set.clone();
    apart.remove_range(512..1500);
    assert_eq!(
        apart.granule_runs(256).collect::<Vec<_>>(),
        [0..512, 1280..1536, 1792..2000]
    );
    let single: Vec<_> = set.granule_runs(1).collect();
    assert_eq!(single, [3..4, 511..513, 1500..1501, 1999..2000]);
    assert_eq!(PageSet::new(100).granule_runs(8).count(), 0);
}

#[test]
fn merge_is_or() {
    let mut left = PageSet::new(200);
    left.insert_range(10..90);
    let mut right = PageSet::new(200);
    right.insert_range(80..150);
    let mut both = left.clone();
    both.merge(&right);
    assert_eq!(runs(&both), vec![10..150]);
}

#[test]
fn pages_that_do_not_exist_are_never_in_a_set() {
    let mut set = PageSet::new(100);
    set.insert_range(90..u64::MAX);
    set.insert(u64::MAX);
    assert_eq!(runs(&set), vec![90..100]);
    let mut larger = PageSet::full(128);
    larger.insert_range(0..128);
    set.merge(&larger);
    assert_eq!(set, PageSet::full(100));
}

#[test]
fn marks_of_many_threads_arrive() {
    let marks = AtomicPageSet::new(10_000);
    std::thread::scope(|scope| {
        for thread in 0..4_u64 {
            let marks = &marks;
            scope.spawn(move || {
                (thread..10_000)
                    .step_by(4)
                    .for_each(|page| marks.insert_range(page..page + 1));
            });
        }
    });
    let mut set = PageSet::new(10_000);
    marks.drain_into(&mut set);
    assert_eq!(set, PageSet::full(10_000));
    let mut again = PageSet::new(10_000);
    marks.drain_into(&mut again);
    assert!(again.is_empty());
}

#[test]
fn marked_pages_of_a_range_are_counted() {
    let set = AtomicPageSet::new(300);
    set.insert_range(10..20);
    set.insert_range(60..200);
    for (range, count) in [
        (0..300, 150),
        (15..62, 7),
        (20..60, 0),
        (199..5000, 1),
        (64..128, 64),
        (9..9, 0),
    ] {
        assert_eq!(set.count_in(range.clone()), count, "{range:?}");
    }
}

#[test]
fn a_claim_that_fails_changes_nothing() {
    let claims = AtomicPageSet::new(1000);
    assert!(claims.try_claim(300..310));
    assert!(!claims.try_claim(100..301));
    assert!(!claims.try_claim(305..400));
    assert!(claims.try_claim(100..300));
    assert!(claims.try_claim(310..400));
    claims.remove_range(0..1000);
    assert!(claims.try_claim(0..1000));
    assert!(claims.contains_all(0..1000));
    assert!(!claims.contains_all(0..1001));
}

#[test]
fn parts_have_every_page_once_and_take_none_of_another() {
    for (count, each) in [(5 * 512, 1024), (1537 * 512, 1 << 18), (700, 1), (512, 0)] {
        let mut set = PageSet::new(count);
        let parts: Vec<Range<u64>> = set.parts(each).map(|part| part.pages()).collect();
        let mut next = 0;
        for pages in &parts {
            assert_eq!(pages.start, next);
            assert!(pages.end > pages.start);
            next = pages.end;
        }
        assert_eq!(next, count);
        let all = 3..count - 3;
        for mut part in set.parts(each) {
            part.insert_range(all.clone());
        }
        assert_eq!(set.runs().collect::<Vec<_>>(), [all]);
    }
}

#[test]
fn marks_are_copied_moved_and_cleared() {
    let marks = AtomicPageSet::new(1000);
    marks.insert_range(60..70);
    marks.insert_range(999..1000);
    let mut copy = PageSet::new(1000);
    marks.copy_into(&mut copy);
    let mut moved = PageSet::new(1000);
    marks.drain_into(&mut moved);
    assert_eq!((copy.count(), &copy), (11, &moved));
    marks.insert_range(5..6);
    marks.clear();
    let mut left = PageSet::new(1000);
    marks.copy_into(&mut left);
    assert!(left.is_empty());
}
