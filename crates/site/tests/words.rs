//! Whose word counts, and for how long: claims after a refused migration, a person's word that ended, an earlier life's
//! answer, a controller that was replaced, and what a list says of each.

use godwit_site::{Book, Entry, Heard, HostRow, News, Refusal, Survey, Surveyed, Whereabouts};
use godwit_types::site::{
    Claim, Instance, RecordSaid, SiteHeard, SiteHost, Stamp, Standing, SurveyAnswer,
};
use godwit_types::{Generation, HostName, VmName};
use std::collections::BTreeMap;

/// How many attempts one permission may take.
const GAP: u64 = 1 << 20;

fn host(name: &str) -> HostName {
    HostName::new(name).unwrap()
}

fn web() -> VmName {
    VmName::new("web").unwrap()
}

fn holds(generation: u64) -> Claim {
    Claim::Holds {
        generation: Generation(generation),
        on: true,
    }
}

fn said(highest: u64, claim: Claim) -> RecordSaid {
    RecordSaid {
        vm: web(),
        highest: Generation(highest),
        may_live: claim.may_hold(),
        claim,
        images: Vec::new(),
    }
}

/// A life of a host: `boot` of its machine.
fn life(of: &str, counter: u64, boot: &str) -> Instance {
    Instance {
        counter,
        boot_id: boot.to_owned(),
        machine_id: of.to_owned(),
    }
}

fn hear_life(book: &mut Book, of: &str, instance: Instance, records: Vec<RecordSaid>) -> Vec<News> {
    let (ticket, knows) = (book.ask(), book.stamp());
    let heard = Heard {
        instance,
        knows: SiteHeard {
            stamp: knows,
            complete: knows,
        },
        records,
    };
    book.hear(&host(of), ticket, heard)
}

fn hear(book: &mut Book, of: &str, records: Vec<RecordSaid>) -> Vec<News> {
    hear_life(book, of, life(of, 1, "1"), records)
}

fn answer(book: &Book, instance: Instance, highest: Generation, claim: Claim) -> SurveyAnswer {
    let knows = book.stamp();
    SurveyAnswer {
        highest,
        may_live: claim.may_hold(),
        claim,
        instance,
        knows: SiteHeard {
            stamp: knows,
            complete: knows,
        },
        images: Vec::new(),
    }
}

/// Every host that is asked says no, but for those that are silent.
fn all_say_no(book: &mut Book, survey: &Survey, silent: &[&str]) -> Surveyed {
    let asked = survey
        .hosts
        .iter()
        .filter(|host| !silent.contains(&host.as_str()));
    let answers: BTreeMap<HostName, SurveyAnswer> = asked
        .map(|host| {
            let of = life(host.as_str(), 1, "1");
            (host.clone(), answer(book, of, survey.level, Claim::No))
        })
        .collect();
    book.take_survey(survey, &answers)
}

/// Hosts a, b and c; VM web on a.
fn web_on_a() -> (Book, u64) {
    let mut book = Book::default();
    for name in ["a", "b", "c"] {
        let site = SiteHost {
            name: host(name),
            address: "192.0.2.1:1".parse().unwrap(),
            serial: name.to_owned(),
            counter: 0,
            machine_id: String::new(),
        };
        book.add_host(site, HostRow::default());
        hear(&mut book, name, Vec::new());
    }
    let survey = book.begin_survey(&web(), &[host("a")]).unwrap();
    let Surveyed::Free(free) = all_say_no(&mut book, &survey, &[]) else {
        panic!("not free");
    };
    let held = book.grant(free, &host("a")).unwrap().generation.0;
    hear(&mut book, "a", vec![said(held, holds(held))]);
    (book, held)
}

/// Whether each copy of the VM was granted to its host.
fn granted(book: &Book) -> BTreeMap<HostName, bool> {
    let copies = book.twice(&web()).expect("two hosts claim it").copies;
    copies
        .into_iter()
        .map(|copy| (copy.host, copy.granted))
        .collect()
}

#[test]
fn a_claim_after_a_refused_migration_counts_within_the_attempts_of_its_permission_alone() {
    for (above, counts) in [(0, true), (GAP - 1, true), (GAP, false), (1 << 30, false)] {
        let (mut book, held) = web_on_a();
        let permitted = book
            .permit_migration(&web(), &host("a"), &host("b"))
            .unwrap();
        book.migration_ended(&web(), &host("a"), &host("b"), false);
        let claimed = permitted.generation.0 + above;
        hear(&mut book, "b", vec![said(claimed, holds(claimed))]);
        hear(&mut book, "a", vec![said(held, holds(held))]);
        assert_eq!(granted(&book)[&host("b")], counts, "{above} above");
        assert!(granted(&book)[&host("a")]);
        let entry: &Entry = book.entry(&web()).unwrap();
        let holder = if counts { "b" } else { "a" };
        assert_eq!(entry.holder, Some(host(holder)), "{above} above");
    }
}

