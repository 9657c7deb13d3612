//! Answers that say too little: a row that cannot be read, a host that no inventory knows, a question that comes late.

mod common;
#[path = "common/records.rs"]
mod records;

use common::{enrolled, host};
use godwit_site::{Book, Heard, HostRow, HostSite, Judged, Refusal, Row, Surveyed};
use godwit_types::site::{
    BootWish, Claim, Instance, RecordSaid, SiteAnswer, SiteHeard, SiteQuestion, SiteTable, SiteVm,
    Stamp, Standing, SurveyAnswer, WholeSurvey,
};
use godwit_types::{Generation, HostName, VmName};
use std::collections::{BTreeMap, BTreeSet};

fn web() -> VmName {
    VmName::new("web").unwrap()
}

fn word(number: u64) -> Stamp {
    Stamp { epoch: 0, number }
}

fn knows(stamp: Stamp) -> SiteHeard {
    SiteHeard {
        stamp,
        complete: stamp,
    }
}

fn life(of: &str, counter: u64) -> Instance {
    Instance {
        counter,
        boot_id: "boot".into(),
        machine_id: of.to_owned(),
    }
}

fn holds(generation: u64, may_live: bool) -> RecordSaid {
    RecordSaid {
        may_live,
        ..records::holds(web(), generation)
    }
}

/// A book of these hosts, each heard once.
fn site(hosts: &[&str]) -> Book {
    let mut book = Book::default();
    for name in hosts {
        book.add_host(enrolled(name), HostRow::default());
        hear(&mut book, name, Vec::new());
    }
    book
}

/// A host is polled and knows this controller's last word.
fn hear(book: &mut Book, of: &str, records: Vec<RecordSaid>) {
    let (ticket, stamp) = (book.ask(), book.stamp());
    let heard = Heard {
        instance: life(of, 1),
        knows: knows(stamp),
        records,
    };
    book.hear(&host(of), ticket, heard);
}

fn row(held: u64, may_hold: &[&str], number: u64) -> SiteVm {
    SiteVm {
        holder: may_hold.first().map(|name| host(name)),
        held: Generation(held),
        may_hold: may_hold.iter().map(|name| host(name)).collect(),
        deleted: false,
        stamp: word(number),
    }
}

fn question(of: &str, stamp: Stamp) -> SiteQuestion {
    SiteQuestion {
        instance: life(of, 1),
        knows: knows(stamp),
        wishes: vec![BootWish {
            vm: web(),
            generation: Generation(3),
        }],
    }
}

/// Host a holds VM web without a guest; its table names hosts a, b and c.
fn a_asks() -> HostSite {
    let table = SiteTable {
        hosts: ["a", "b", "c"].map(enrolled).to_vec(),
        had_second: true,
        vms: BTreeMap::from([(web(), row(3, &["a"], 5))]),
        ..SiteTable::default()
    };
    let mut a = HostSite::new(host("a"), life("a", 1), table);
    a.wish(web(), Generation(3));
    a
}

/// A controller that has said more than anybody heard, and cannot read its row of the VM.
fn cannot_read_its_row(in_charge: bool) -> SiteAnswer {
    SiteAnswer {
        in_charge,
        stamp: word(1 << 20),
        unread: BTreeSet::from([web()]),
        ..SiteAnswer::default()
    }
}

/// A host whose table has the VM as host a's has, and which has no record of it.
fn knows_no_better(of: &str) -> SiteAnswer {
    SiteAnswer {
        from: Some(host(of)),
        stamp: word(5),
        vms: BTreeMap::from([(web(), row(3, &["a"], 5))]),
        ..SiteAnswer::default()
    }
}

#[test]
fn a_controller_that_cannot_read_its_row_of_a_vm_lets_no_old_holder_boot_it() {
    for in_charge in [true, false] {
        let mut a = a_asks();
        a.hear(cannot_read_its_row(in_charge));
        let judged = a.judge(&web(), 60, false);
        assert!(matches!(judged, Judged::Wait(_)), "{judged:?}");
        // What it cannot read may be newer than what one host has.
        a.hear(knows_no_better("b"));
        let judged = a.judge(&web(), 60, false);
        assert!(matches!(judged, Judged::Wait(_)), "{judged:?}");
        a.hear(knows_no_better("c"));
        assert_eq!(a.judge(&web(), 60, false), Judged::Boot);
    }
}

