//! Rules that no seed of the simulator judges: each fails once its fault is planted (GODWIT_PLANT, in a build that can plant).

mod common;
#[path = "common/records.rs"]
mod records;

use common::{enrolled, host};
use godwit_site::plant::Plant;
use godwit_site::{Book, Heard, HostRow, HostSite, Judged, Refusal, Surveyed};
use godwit_types::site::{
    Claim, Instance, RecordSaid, SiteAnswer, SiteHeard, SiteHost, SiteTable, SiteVm, Stamp,
    Standing, SurveyAnswer, WholeSurvey,
};
use godwit_types::{Generation, VmName};
use std::collections::{BTreeMap, BTreeSet};

fn planted() -> Option<Plant> {
    Plant::from_name(&std::env::var("GODWIT_PLANT").ok()?)
}

fn web() -> VmName {
    VmName::new("web").unwrap()
}

#[test]
fn a_no_from_before_a_host_was_named_again_does_not_take_it_out() {
    let mut book = Book::default();
    book.plant = planted();
    for name in ["a", "b"] {
        book.add_host(enrolled(name), HostRow::default());
    }
    let only = BTreeSet::from([host("b")]);
    let survey = book.survey_of(&web(), only).unwrap();
    book.permit_migration(&web(), &host("a"), &host("b"))
        .unwrap();
    let no = SurveyAnswer {
        highest: survey.level,
        claim: Claim::No,
        may_live: false,
        instance: Instance::default(),
        knows: SiteHeard::default(),
        images: Vec::new(),
    };
    book.take_survey(&survey, &BTreeMap::from([(host("b"), no)]));
    assert!(book.may_hold(&web()).contains(&host("b")));
}

fn row(number: u64) -> SiteVm {
    SiteVm {
        holder: Some(host("a")),
        held: Generation(3),
        may_hold: BTreeSet::from([host("a")]),
        deleted: false,
        stamp: Stamp { epoch: 0, number },
    }
}

/// Host a of these, which knows all of them and would boot the VM that it holds under generation 3.
fn a_asks_of(hosts: &[&str]) -> HostSite {
    let table = SiteTable {
        hosts: hosts.iter().copied().map(enrolled).collect(),
        had_second: true,
        vms: BTreeMap::from([(web(), row(5))]),
        ..SiteTable::default()
    };
    let mut site = HostSite::new(host("a"), Instance::default(), table);
    site.plant = planted();
    site.wish(web(), Generation(3));
    site
}

#[test]
fn an_answer_that_is_older_than_what_the_host_knows_boots_nothing() {
    let mut site = a_asks_of(&["a", "b", "c"]);
    let answer = |number| SiteAnswer {
        from: Some(host("b")),
        standing: Standing::Known,
        in_charge: false,
        stamp: Stamp::default(),
        vms: BTreeMap::from([(web(), row(number))]),
        ..SiteAnswer::default()
    };
    site.no_controller();
    site.hear(answer(4));
    site.round_is_over();
    let judged = site.judge(&web(), 0, false);
    assert!(matches!(judged, Judged::Wait(_)), "{judged:?}");
    site.hear(answer(5));
    assert_eq!(site.judge(&web(), 0, false), Judged::Boot);
}

#[test]
fn a_host_hears_its_controller_out_before_its_neighbours_let_it_boot() {
    let mut site = a_asks_of(&["a", "b"]);
    site.hear(SiteAnswer {
        from: Some(host("b")),
        standing: Standing::Known,
        vms: BTreeMap::from([(web(), row(5))]),
        ..SiteAnswer::default()
    });
    let judged = site.judge(&web(), 0, false);
    assert!(matches!(judged, Judged::Wait(_)), "{judged:?}");
    site.no_controller();
    assert_eq!(site.judge(&web(), 0, false), Judged::Boot);
}

