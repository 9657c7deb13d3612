//! A VM passes from host to host: no order of polls looks like two holders, and it leaves only from where it is.

use super::common::host;
use super::{
    GAP, free, gave, grant, hear, heard, holds, moved, no, said, site, survey, vm, web_on_a,
};
use godwit_site::{Book, Refusal, Row, SinceGift, Surveyed, Ticket, Whereabouts};
use godwit_types::site::{Claim, RecordSaid, SurveyAnswer};
use godwit_types::{Generation, VmName};

/// What may happen next while two hosts hand a VM over and are polled meanwhile.
#[derive(Clone)]
struct Handover {
    book: Book,
    held: u64,
    /// How far the hosts are: 0 before the gift, 1 given, 2 taken, 3 acknowledged.
    progress: u8,
    polls: [Polled; 2],
}

/// The polls of one host: how many are left, and the one under way.
#[derive(Clone)]
struct Polled {
    left: u8,
    asked: Option<Ticket>,
    answer: Option<Vec<RecordSaid>>,
}

const NAMES: [&str; 2] = ["a", "b"];

impl Handover {
    fn record(&self, which: usize) -> Vec<RecordSaid> {
        let (held, next) = (self.held, self.held + 1);
        let claim = match (which, self.progress) {
            (0, 0) => holds(held),
            (0, 1 | 2) => gave(next),
            (0, _) => moved(next),
            (_, 0 | 1) => {
                return vec![said(
                    "web",
                    held,
                    Claim::Promised {
                        generation: Generation(next),
                        from: host("a"),
                    },
                )];
            }
            _ => holds(next),
        };
        let highest = if self.progress == 0 { held } else { next };
        vec![said("web", highest, claim)]
    }

    /// Every next step; returns how many ends there were.
    fn explore(&self) -> u64 {
        let mut ends = 0;
        let mut is_end = true;
        if self.progress < 3 {
            is_end = false;
            let mut next = self.clone();
            next.progress += 1;
            ends += next.explore();
        }
        for (which, of) in NAMES.into_iter().enumerate() {
            let polled = &self.polls[which];
            if polled.left == 0 {
                continue;
            }
            is_end = false;
            let mut next = self.clone();
            match (polled.asked, polled.answer.clone()) {
                (None, _) => next.polls[which].asked = Some(next.book.ask()),
                (Some(_), None) => next.polls[which].answer = Some(self.record(which)),
                (Some(ticket), Some(records)) => {
                    let knows = next.book.stamp();
                    next.book.hear(&host(of), ticket, heard(of, knows, records));
                    next.polls[which] = Polled {
                        left: polled.left - 1,
                        asked: None,
                        answer: None,
                    };
                    assert_eq!(next.book.twice(&vm("web")), None);
                    assert_ne!(next.book.whereabouts(&vm("web")), Whereabouts::Nowhere);
                }
            }
            ends += next.explore();
        }
        ends + u64::from(is_end)
    }
}

#[test]
fn a_handover_never_looks_like_two_holders_whatever_the_order_of_polls() {
    let (mut book, held) = web_on_a();
    let permitted = book.permit_migration(&vm("web"), &host("a"), &host("b"));
    assert_eq!(permitted.unwrap().generation.0, held + 1);
    let polled = |left| Polled {
        left,
        asked: None,
        answer: None,
    };
    let handover = Handover {
        book,
        held,
        progress: 0,
        polls: [polled(2), polled(1)],
    };
    assert_eq!(handover.clone().explore(), 18_480);
    let handover = Handover {
        polls: [polled(1), polled(2)],
        ..handover
    };
    assert_eq!(handover.explore(), 18_480);
}

#[test]
fn two_holders_are_seen_once_each_was_asked_after_the_others_claim() {
    let (mut book, held) = web_on_a();
    hear(&mut book, "b", vec![said("web", held + 5, holds(held + 5))]);
    assert_eq!(book.twice(&vm("web")), None);
    hear(&mut book, "a", vec![said("web", held, holds(held))]);
    let twice = book.twice(&vm("web")).expect("two hosts hold it");
    // The higher generation was never granted to b.
    let copies: Vec<_> = twice.copies.iter().map(|copy| copy.host.as_str()).collect();
    assert_eq!(copies, ["a", "b"]);
    assert_eq!(twice.to_pause().collect::<Vec<_>>(), [&host("b")]);
    assert!(matches!(
        book.permit_migration(&vm("web"), &host("a"), &host("b")),
        Err(Refusal::Twice { .. })
    ));
}