#[test]
fn of_a_vm_whose_row_cannot_be_read_two_guests_are_seen_and_nothing_is_written() {
    let mut book = site(&["a", "b"]);
    let _ = book.take_unwritten();
    book.cannot_read(web());
    let stamp = book.stamp();
    hear(&mut book, "b", vec![holds(9, true)]);
    hear(&mut book, "a", vec![holds(3, false)]);
    assert_eq!(book.all_twice(), [], "a record without a guest is no copy");
    hear(&mut book, "a", vec![holds(3, true)]);
    hear(&mut book, "b", vec![holds(9, true)]);
    hear(&mut book, "a", vec![holds(3, true)]);
    let twice = book.all_twice();
    assert_eq!(twice.len(), 1);
    let paused: Vec<&HostName> = twice[0].1.to_pause().collect();
    assert_eq!(paused, [&host("a")]);
    assert_eq!((book.entry(&web()), book.stamp()), (None, stamp));
    let batch = book.take_unwritten();
    assert!(!batch.rows().iter().any(|row| matches!(row, Row::Vm(..))));
}

/// A book on an old copy of its database that lacks host x; host a's table has x, and has VM web there.
fn forgot_x() -> (Book, Stamp) {
    let mut book = site(&["a", "b"]);
    let later = word(1 << 20);
    let ticket = book.ask();
    let heard = Heard {
        instance: life("a", 1),
        knows: knows(later),
        records: Vec::new(),
    };
    book.hear(&host("a"), ticket, heard);
    let at = book.takeover().expect("it must take over").stamp;
    for name in ["a", "b"] {
        let table = SiteTable {
            stamp: at,
            complete: later,
            hosts: vec![enrolled("x")],
            vms: BTreeMap::from([(web(), row(3, &["x"], 1 << 19))]),
            ..SiteTable::default()
        };
        let whole = WholeSurvey {
            instance: life(name, 1),
            records: Vec::new(),
            unread: BTreeSet::new(),
            table,
        };
        let ticket = book.ask();
        book.take_whole(&host(name), at, ticket, whole);
    }
    (book, at)
}

#[test]
fn a_fenced_stranger_that_asks_is_not_off_any_more_and_is_enrolled_after_the_takeover() {
    let (mut book, _) = forgot_x();
    book.fence(&host("x")).unwrap();
    assert_eq!(book.finish_takeover(), Ok(true));
    let _ = book.take_unwritten();
    assert_eq!(book.to_enrol(), [], "who is off shows no certificate");
    let stamp = book.stamp();
    let answer = book.answer(&host("x"), &question("x", stamp), false);
    assert!(
        !answer.in_charge,
        "it is not polled, so that it may boot unseen"
    );
    assert_eq!(answer.standing, Standing::Known);
    assert!(!book.is_fenced(&host("x")));
    let shown = book.names_strangers();
    assert_eq!((&shown[0].by, shown.len()), (&host("x"), 1));
    let batch = book.take_unwritten();
    let no_more = Row::FencedStrangers(BTreeSet::new());
    assert!(batch.rows().contains(&no_more), "{batch:?}");
    let survey = book.begin_survey(&web(), &[host("a")]).unwrap();
    let answers = ["a", "b"].map(|name| {
        let answer = SurveyAnswer {
            highest: survey.level,
            claim: Claim::No,
            may_live: false,
            instance: life(name, 1),
            knows: knows(book.stamp()),
            images: Vec::new(),
        };
        (host(name), answer)
    });
    let found = book.take_survey(&survey, &BTreeMap::from(answers));
    let Surveyed::Refused(Refusal::Stranger { host: stranger, .. }) = found else {
        panic!("{found:?}");
    };
    assert_eq!(stranger, host("x"));
    assert_eq!(book.to_enrol(), [enrolled("x")]);
    book.add_host(enrolled("x"), HostRow::default());
    assert_eq!(book.to_enrol(), []);
}

#[test]
fn a_question_that_comes_late_makes_no_host_an_old_copy() {
    let mut book = site(&["a", "b"]);
    let late = question("a", word(1));
    // A poll overtakes the question, and the host has heard the newest word by then.
    hear(&mut book, "a", Vec::new());
    let answer = book.answer(&host("a"), &late, false);
    assert_eq!(answer.standing, Standing::Known);
    assert!(!answer.in_charge && !answer.knows(&web()), "it asks again");
    hear(&mut book, "a", Vec::new());
    assert_eq!(book.standing(&host("a")), Standing::Known);
    let again = question("a", book.stamp());
    let answer = book.answer(&host("a"), &again, false);
    assert!(answer.in_charge && answer.knows(&web()));
    // A poll that began afterwards tells an old copy.
    let ticket = book.ask();
    let heard = Heard {
        instance: life("a", 1),
        knows: knows(word(1)),
        records: Vec::new(),
    };
    book.hear(&host("a"), ticket, heard);
    assert_eq!(book.standing(&host("a")), Standing::OldCopy);
}

