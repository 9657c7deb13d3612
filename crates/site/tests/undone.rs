//! What a removal, a deletion, a late end of a migration and a stop leave in the book, also when they could not be written.

mod common;

use common::{enrolled, host};
use godwit_site::{Book, Free, Heard, HostRow, Row, Surveyed, Whereabouts};
use godwit_types::site::{Claim, Instance, RecordSaid, SiteHeard, Stamp, SurveyAnswer};
use godwit_types::{Generation, VmName};

fn web() -> VmName {
    VmName::new("web").unwrap()
}

fn life(of: &str) -> Instance {
    Instance {
        counter: 1,
        boot_id: "boot".into(),
        machine_id: of.to_owned(),
    }
}

fn knows(stamp: Stamp) -> SiteHeard {
    SiteHeard {
        stamp,
        complete: stamp,
    }
}

fn hear(book: &mut Book, of: &str, stamp: Stamp, claim: Claim) {
    let record = RecordSaid {
        vm: web(),
        highest: book.highest(&web()),
        may_live: claim.may_hold(),
        claim,
        images: Vec::new(),
    };
    let ticket = book.ask();
    let heard = Heard {
        instance: life(of),
        knows: knows(stamp),
        records: vec![record],
    };
    book.hear(&host(of), ticket, heard);
}

/// Every host that is asked holds nothing.
fn free(book: &mut Book, on: &[&str]) -> Free {
    let on: Vec<_> = on.iter().map(|name| host(name)).collect();
    let survey = book.begin_survey(&web(), &on).unwrap();
    let stamp = book.stamp();
    let asked = survey.hosts.iter();
    let answers = asked.map(|host| {
        let answer = SurveyAnswer {
            highest: survey.level,
            may_live: false,
            claim: Claim::No,
            instance: life(host.as_str()),
            knows: knows(stamp),
            images: Vec::new(),
        };
        (host.clone(), answer)
    });
    let answers = answers.collect();
    match book.take_survey(&survey, &answers) {
        Surveyed::Free(free) => free,
        other => panic!("not free: {other:?}"),
    }
}

/// Host a holds the VM and says so; b and c are heard.
fn web_on_a() -> Book {
    let mut book = Book::default();
    for name in ["a", "b", "c"] {
        book.add_host(enrolled(name), HostRow::default());
        let stamp = book.stamp();
        hear(&mut book, name, stamp, Claim::No);
    }
    let free = free(&mut book, &["a"]);
    let generation = book.grant(free, &host("a")).unwrap().generation;
    let (on, stamp) = (true, book.stamp());
    hear(&mut book, "a", stamp, Claim::Holds { generation, on });
    book
}

#[test]
fn a_removal_that_was_not_written_leaves_the_holder_known() {
    let mut book = web_on_a();
    book.lose(&host("a"));
    let removal = book.remove(&host("a"), true).unwrap();
    assert_eq!(book.entry(&web()).unwrap().holder, None);
    let _ = book.take_unwritten();
    book.not_removed(removal);
    let after = book.entry(&web()).unwrap();
    assert_eq!(after.holder, Some(host("a")));
    assert!(after.may_hold.contains_key(&host("a")));
    // The database may have lost its row all the same.
    let batch = book.take_unwritten();
    let mut rows = batch.rows().iter();
    assert!(rows.any(|row| matches!(row, Row::Host(of, _) if *of == host("a"))));
}

#[test]
fn a_guest_ran_last_where_people_s_words_let_it_run_on_past_a_permission_of_which_nothing_came() {
    let mut book = web_on_a();
    let claims = |book: &mut Book, of: &str, generation: u64| {
        let (on, stamp) = (false, book.stamp());
        let generation = Generation(generation);
        hear(book, of, stamp, Claim::Holds { generation, on });
    };
    // Given to b, which a person let run on under this one's next generation; then b was permitted to give it to c.
    let move_to = |book: &mut Book, from: &str, to: &str| {
        let permitted = book.permit_migration(&web(), &host(from), &host(to));
        permitted.unwrap().generation.0
    };
    let given = move_to(&mut book, "a", "b");
    let stamp = book.stamp();
    hear(&mut book, "a", stamp, Claim::No);
    claims(&mut book, "b", given + 1);
    let unused = move_to(&mut book, "b", "c");
    assert_eq!(book.ran(&web()).holder, Some(host("b")));
    // And a person let it run on at a, which outranks b by far.
    let stamp = book.stamp();
    hear(&mut book, "b", stamp, Claim::No);
    claims(&mut book, "a", unused + (1 << 20));
    assert_eq!(
        book.entry(&web()).unwrap().holder,
        Some(host("b")),
        "no grant names it"
    );
    assert_eq!(book.ran(&web()).holder, Some(host("a")));
    // Who was never permitted to hold it, or claims what nobody reaches, tells nothing of that.
    claims(&mut book, "c", unused + (1 << 21));
    assert_eq!(
        book.ran(&web()).holder,
        Some(host("c")),
        "it was to take it"
    );
    claims(&mut book, "c", unused + (1 << 60));
    assert_eq!(book.ran(&web()).holder, Some(host("a")));
    let stamp = book.stamp();
    hear(&mut book, "c", stamp, Claim::No);
    let free = free(&mut book, &[]);
    drop(book.delete(free).unwrap());
    assert_eq!(book.ran(&web()).holder, None);
}