#[test]
fn of_two_granted_copies_the_lower_one_is_paused() {
    let (mut book, held) = web_on_a();
    let permitted = book.permit_migration(&vm("web"), &host("a"), &host("b"));
    let next = permitted.unwrap().generation.0;
    hear(&mut book, "b", vec![said("web", next, holds(next))]);
    hear(&mut book, "a", vec![said("web", held, holds(held))]);
    let twice = book.twice(&vm("web")).expect("two hosts hold it");
    assert!(twice.copies.iter().all(|copy| copy.granted));
    assert_eq!(twice.to_pause().collect::<Vec<_>>(), [&host("a")]);
}

#[test]
fn a_migrations_end_makes_its_destination_the_holder() {
    let (mut book, _) = web_on_a();
    book.permit_migration(&vm("web"), &host("a"), &host("b"))
        .unwrap();
    book.lose(&host("b"));
    book.migration_ended(&vm("web"), &host("a"), &host("b"), true);
    let batch = book.take_unwritten();
    let written = batch.rows().iter().find_map(|row| match row {
        Row::Vm(_, entry) => Some(entry.holder.clone()),
        _ => None,
    });
    assert_eq!(written, Some(Some(host("b"))));
    let a_gave = vec![said(
        "web",
        book.highest(&vm("web")).0,
        moved(book.highest(&vm("web")).0),
    )];
    hear(&mut book, "a", a_gave);
    let silent = Whereabouts::Silent {
        hosts: vec![host("b")],
    };
    assert_eq!(book.whereabouts(&vm("web")), silent);
}

#[test]
fn a_vm_leaves_only_from_its_holder() {
    let (mut book, held) = web_on_a();
    let refused = book.permit_migration(&vm("web"), &host("b"), &host("a"));
    assert!(
        matches!(&refused, Err(Refusal::NotHolder { holder, .. }) if *holder == host("a")),
        "{refused:?}"
    );
    assert_eq!(book.highest(&vm("web")).0, held);
    // A host that it may have reached since may pass it on, before the end is heard.
    let first = book.permit_migration(&vm("web"), &host("a"), &host("b"));
    first.expect("from its holder");
    let second = book.permit_migration(&vm("web"), &host("b"), &host("a"));
    second.expect("from where it went");
}

#[test]
fn a_vm_leaves_from_where_it_arrived_by_a_handover_that_a_restored_database_forgot() {
    let (mut book, held) = web_on_a();
    let arrived = Generation(held + 1);
    let record = |highest, claim| RecordSaid {
        vm: vm("web"),
        highest,
        claim,
        may_live: false,
        images: Vec::new(),
    };
    let holds = Claim::Holds {
        generation: arrived,
        on: true,
    };
    hear(&mut book, "b", vec![record(arrived, holds)]);
    let early = book.permit_migration(&vm("web"), &host("b"), &host("a"));
    assert!(matches!(early, Err(Refusal::NotHolder { .. })), "{early:?}");
    let moved = Claim::Moved {
        generation: arrived,
        to: host("b"),
    };
    hear(&mut book, "a", vec![record(arrived, moved)]);
    book.permit_migration(&vm("web"), &host("b"), &host("a"))
        .expect("its former holder says that it went");
}

#[test]
fn a_copy_that_a_person_kept_can_be_moved() {
    let (mut book, held) = web_on_a();
    let kept = RecordSaid {
        vm: vm("web"),
        highest: Generation(held),
        claim: Claim::Holds {
            generation: Generation(held - 1),
            on: true,
        },
        may_live: true,
        images: Vec::new(),
    };
    hear(&mut book, "b", vec![kept]);
    // The other copy was ended, and its host has nothing of the VM left.
    hear(&mut book, "a", Vec::new());
    book.permit_migration(&vm("web"), &host("b"), &host("a"))
        .expect("nobody else holds it");
}

/// A VM was given from a to b; then both were said to be off, and it was granted to c. Host a is back with what it gave.
struct Overtaken {
    book: Book,
    /// The generation that a gave.
    given: u64,
    /// The generation that c was granted.
    later: Generation,
}

impl Overtaken {
    fn new() -> Self {
        let mut book = site(&["a", "b", "c"]);
        for name in ["a", "b", "c"] {
            hear(&mut book, name, Vec::new());
        }
        let held = grant(&mut book, "web", "a");
        let permitted = book.permit_migration(&vm("web"), &host("a"), &host("b"));
        let given = permitted.unwrap().generation.0;
        hear(&mut book, "a", vec![said("web", given, gave(given))]);
        assert!(given > held && book.overtaken_gifts(&host("a")).is_empty());
        for name in ["a", "b"] {
            book.lose(&host(name));
            book.fence(&host(name)).unwrap();
        }
        let found = free(survey(&mut book, "web", "c", &["a", "b"]));
        let later = book.grant(found, &host("c")).unwrap().generation;
        assert!(later.0 >= given + GAP);
        hear(&mut book, "a", vec![said("web", given, gave(given))]);
        Self { book, given, later }
    }