#[test]
fn a_handover_that_waits_for_its_source_is_not_held_twice() {
    let gave = Claim::Gave {
        generation: Generation(5),
        to: host("b"),
    };
    let promised = Claim::Promised {
        generation: Generation(5),
        from: host("b"),
    };
    for waits in [gave, promised] {
        let mut book = site(&["a", "b"]);
        let survey = book.begin_survey(&web(), &[host("a"), host("b")]).unwrap();
        let claims = [("a", waits), ("b", holds(5, true).claim)];
        let answers = claims.map(|(name, claim)| {
            let answer = SurveyAnswer {
                highest: Generation(5),
                claim,
                may_live: true,
                instance: life(name, 1),
                knows: knows(book.stamp()),
                images: Vec::new(),
            };
            (host(name), answer)
        });
        let found = book.take_survey(&survey, &BTreeMap::from(answers));
        let Surveyed::Refused(Refusal::HandingOver { hosts, .. }) = found else {
            panic!("{found:?}");
        };
        assert_eq!(hosts, [host("a"), host("b")]);
    }
}

fn table(rows: &[(&str, &[&str])]) -> SiteTable {
    let row = |(vm, may): &(&str, &[&str])| {
        let row = SiteVm {
            holder: Some(host("a")),
            held: Generation(3),
            may_hold: may.iter().map(|name| host(name)).collect(),
            deleted: false,
            stamp: word(5),
        };
        (VmName::new(*vm).unwrap(), row)
    };
    SiteTable {
        hosts: ["a", "b", "c"].map(enrolled).to_vec(),
        had_second: true,
        vms: rows.iter().map(row).collect(),
        ..SiteTable::default()
    }
}

#[test]
fn a_host_that_waits_for_a_rival_names_it_and_the_word_for_it() {
    let known = table(&[("web", &["a", "b"])]);
    let mut site = HostSite::new(host("a"), Instance::default(), known.clone());
    site.wish(web(), Generation(3));
    let said = |off: &[&str]| SiteAnswer {
        from: None,
        standing: Standing::Known,
        in_charge: true,
        stamp: word(6),
        vms: known.vms.clone(),
        off: off.iter().map(|name| host(name)).collect(),
        ..SiteAnswer::default()
    };
    site.hear(said(&[]));
    let Judged::Wait(why) = site.judge(&web(), 0, false) else {
        panic!("b may hold it and has not answered");
    };
    assert!(why.contains("host fenced b"), "{why}");
    assert!(!why.contains("boot-alone"), "{why}");
    site.hear(said(&["b"]));
    assert_eq!(site.judge(&web(), 0, false), Judged::Boot);
}

#[test]
fn a_clone_is_not_told_to_remove_the_host_whose_certificate_it_has() {
    let mut site = HostSite::new(host("a"), Instance::default(), table(&[]));
    site.wish(web(), Generation(3));
    site.hear(SiteAnswer {
        standing: Standing::SecondInstance,
        in_charge: true,
        stamp: word(6),
        ..SiteAnswer::default()
    });
    let Judged::Never(why) = site.judge(&web(), 0, false) else {
        panic!("it may not boot");
    };
    assert!(
        why.contains("it boots nothing") && why.contains("not meant"),
        "{why}"
    );
    assert!(!why.contains("remove"), "{why}");
}

#[test]
fn a_host_whose_certificate_was_replaced_is_told_that_it_is_an_old_copy_and_not_that_it_was_removed()
 {
    let mut site = HostSite::new(host("a"), Instance::default(), table(&[]));
    site.wish(web(), Generation(3));
    let answer = |replaced| SiteAnswer {
        standing: Standing::OldCopy,
        replaced,
        in_charge: true,
        stamp: word(6),
        ..SiteAnswer::default()
    };
    for replaced in [true, false] {
        site.hear(answer(replaced));
        let Judged::Never(why) = site.judge(&web(), 0, false) else {
            panic!("it may not boot");
        };
        assert!(why.contains("it boots nothing"), "{why}");
        assert!(!why.contains("was removed"), "{why}");
        let newer = "identity was replaced by a newer one";
        assert_eq!(why.contains(newer), replaced, "{why}");
    }
}