/// Host a gave the VM that it held under generation 3 to host b under generation 4, and a person says that b is off.
#[test]
fn a_persons_word_at_a_host_does_not_outweigh_what_others_know() {
    let asking = a_asks_of(&["a", "b", "c"]).asking_about(&web(), Generation(3));
    let heard = |answer: SiteAnswer| {
        let mut asking = asking.clone();
        asking.hear(answer);
        asking.refuses_word(&web(), Some(&host("b")), false)
    };
    let says = |of: &str, records: Vec<RecordSaid>| SiteAnswer {
        from: Some(host(of)),
        records,
        ..SiteAnswer::default()
    };
    let must_say = |why: Option<String>, words: &str| {
        let why = why.unwrap_or_default();
        assert!(why.contains(words), "{why}");
    };
    // Nobody answers, or nobody knows better.
    assert_eq!(asking.refuses_word(&web(), Some(&host("b")), false), None);
    assert_eq!(heard(says("c", vec![records::holds(web(), 2)])), None);
    // The VM was started on host c since, as it says itself or another host knows.
    must_say(
        heard(says("c", vec![records::holds(web(), 4)])),
        "host c holds it",
    );
    let known = |holder: &str| SiteAnswer {
        vms: BTreeMap::from([(
            web(),
            SiteVm {
                holder: Some(host(holder)),
                held: Generation(4),
                ..row(6)
            },
        )]),
        ..says("c", vec![])
    };
    must_say(heard(known("c")), "host c holds it");
    // That the host which is off took it is what the person decides about.
    assert_eq!(heard(known("b")), None);
    // What is said to be off answers.
    must_say(heard(says("b", vec![])), "not powered off");
    let mut by_controller = asking.clone();
    by_controller.hear(says("b", vec![]));
    assert_eq!(
        by_controller.refuses_word(&web(), Some(&host("b")), true),
        None
    );
    // This machine is not the host any more.
    for standing in [
        Standing::Removed,
        Standing::OldCopy,
        Standing::SecondInstance,
    ] {
        let told = SiteAnswer {
            standing,
            ..says("c", vec![])
        };
        must_say(heard(told), "boots nothing");
    }
}

/// Host c was granted the VM by a controller that died before it told anybody; host b knows no more than host a.
#[test]
fn one_hosts_answer_boots_nothing_while_another_may_still_speak_against_it_or_has_before() {
    let mut site = a_asks_of(&["a", "b", "c"]);
    let says = |of: &str, records: Vec<RecordSaid>| SiteAnswer {
        from: Some(host(of)),
        vms: BTreeMap::from([(web(), row(5))]),
        records,
        ..SiteAnswer::default()
    };
    let newest = records::holds(web(), 5);
    site.no_controller();
    site.hear(says("b", vec![]));
    let judged = site.judge(&web(), 0, false);
    assert!(matches!(judged, Judged::Wait(_)), "{judged:?}");
    site.hear(says("c", vec![newest]));
    let is_refused = |site: &HostSite| matches!(site.judge(&web(), 9, false), Judged::Never(_));
    assert!(is_refused(&site));
    // In the next round host c is late, or dead.
    site.forget_answers();
    site.no_controller();
    site.hear(says("b", vec![]));
    site.round_is_over();
    site.wish(web(), Generation(3));
    assert!(is_refused(&site));
    // A person knows better, or a controller in charge does.
    let mut alone = site.clone();
    alone.boot_alone();
    assert_eq!(alone.judge(&web(), 9, false), Judged::Boot);
    site.hear(SiteAnswer {
        from: None,
        in_charge: true,
        ..says("b", vec![])
    });
    assert_eq!(site.judge(&web(), 9, false), Judged::Boot);
    site.forget_answers();
    site.no_controller();
    site.hear(says("b", vec![]));
    site.round_is_over();
    assert_eq!(site.judge(&web(), 9, false), Judged::Boot);
}

fn stamp(epoch: u64, number: u64) -> Stamp {
    Stamp { epoch, number }
}

/// A host answers a poll; `knows` is the newest word that it has heard.
fn hear(book: &mut Book, name: &str, counter: u64, knows: Stamp) {
    let heard = Heard {
        instance: Instance {
            counter,
            boot_id: "boot".into(),
            machine_id: name.to_owned(),
        },
        knows: SiteHeard {
            stamp: knows,
            complete: knows,
        },
        records: Vec::new(),
    };
    let ticket = book.ask();
    book.hear(&host(name), ticket, heard);
}

/// Hosts a and b are enrolled; a was heard.
fn two_hosts() -> Book {
    let mut book = Book::new(stamp(0, 7));
    book.plant = planted();
    for name in ["a", "b"] {
        book.add_host(enrolled(name), HostRow::default());
    }
    let knows = book.stamp();
    hear(&mut book, "a", 1, knows);
    book
}

#[test]
fn a_controller_that_hears_a_later_word_than_its_own_grants_nothing() {
    let mut book = two_hosts();
    hear(&mut book, "a", 1, stamp(0, 1000));
    let refused = book.begin_survey(&web(), &[host("a")]);
    assert!(
        matches!(refused, Err(Refusal::Restored { .. })),
        "{refused:?}"
    );
}