    fn c_says(&mut self, claim: Claim) {
        let record = said("web", self.later.0, claim);
        hear(&mut self.book, "c", vec![record]);
    }

    fn c_holds(&mut self) {
        self.c_says(holds(self.later.0));
    }

    /// What a gives up by itself.
    fn given_up(&self) -> Vec<(VmName, Generation)> {
        self.book.overtaken_gifts(&host("a"))
    }

    /// What became of it, for a person to decide.
    fn since(&self) -> Option<SinceGift> {
        self.book.since_gift(&vm("web"), &host("a"))
    }

    fn lost_with_c(&self) -> Option<SinceGift> {
        let (with, at) = (host("c"), self.later);
        Some(SinceGift::Lost { with, at })
    }
}

#[test]
fn a_gift_is_overtaken_once_the_later_holder_says_that_it_holds_the_vm() {
    let mut site = Overtaken::new();
    let (given, later) = (site.given, site.later);
    let at_once = vec![(vm("web"), later)];
    assert_eq!((site.given_up(), site.since()), (vec![], None));
    site.c_holds();
    assert_eq!(site.given_up(), at_once);
    assert_eq!(site.book.overtaken_gifts(&host("c")), []);
    let (by, at) = (host("c"), later);
    assert_eq!(site.since(), Some(SinceGift::Held { by, at }));
    // The one that was to receive it is there after all, with its memory.
    let promised = Claim::Promised {
        generation: Generation(given),
        from: host("a"),
    };
    hear(&mut site.book, "b", vec![said("web", given, promised)]);
    assert_eq!(site.given_up(), []);
    site.book.lose(&host("b"));
    assert_eq!(site.given_up(), [], "b is silent again");
    hear(&mut site.book, "b", vec![said("web", given, Claim::No)]);
    assert_eq!(site.given_up(), at_once);
    site.book.lose(&host("c"));
    assert_eq!(
        (site.given_up(), site.since()),
        (vec![], None),
        "c is silent"
    );
    // A claim that nobody granted ends nobody's copy.
    let invented = later.0 + 1;
    let claim = said("web", invented, holds(invented));
    hear(&mut site.book, "b", vec![claim]);
    assert_eq!(site.since(), None, "b was never granted that");
}

#[test]
fn a_gift_older_than_what_was_lost_with_its_host_is_given_up_by_a_persons_word_alone() {
    let mut site = Overtaken::new();
    site.c_holds();
    site.book.lose(&host("c"));
    assert_eq!(site.since(), None, "c may come back");
    site.book.fence(&host("c")).unwrap();
    assert_eq!(
        (site.given_up(), site.since()),
        (vec![], site.lost_with_c())
    );
    // A start is refused with the way out, though a alone is left to answer.
    let begun = site.book.begin_survey(&vm("web"), &[]).unwrap();
    let (name, a) = (host("a"), said("web", site.given, gave(site.given)));
    let answer = SurveyAnswer {
        claim: a.claim,
        may_live: true,
        ..no(&name, Generation(a.highest.0))
    };
    let refused = site.book.take_survey(&begun, &[(name, answer)].into());
    let Surveyed::Refused(Refusal::GiftKept(kept)) = refused else {
        panic!("{refused:?}")
    };
    let text = kept.to_string();
    assert!(text.contains("host c was granted the VM later"), "{text}");
    let way_out = "godwit vm resolve web --give-up-on a --confirm-fenced c";
    assert_eq!(kept.way_out(), way_out);
    assert!(text.contains(way_out), "{text}");
    let _ = site.book.remove(&host("c"), true).unwrap();
    assert_eq!(
        (site.given_up(), site.since()),
        (vec![], site.lost_with_c())
    );
}