#[test]
fn a_later_permission_ends_what_an_earlier_one_let_a_host_claim() {
    let (mut book, held) = web_on_a();
    book.permit_migration(&web(), &host("a"), &host("b"))
        .unwrap();
    book.migration_ended(&web(), &host("a"), &host("b"), false);
    let later = book
        .permit_migration(&web(), &host("a"), &host("c"))
        .unwrap();
    let claimed = later.generation.0;
    hear(&mut book, "b", vec![said(claimed, holds(claimed))]);
    hear(&mut book, "a", vec![said(held, holds(held))]);
    assert!(!granted(&book)[&host("b")]);
    assert_eq!(book.entry(&web()).unwrap().holder, Some(host("a")));
    let twice = book.twice(&web()).unwrap();
    assert_eq!(twice.to_pause().collect::<Vec<_>>(), [&host("b")]);
}

#[test]
fn a_fence_that_ends_between_survey_and_grant_voids_the_grant() {
    let (mut book, _) = web_on_a();
    book.lose(&host("a"));
    book.fence(&host("a")).unwrap();
    let survey = book.begin_survey(&web(), &[host("b")]).unwrap();
    let Surveyed::Free(free) = all_say_no(&mut book, &survey, &["a"]) else {
        panic!("not free");
    };
    // It was never off, and is heard just now.
    hear(&mut book, "a", Vec::new());
    let refused = book.grant(free, &host("b"));
    assert!(matches!(refused, Err(Refusal::Stale { .. })), "{refused:?}");
    assert!(book.may_hold(&web()).contains(&host("a")));
    assert!(!book.may_hold(&web()).contains(&host("b")));
    // Nor is the VM deleted by such a word.
    book.lose(&host("a"));
    book.fence(&host("a")).unwrap();
    let survey = book.begin_survey(&web(), &[]).unwrap();
    let Surveyed::Free(free) = all_say_no(&mut book, &survey, &["a"]) else {
        panic!("not free");
    };
    hear(&mut book, "a", Vec::new());
    assert!(book.delete(free).is_err());
}

#[test]
fn an_earlier_life_of_an_agent_has_not_answered_a_survey() {
    let (mut book, _) = web_on_a();
    hear_life(&mut book, "a", life("a", 2, "2"), Vec::new());
    let survey = book.begin_survey(&web(), &[host("b")]).unwrap();
    let earlier = answer(&book, life("a", 1, "1"), survey.level, Claim::No);
    let b = answer(&book, life("b", 1, "1"), survey.level, Claim::No);
    let answers = BTreeMap::from([(host("a"), earlier), (host("b"), b)]);
    let verdict = book.take_survey(&survey, &answers);
    let not_itself = Refusal::NotItself { host: host("a") };
    assert_eq!(verdict, Surveyed::Refused(not_itself));
    assert!(book.may_hold(&web()).contains(&host("a")));
    assert_eq!(book.standing(&host("a")), Standing::OldCopy);
    // Nor has another machine with its certificate.
    let survey = book.begin_survey(&web(), &[]).unwrap();
    let clone = answer(&book, life("clone", 3, "1"), survey.level, Claim::No);
    let verdict = book.take_survey(&survey, &BTreeMap::from([(host("a"), clone)]));
    assert!(
        matches!(verdict, Surveyed::Refused(Refusal::NotItself { .. })),
        "{verdict:?}"
    );
    assert!(book.may_hold(&web()).contains(&host("a")));
    // Its newest life's no frees it.
    let survey = book.begin_survey(&web(), &[]).unwrap();
    let newest = answer(&book, life("a", 2, "2"), survey.level, Claim::No);
    let verdict = book.take_survey(&survey, &BTreeMap::from([(host("a"), newest)]));
    assert!(matches!(verdict, Surveyed::Free(_)), "{verdict:?}");
}

/// A host has heard a word of a later epoch.
fn hear_of_a_later_epoch(book: &mut Book, of: &str) -> Vec<News> {
    let later = Stamp {
        epoch: book.stamp().epoch + 1,
        number: 0,
    };
    let ticket = book.ask();
    let heard = Heard {
        instance: life(of, 1, "1"),
        knows: SiteHeard {
            stamp: later,
            complete: later,
        },
        records: Vec::new(),
    };
    book.hear(&host(of), ticket, heard)
}

#[test]
fn a_controller_whose_words_were_taken_is_replaced_and_does_not_take_over_in_turns() {
    let (mut book, _) = web_on_a();
    let knows = SiteHeard {
        stamp: book.stamp(),
        complete: book.stamp(),
    };
    book.updated(&host("a"), Standing::Known, knows);
    let news = hear_of_a_later_epoch(&mut book, "b");
    assert!(
        news.iter().any(|one| matches!(one, News::Replaced { .. })),
        "{news:?}"
    );
    assert!(book.is_replaced() && !book.is_restored() && !book.is_in_charge());
    assert_eq!((book.takeover(), book.finish_takeover()), (None, Ok(false)));
    let refused = book.begin_survey(&web(), &[]);
    let replaced = Refusal::Replaced {
        said_by: vec![host("b")],
    };
    assert_eq!(refused, Err(replaced));
    assert!(
        book.permit_migration(&web(), &host("a"), &host("b"))
            .is_err()
    );
    assert_eq!(book.update_for(&host("a")), None);
    hear_of_a_later_epoch(&mut book, "c");
    assert_eq!(book.said_by(), [host("b"), host("c")]);
    // Hosts that say so and were removed say nothing any more.
    for name in ["b", "c"] {
        book.lose(&host(name));
        drop(book.remove(&host(name), true).unwrap());
    }
    assert!(book.is_in_charge());
}