#[test]
fn a_host_that_was_emptied_and_removed_is_no_longer_the_holder() {
    let mut book = web_on_a();
    drop(free(&mut book, &[]));
    assert!(book.may_hold(&web()).is_empty());
    assert_eq!(book.entry(&web()).unwrap().holder, Some(host("a")));
    let removal = book.remove(&host("a"), false).unwrap();
    assert_eq!(book.entry(&web()).unwrap().holder, None);
    // It may still hold nothing if that is not written.
    book.not_removed(removal);
    let after = book.entry(&web()).unwrap();
    assert_eq!(after.holder, Some(host("a")));
    assert!(after.may_hold.is_empty());
}

#[test]
fn a_deletion_that_was_not_written_leaves_the_holder_known() {
    let mut book = web_on_a();
    let held = book.entry(&web()).unwrap().held;
    let free = free(&mut book, &[]);
    let deletion = book.delete(free).unwrap();
    assert!(book.entry(&web()).unwrap().deleted);
    book.not_deleted(deletion);
    let after = book.entry(&web()).unwrap();
    assert_eq!((after.deleted, after.held), (false, held));
    assert_eq!(after.holder, Some(host("a")));
}

#[test]
fn the_late_end_of_a_migration_brings_no_removed_host_back() {
    let mut book = web_on_a();
    book.permit_migration(&web(), &host("a"), &host("b"))
        .unwrap();
    book.lose(&host("b"));
    drop(book.remove(&host("b"), true).unwrap());
    book.migration_ended(&web(), &host("a"), &host("b"), true);
    let entry = book.entry(&web()).unwrap();
    assert_eq!(entry.holder, None);
    assert!(!entry.may_hold.contains_key(&host("b")), "{entry:?}");
    // Where it was it is gone, and nothing stands in the way of a start.
    let generation = book.highest(&web());
    let (to, stamp) = (host("b"), book.stamp());
    hear(&mut book, "a", stamp, Claim::Moved { generation, to });
    drop(free(&mut book, &["c"]));
    assert_eq!(book.whereabouts(&web()), Whereabouts::Nowhere);
}

#[test]
fn a_host_that_is_put_back_to_before_a_stop_is_known_as_an_old_copy() {
    let mut book = web_on_a();
    let (generation, before) = (book.entry(&web()).unwrap().held, book.stamp());
    let claim = |on| Claim::Holds { generation, on };
    hear(&mut book, "a", before, claim(true));
    book.order(&web());
    let ordered = book.stamp();
    assert!(ordered > before);
    hear(&mut book, "a", ordered, claim(false));
    assert_eq!(
        book.standing(&host("a")),
        godwit_types::site::Standing::Known
    );
    // Its state directory is from before the stop.
    hear(&mut book, "a", before, claim(true));
    assert_eq!(
        book.standing(&host("a")),
        godwit_types::site::Standing::OldCopy
    );
}

#[test]
fn a_restored_controller_does_not_count_up_to_the_words_that_it_forgot() {
    let mut book = web_on_a();
    let before = book.stamp();
    let later = Stamp {
        number: before.number + 2,
        ..before
    };
    hear(&mut book, "b", later, Claim::No);
    assert!(book.is_restored());
    for _ in 0..3 {
        book.order(&web());
    }
    book.lose(&host("c"));
    drop(book.remove(&host("c"), true).unwrap());
    assert_eq!(book.stamp(), before);
}

#[test]
fn a_silent_host_may_wait_for_whom_it_was_to_give_a_vm_to() {
    let mut book = web_on_a();
    let waits = |book: &Book| book.may_wait_for(&web(), &host("b")).cloned();
    assert_eq!(waits(&book), None);
    book.permit_migration(&web(), &host("a"), &host("b"))
        .unwrap();
    assert_eq!(waits(&book), None, "a answers, and says what it waits for");
    book.lose(&host("a"));
    assert_eq!(waits(&book), Some(host("a")));
    book.fence(&host("a")).unwrap();
    assert_eq!(waits(&book), None);
    assert!(book.highest(&web()) > Generation(0));
}