#[test]
fn a_gift_older_than_what_its_host_let_go_is_given_up_by_a_persons_word_alone() {
    let mut site = Overtaken::new();
    site.c_holds();
    // A host names no VM that it let go; that the grant has not reached it looks the same.
    hear(&mut site.book, "c", Vec::new());
    assert_eq!((site.given_up(), site.since()), (vec![], None));
    let unsure = |book: &Book| book.unsure_since(&vm("web"), &host("a"));
    assert_eq!(unsure(&site.book), Some(host("c")));
    let begun = site.book.begin_survey(&vm("web"), &[]).unwrap();
    let answers = [(host("c"), no(&host("c"), begun.level))];
    let refused = site.book.take_survey(&begun, &answers.into());
    assert!(matches!(refused, Surveyed::Refused(_)), "a is not asked");
    hear(&mut site.book, "c", Vec::new());
    let (by, at) = (host("c"), site.later);
    let let_go = Some(SinceGift::LetGo { by, at });
    assert_eq!((site.given_up(), site.since()), (vec![], let_go));
    assert_eq!(unsure(&site.book), None);
    // A grant that never arrived leaves the same traces.
    let kept = site.book.kept_gift(&vm("web"), &host("a")).unwrap();
    let text = kept.to_string();
    assert!(
        text.contains("which may be the only memory of the VM"),
        "{text}"
    );
}

#[test]
fn a_gift_is_not_given_up_while_another_host_may_have_what_came_later() {
    let mut site = Overtaken::new();
    site.c_holds();
    site.book
        .permit_migration(&vm("web"), &host("c"), &host("b"))
        .expect_err("b is off");
    hear(&mut site.book, "b", Vec::new());
    site.book
        .permit_migration(&vm("web"), &host("c"), &host("b"))
        .unwrap();
    for name in ["b", "c"] {
        site.book.lose(&host(name));
    }
    site.book.fence(&host("c")).unwrap();
    assert_eq!(site.since(), None, "b may have taken it from c");
    site.book.fence(&host("b")).unwrap();
    assert!(matches!(site.since(), Some(SinceGift::Lost { with, .. }) if with == host("c")));
}

/// What host b was granted since is above what would run on at a: when b comes back, it would boot all the same.
#[test]
fn a_persons_word_runs_nothing_on_below_what_the_other_host_was_granted_since() {
    let mut site = Overtaken::new();
    site.book.lose(&host("a"));
    site.book.fence(&host("a")).unwrap();
    site.c_says(Claim::No);
    hear(&mut site.book, "b", Vec::new());
    let found = free(survey(&mut site.book, "web", "b", &["a"]));
    let at = site.book.grant(found, &host("b")).unwrap().generation;
    hear(&mut site.book, "b", vec![said("web", at.0, holds(at.0))]);
    let given = site.given;
    hear(&mut site.book, "a", vec![said("web", given, gave(given))]);
    site.book.lose(&host("b"));
    site.book.fence(&host("b")).unwrap();
    let refused = site
        .book
        .may_run_on(&vm("web"), &host("a"), Some(&host("b")));
    assert!(
        matches!(refused, Err(Refusal::Overtaken { .. })),
        "{refused:?}"
    );
    let with = host("b");
    assert_eq!(site.since(), Some(SinceGift::Lost { with, at }));
    // A host that is gone for good boots nothing any more.
    let _ = site.book.remove(&host("b"), true).unwrap();
    let allowed = site
        .book
        .may_run_on(&vm("web"), &host("a"), Some(&host("b")));
    assert_eq!(allowed, Ok(()));
}

/// Host b is gone for good, and so is host c, which was granted the VM later: the word about b says nothing of what c held.
#[test]
fn a_persons_word_about_one_removed_host_runs_nothing_on_below_what_another_one_held_since() {
    let mut site = Overtaken::new();
    site.c_holds();
    for name in ["b", "c"] {
        site.book.lose(&host(name));
        let _ = site.book.remove(&host(name), true).unwrap();
    }
    let (a, given) = (host("a"), site.given);
    hear(&mut site.book, "a", vec![said("web", given, gave(given))]);
    let word = |of: &str| site.book.may_run_on(&vm("web"), &a, Some(&host(of)));
    assert!(matches!(word("b"), Err(Refusal::Overtaken { .. })));
    assert_eq!(site.since(), site.lost_with_c(), "the way out names c");
}

#[test]
fn what_was_given_before_its_vm_was_deleted_is_given_up() {
    let mut site = Overtaken::new();
    site.c_holds();
    site.c_says(Claim::No);
    for name in ["a", "b"] {
        site.book.lose(&host(name));
        site.book.fence(&host(name)).unwrap();
    }
    let found = free(survey(&mut site.book, "web", "c", &["a", "b"]));
    let _ = site.book.delete(found).unwrap();
    let given = site.given;
    hear(&mut site.book, "a", vec![said("web", given, gave(given))]);
    let given_up = site.given_up();
    let at = given_up.first().expect("it is given up").1;
    assert!(at > site.later);
    assert_eq!(site.since(), Some(SinceGift::Deleted { at }));
}