#[test]
fn a_restored_database_does_not_believe_that_a_host_is_off() {
    let mut book = two_hosts();
    book.fence(&host("b")).unwrap();
    hear(&mut book, "a", 1, stamp(0, 1000));
    assert!(!book.is_fenced(&host("b")));
    assert!(book.waits_for().contains(&host("b")));
}

#[test]
fn what_could_not_be_written_is_due_again() {
    let mut book = two_hosts();
    let first = book.take_unwritten();
    let rows = first.rows().to_vec();
    assert!(!rows.is_empty() && !book.has_unwritten());
    book.not_written(first);
    assert_eq!(book.take_unwritten().rows(), rows);
}

#[test]
fn a_controller_that_was_just_started_grants_nothing_before_it_asked_every_host() {
    let mut book = Book::new(stamp(0, 7));
    book.plant = planted();
    for name in ["a", "b"] {
        book.load_host(enrolled(name), HostRow::default());
    }
    let knows = book.stamp();
    hear(&mut book, "a", 1, knows);
    let refused = book.begin_survey(&web(), &[host("a")]);
    assert!(
        matches!(refused, Err(Refusal::Starting { .. })),
        "{refused:?}"
    );
    book.lose(&host("b"));
    assert!(book.begin_survey(&web(), &[host("a")]).is_ok());
}

#[test]
fn a_host_that_forgot_a_word_which_it_acknowledged_is_an_old_copy() {
    let mut book = two_hosts();
    hear(&mut book, "a", 2, stamp(0, 3));
    assert_eq!(book.standing(&host("a")), Standing::OldCopy);
    // For good: that it hears later words again does not bring back what it forgot.
    let knows = book.stamp();
    hear(&mut book, "a", 3, knows);
    assert_eq!(book.standing(&host("a")), Standing::OldCopy);
}

#[test]
fn a_gift_at_the_end_of_all_generations_binds_no_host() {
    let mut book = two_hosts();
    let level = book.survey_of(&web(), BTreeSet::new()).unwrap().level;
    let knows = book.stamp();
    let ticket = book.ask();
    let heard = Heard {
        instance: Instance {
            counter: 1,
            boot_id: "boot".into(),
            machine_id: "a".into(),
        },
        knows: SiteHeard {
            stamp: knows,
            complete: knows,
        },
        records: vec![RecordSaid {
            vm: web(),
            highest: level,
            claim: Claim::Gave {
                generation: Generation(u64::MAX),
                to: host("b"),
            },
            may_live: false,
            images: Vec::new(),
        }],
    };
    book.hear(&host("a"), ticket, heard);
    assert!(!book.may_hold(&web()).contains(&host("b")));
    let next = book.survey_of(&web(), BTreeSet::new());
    assert!(next.is_ok(), "there are generations left: {next:?}");
}

/// Host b is ready to take the VM and waits for host a's word, which may be under way to it.
#[test]
fn a_host_that_owes_another_its_word_on_a_handover_boots_nothing_on_a_thirds() {
    let mut site = a_asks_of(&["a", "b", "c"]);
    let says = |of: &str, claim: Claim| SiteAnswer {
        from: Some(host(of)),
        vms: BTreeMap::from([(web(), row(5))]),
        records: vec![RecordSaid {
            vm: web(),
            highest: Generation(4),
            claim,
            may_live: false,
            images: Vec::new(),
        }],
        ..SiteAnswer::default()
    };
    let promised = Claim::Promised {
        generation: Generation(4),
        from: host("a"),
    };
    site.no_controller();
    site.hear(says("c", Claim::No));
    site.hear(says("b", promised));
    site.round_is_over();
    let Judged::Wait(why) = site.judge(&web(), 9, false) else {
        panic!("it may have given the VM");
    };
    assert!(why.contains("host b waits for the word of host a"), "{why}");
    // Host b has given up.
    site.hear(says("b", Claim::No));
    assert_eq!(site.judge(&web(), 9, false), Judged::Boot);
}

/// Host b's row is as new as this host's own, host c's is newer and names host d.
#[test]
fn a_row_that_another_host_has_a_newer_one_of_is_not_enough_to_boot() {
    let mut site = a_asks_of(&["a", "b", "c", "d"]);
    let newer = SiteVm {
        may_hold: BTreeSet::from([host("a"), host("d")]),
        ..row(6)
    };
    let says = |of: &str, row: SiteVm| SiteAnswer {
        from: Some(host(of)),
        vms: BTreeMap::from([(web(), row)]),
        ..SiteAnswer::default()
    };
    site.no_controller();
    site.hear(says("b", row(5)));
    site.hear(says("c", newer.clone()));
    site.round_is_over();
    let judged = site.judge(&web(), 9, false);
    assert!(matches!(judged, Judged::Wait(_)), "{judged:?}");
    site.hear(says("d", newer));
    assert_eq!(site.judge(&web(), 9, false), Judged::Boot);
}