#[test]
fn a_controller_that_no_host_followed_takes_a_later_epoch_for_its_own_age() {
    let (mut book, _) = web_on_a();
    let news = hear_of_a_later_epoch(&mut book, "b");
    assert!(
        news.iter()
            .any(|one| matches!(one, News::RestoredCopy { .. })),
        "{news:?}"
    );
    assert!(book.is_restored() && book.takeover().is_some());
}

#[test]
fn a_host_was_never_off_when_it_answers_in_the_boot_that_was_known() {
    for (boot, counter, never_off) in [("1", 1, true), ("1", 2, true), ("2", 2, false)] {
        let (mut book, _) = web_on_a();
        book.lose(&host("a"));
        book.fence(&host("a")).unwrap();
        let news = hear_life(&mut book, "a", life("a", counter, boot), Vec::new());
        let told = News::FencedAnswered {
            host: host("a"),
            was_never_off: never_off,
        };
        assert!(news.contains(&told), "{news:?}");
        assert_eq!(book.was_fenced_falsely(&host("a")), never_off);
        // Told once; the alarm stays until a person's next word.
        assert_eq!(
            hear_life(&mut book, "a", life("a", counter, boot), Vec::new()),
            []
        );
        assert_eq!(book.was_fenced_falsely(&host("a")), never_off);
        book.lose(&host("a"));
        book.fence(&host("a")).unwrap();
        assert!(!book.was_fenced_falsely(&host("a")));
    }
}

#[test]
fn a_list_says_no_more_than_what_was_heard() {
    let (mut book, held) = web_on_a();
    let on_a = |answers| Whereabouts::Held {
        host: host("a"),
        answers,
    };
    assert_eq!(book.whereabouts(&web()), on_a(true));
    book.lose(&host("a"));
    assert_eq!(book.whereabouts(&web()), on_a(false));
    assert_eq!(book.silent_members(&web()), [host("a")]);
    // What a host said that is off holds nothing, and nobody waits for it.
    book.fence(&host("a")).unwrap();
    assert_eq!(book.whereabouts(&web()), Whereabouts::Nowhere);
    assert_eq!(book.silent_members(&web()), []);
    hear(&mut book, "a", vec![said(held, holds(held))]);
    // Its destination has been named and has not been asked since.
    book.permit_migration(&web(), &host("a"), &host("b"))
        .unwrap();
    let gave = Claim::Gave {
        generation: Generation(held + 1),
        to: host("b"),
    };
    hear(&mut book, "a", vec![said(held + 1, gave)]);
    assert_eq!(
        book.whereabouts(&web()),
        Whereabouts::HandingOver { host: host("a") }
    );
    assert!(!book.is_undelivered(&web()), "the gift waits for an answer");
    book.lose(&host("b"));
    let silent = Whereabouts::Silent {
        hosts: vec![host("b")],
    };
    assert_eq!(book.whereabouts(&web()), silent);
}

#[test]
fn a_grant_that_its_host_never_got_is_settled_by_a_survey() {
    let (mut book, held) = web_on_a();
    // Its controller died before it said so: the host knows only the level.
    hear(&mut book, "a", vec![said(held - 1, Claim::No)]);
    assert_eq!(
        book.whereabouts(&web()),
        Whereabouts::HandingOver { host: host("a") }
    );
    assert!(book.is_undelivered(&web()));
    book.lose(&host("a"));
    assert!(!book.is_undelivered(&web()), "silence is no answer");
    hear(&mut book, "a", vec![said(held - 1, Claim::No)]);
    let survey = book.begin_survey(&web(), &[]).unwrap();
    let found = all_say_no(&mut book, &survey, &[]);
    assert!(matches!(found, Surveyed::Free(_)), "{found:?}");
    assert_eq!(book.whereabouts(&web()), Whereabouts::Nowhere);
    assert!(!book.is_undelivered(&web()));
}

#[test]
fn a_record_without_a_guest_that_the_book_went_past_is_no_second_copy() {
    for may_live in [false, true] {
        let (mut book, held) = web_on_a();
        book.lose(&host("a"));
        book.fence(&host("a")).unwrap();
        let survey = book.begin_survey(&web(), &[host("b")]).unwrap();
        let Surveyed::Free(free) = all_say_no(&mut book, &survey, &["a"]) else {
            panic!("not free");
        };
        let next = book.grant(free, &host("b")).unwrap().generation.0;
        hear(&mut book, "b", vec![said(next, holds(next))]);
        let record = RecordSaid {
            may_live,
            ..said(held, holds(held))
        };
        hear_life(&mut book, "a", life("a", 2, "2"), vec![record]);
        assert_eq!(book.twice(&web()).is_some(), may_live);
    }
}
