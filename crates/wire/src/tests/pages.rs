//! Page lists and zero-page bitmaps: what a peer may get wrong, and what comes back.

use super::{encoded, refused};
use crate::pages::{PAGES_MAX, ZERO_SPAN_MAX};
use crate::*;
use proptest::prelude::*;

#[test]
fn page_lists_refuse_what_they_should() {
    let mut list = PageRuns::new();
    let raw = |first: u64, count: u32| [&first.to_le_bytes()[..], &count.to_le_bytes()].concat();
    let mut refuse = |bytes: Vec<u8>| refused(list.decode(&bytes, 100));
    refuse(vec![]);
    refuse(vec![0; 11]);
    refuse(raw(0, 0));
    refuse(raw(99, 2));
    refuse(raw(u64::MAX, 1));
    refuse(raw(0, PAGES_MAX + 1));
    refuse([raw(5, 2), raw(6, 1)].concat());
    refuse([raw(5, 2), raw(7, 1)].concat());
    refuse([raw(5, 2), raw(0, 1)].concat());
    list.decode(&[raw(0, 1), raw(98, 2)].concat(), 100)
        .expect("a valid list");
    assert_eq!((list.runs().len(), list.pages()), (2, 3));
    assert!(
        list.push(PageRun {
            first: 99,
            count: 1
        })
        .is_err(),
        "behind the end only"
    );
}

#[test]
fn a_list_takes_256_pages_and_no_more() {
    let mut list = PageRuns::new();
    for page in 0..u64::from(PAGES_MAX) {
        list.push(PageRun {
            first: page * 2,
            count: 1,
        })
        .expect("room");
    }
    assert_eq!((list.room(), list.payload_len()), (0, PAYLOAD_LEN_MAX));
    assert!(
        list.push(PageRun {
            first: 1 << 40,
            count: 1
        })
        .is_err()
    );
    let mut back = PageRuns::new();
    back.decode(&encoded(&list), 1000).expect("a valid list");
    assert_eq!(back, list);
}

#[test]
fn zero_bitmaps_refuse_what_they_should() {
    let mut zero = ZeroPages::new();
    let raw = |first: u64, span: u32, bits: &[u8]| {
        [&first.to_le_bytes()[..], &span.to_le_bytes(), bits].concat()
    };
    let mut refuse = |bytes: Vec<u8>| refused(zero.decode(&bytes, 100));
    refuse(vec![1; 11]);
    refuse(raw(0, 0, &[]));
    refuse(raw(0, 1, &[]));
    refuse(raw(0, 1, &[1, 0]));
    refuse(raw(0, 2, &[1]));
    refuse(raw(0, 1, &[3]));
    refuse(raw(0, 2, &[2]));
    refuse(raw(99, 2, &[3]));
    refuse(raw(u64::MAX, 2, &[3]));
    refuse(raw(
        0,
        ZERO_SPAN_MAX + 1,
        &vec![0xff; ZERO_SPAN_MAX as usize / 8 + 1],
    ));
    zero.decode(&raw(90, 10, &[0b0111_0001, 0b10]), 100)
        .expect("a valid bitmap");
    let got: Vec<_> = zero.runs().map(|run| (run.first, run.count)).collect();
    assert_eq!(got, [(90, 1), (94, 3), (99, 1)]);
}

#[test]
fn a_zero_bitmap_says_when_it_is_full() {
    let mut zero = ZeroPages::new();
    assert_eq!(zero.insert(10), Ok(true));
    assert!(zero.insert(10).is_err(), "twice");
    assert_eq!(zero.insert(10 + u64::from(ZERO_SPAN_MAX)), Ok(false));
    assert_eq!(zero.insert(9 + u64::from(ZERO_SPAN_MAX)), Ok(true));
    assert_eq!(zero.count(), 2);
}

proptest! {
    #[test]
    fn any_page_list_is_refused_or_canonical(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let mut list = PageRuns::new();
        match list.decode(&bytes, 1 << 20) {
            Ok(()) => prop_assert_eq!(encoded(&list), bytes),
            Err(error) => {
                prop_assert_eq!(error.blame(), Blame::Peer);
                prop_assert!(list.runs().is_empty());
            }
        }
    }

    #[test]
    fn any_plausible_page_list_is_refused_or_within_the_guest(
        list in prop::collection::vec((0u64..300, 0u32..40), 1..40),
        sort in any::<bool>(),
    ) {
        let mut list = list;
        if sort {
            list.sort();
        }
        let bytes: Vec<u8> = (list.iter())
            .flat_map(|(first, count)| [&first.to_le_bytes()[..], &count.to_le_bytes()].concat())
            .collect();
        let mut decoded = PageRuns::new();
        if decoded.decode(&bytes, 256).is_ok() {
            let mut free_from = 0;
            for run in decoded.runs() {
                prop_assert!(run.count > 0 && run.first >= free_from);
                free_from = run.first + u64::from(run.count);
            }
            prop_assert!(free_from <= 256 && decoded.pages() <= PAGES_MAX);
        }
    }

    #[test]
    fn pushed_pages_come_back(steps in prop::collection::vec((0u64..4, 1u32..4), 1..80)) {
        let (mut list, mut next, mut pages) = (PageRuns::new(), 0u64, Vec::new());
        for (gap, count) in steps {
            let run = PageRun { first: next + gap, count };
            list.push(run).expect("ascending and few");
            pages.extend(run.first..run.first + u64::from(count));
            next = run.first + u64::from(count);
        }
        let mut back = PageRuns::new();
        back.decode(&encoded(&list), next).expect("a valid list");
        let got: Vec<u64> = (back.runs().iter())
            .flat_map(|run| run.first..run.first + u64::from(run.count))
            .collect();
        prop_assert_eq!(got, pages);
    }

    #[test]
    fn zero_pages_come_back(gaps in prop::collection::vec(1u64..40, 1..200)) {
        let (mut zero, mut page, mut pages) = (ZeroPages::new(), 0u64, Vec::new());
        for gap in gaps {
            page += if gap < 30 { 1 } else { gap };
            prop_assert_eq!(zero.insert(page), Ok(true));
            pages.push(page);
        }
        let mut bytes = Vec::new();
        zero.encode(&mut bytes);
        let mut back = ZeroPages::new();
        back.decode(&bytes, page + 1).expect("a valid bitmap");
        let got: Vec<u64> = back.runs().flat_map(|r| r.first..r.first + u64::from(r.count)).collect();
        prop_assert_eq!(&got, &pages);
        prop_assert_eq!(back.count() as usize, pages.len());
        prop_assert!(ZeroPages::new().decode(&bytes, page).is_err());
    }

    #[test]
    fn any_zero_bitmap_is_refused_or_canonical(bytes in prop::collection::vec(any::<u8>(), 0..40)) {
        let mut zero = ZeroPages::new();
        if zero.decode(&bytes, u64::MAX).is_ok() {
            let mut again = Vec::new();
            zero.encode(&mut again);
            prop_assert_eq!(again, bytes);
        }
    }
}