/// A person says of host b that it is off, which it need not be: surveys pass it over.
#[test]
fn a_host_that_counts_as_off_is_granted_nothing_and_permitted_nothing_before_it_was_heard() {
    let mut book = Book::default();
    for name in ["a", "b"] {
        book.add_host(enrolled(name), HostRow::default());
        hear(&mut book, name, 1, Stamp::default());
    }
    book.lose(&host("b"));
    book.fence(&host("b")).unwrap();
    let survey = book.begin_survey(&web(), &[host("b")]).unwrap();
    let Surveyed::Free(free) = book.take_survey(&survey, &BTreeMap::new()) else {
        panic!("nobody holds it");
    };
    let refused = book.grant(free, &host("b"));
    assert!(
        matches!(refused, Err(Refusal::Silent { .. })),
        "{refused:?}"
    );
    let permitted = book.permit_migration(&web(), &host("a"), &host("b"));
    assert!(permitted.is_err(), "{permitted:?}");
}

/// What is read of a host for a takeover at the word `at`.
fn whole(instance: Instance, table: SiteTable, at: Stamp) -> WholeSurvey {
    WholeSurvey {
        instance,
        records: Vec::new(),
        unread: BTreeSet::new(),
        table: SiteTable { stamp: at, ..table },
    }
}

fn read(book: &mut Book, of: &str, instance: Instance, table: SiteTable) {
    let at = book.takeover().expect("it works on an old copy").stamp;
    let ticket = book.ask();
    book.take_whole(&host(of), at, ticket, whole(instance, table, at));
}

/// What a host's table has of two hosts as of a word.
fn table_of(hosts: [(&str, &Instance); 2], at: Stamp) -> SiteTable {
    let site = |(name, life): (&str, &Instance)| SiteHost {
        counter: life.counter,
        machine_id: life.machine_id.clone(),
        ..enrolled(name)
    };
    SiteTable {
        hosts: hosts.map(site).into(),
        hosts_at: at,
        complete: at,
        ..SiteTable::default()
    }
}

#[test]
fn a_restored_controller_gives_no_name_back_to_a_former_machine() {
    let lives = |machine: &str, counter: u64| Instance {
        counter,
        boot_id: format!("{machine}-{counter}"),
        machine_id: machine.to_owned(),
    };
    let (a, former, is_host) = (lives("a", 1), lives("b", 4), lives("other", 3));
    let mut book = Book::default();
    book.plant = planted();
    for (name, life) in [("a", &a), ("b", &lives("b", 1))] {
        book.add_host(enrolled(name), HostRow::default());
        let ticket = book.ask();
        let heard = Heard {
            instance: life.clone(),
            knows: SiteHeard::default(),
            records: Vec::new(),
        };
        book.hear(&host(name), ticket, heard);
    }
    // Since this database another machine was let be b, and host a has heard of it.
    let later = Stamp {
        epoch: 0,
        number: book.stamp().number + 5,
    };
    let knows = SiteHeard {
        stamp: later,
        complete: later,
    };
    let heard = Heard {
        instance: a.clone(),
        knows,
        records: Vec::new(),
    };
    let ticket = book.ask();
    book.hear(&host("a"), ticket, heard);
    // The former one is powered on again, and read first.
    read(&mut book, "b", former.clone(), SiteTable::default());
    let table = table_of([("a", &a), ("b", &is_host)], later);
    read(&mut book, "a", a, table);
    assert_eq!(book.waits_for(), [host("b")]);
    assert!(book.finish_takeover().is_err());
    assert_eq!(book.tells_another_machine(&host("b")), Some(&host("a")));
    read(&mut book, "b", former.clone(), SiteTable::default());
    assert_eq!(book.standing(&host("b")), Standing::SecondInstance);
    assert!(book.finish_takeover().is_err());

    read(&mut book, "b", is_host, SiteTable::default());
    assert_eq!(book.finish_takeover(), Ok(true));
    let ticket = book.ask();
    let heard = Heard {
        instance: former,
        knows,
        records: Vec::new(),
    };
    book.hear(&host("b"), ticket, heard);
    assert_eq!(book.standing(&host("b")), Standing::SecondInstance);
}
