//! What seeds of the site simulator have broken: each test is named after it.

#[path = "common/records.rs"]
mod records;

use godwit_site::{Book, Entry, Heard, HostRow, HostSite, Judged, News, Surveyed};
use godwit_types::site::{
    BootWish, Claim, Instance, RecordSaid, SiteAnswer, SiteHeard, SiteHost, SiteQuestion,
    SiteTable, SiteVm, Stamp, Standing, SurveyAnswer,
};
use godwit_types::{Generation, HostName, VmName};
use std::collections::BTreeMap;

fn host(name: &str) -> HostName {
    HostName::new(name).expect("a name")
}

fn vm() -> VmName {
    VmName::new("web").expect("a name")
}

fn life(machine: &str, boot: &str, counter: u64) -> Instance {
    Instance {
        counter,
        boot_id: boot.to_owned(),
        machine_id: machine.to_owned(),
    }
}

fn join(book: &mut Book, name: &str) {
    let site = SiteHost {
        name: host(name),
        address: ([10, 0, 0, 1], 7000).into(),
        serial: String::new(),
        counter: 0,
        machine_id: String::new(),
    };
    book.add_host(site, HostRow::default());
}

fn poll(book: &mut Book, name: &str, instance: Instance, records: Vec<RecordSaid>) -> Vec<News> {
    let ticket = book.ask();
    let heard = Heard {
        instance,
        knows: SiteHeard::default(),
        records,
    };
    book.hear(&host(name), ticket, heard)
}

fn question(instance: Instance) -> SiteQuestion {
    SiteQuestion {
        instance,
        knows: SiteHeard::default(),
        wishes: vec![BootWish {
            vm: vm(),
            generation: Generation(2),
        }],
    }
}

fn holds(generation: u64) -> RecordSaid {
    records::holds(vm(), generation)
}

/// A no of a host's first life.
fn no(of: &HostName, highest: Generation) -> SurveyAnswer {
    SurveyAnswer {
        highest,
        claim: Claim::No,
        may_live: false,
        instance: lives(of),
        knows: SiteHeard::default(),
        images: Vec::new(),
    }
}

/// The life in which a host of these tests was heard first.
fn lives(of: &HostName) -> Instance {
    match of.as_str() {
        "a" => life("m", "1", 1),
        other => life(other, "1", 1),
    }
}

/// Grants the VM to a host that answers, after a survey of it.
fn grant(book: &mut Book, name: &str) -> Generation {
    let survey = book.begin_survey(&vm(), &[host(name)]).expect("a survey");
    let hosts = survey.hosts.iter();
    let answers = hosts.map(|host| (host.clone(), no(host, survey.level)));
    let answers: BTreeMap<_, _> = answers.collect();
    let Surveyed::Free(free) = book.take_survey(&survey, &answers) else {
        panic!("not free");
    };
    book.grant(free, &host(name)).expect("a grant").generation
}

#[test]
fn an_old_copy_does_not_bring_a_deleted_vm_back() {
    let mut book = Book::default();
    join(&mut book, "a");
    poll(&mut book, "a", life("m", "1", 1), Vec::new());
    let held = grant(&mut book, "a");
    let survey = book.begin_survey(&vm(), &[]).expect("a survey");
    let answers = BTreeMap::from([(host("a"), no(&host("a"), survey.level))]);
    let Surveyed::Free(free) = book.take_survey(&survey, &answers) else {
        panic!("not free");
    };
    drop(book.delete(free).expect("deleted"));
    poll(&mut book, "a", life("m", "2", 2), vec![holds(held.0)]);
    let entry: &Entry = book.entry(&vm()).expect("an entry");
    assert!(entry.deleted, "{entry:?}");
    let answer = book.answer(&host("a"), &question(life("m", "2", 2)), false);
    assert!(answer.vms.get(&vm()).is_some_and(|row| row.deleted));
}

#[test]
fn a_fenced_host_that_is_met_by_its_question_is_news() {
    let mut book = Book::default();
    join(&mut book, "a");
    join(&mut book, "b");
    poll(&mut book, "a", life("m", "1", 1), Vec::new());
    book.lose(&host("a"));
    book.fence(&host("a")).expect("fenced");
    book.answer(&host("a"), &question(life("m", "1", 1)), false);
    let news = poll(&mut book, "b", life("n", "1", 1), Vec::new());
    let told = News::FencedAnswered {
        host: host("a"),
        was_never_off: true,
    };
    assert!(news.contains(&told), "{news:?}");
}

#[test]
fn a_clone_is_not_the_host_because_the_host_is_silent() {
    let mut book = Book::default();
    join(&mut book, "a");
    poll(&mut book, "a", life("m", "1", 1), Vec::new());
    book.lose(&host("a"));
    let answer = book.answer(&host("a"), &question(life("other", "1", 2)), false);
    assert_eq!(answer.standing, Standing::SecondInstance);
    let answer = book.answer(&host("a"), &question(life("m", "2", 2)), false);
    assert_eq!(answer.standing, Standing::Known);
}

#[test]
fn a_disk_moved_to_another_machine_is_the_host_once_the_first_one_is_said_to_be_off() {
    let mut book = Book::default();
    join(&mut book, "a");
    poll(&mut book, "a", life("m", "1", 1), Vec::new());
    book.lose(&host("a"));
    book.fence(&host("a")).expect("fenced");
    let question = question(life("other", "1", 2));
    let answer = book.answer(&host("a"), &question, false);
    assert_eq!(answer.standing, Standing::Known);
    let again = book.answer(&host("a"), &question, false);
    assert_eq!(again.standing, Standing::Known);
}

#[test]
fn a_migration_that_failed_does_not_raise_what_its_source_holds() {
    let mut book = Book::default();
    join(&mut book, "a");
    join(&mut book, "b");
    let entry = Entry {
        held: Generation(2),
        highest: Generation(2),
        may_hold: BTreeMap::from([(host("a"), Generation(2))]),
        ..Entry::default()
    };
    book.add_entry(vm(), entry);
    let permitted = book.permit_migration(&vm(), &host("a"), &host("b"));
    permitted.expect("permitted");
    book.migration_ended(&vm(), &host("a"), &host("b"), false);
    let entry = book.entry(&vm()).expect("an entry");
    assert_eq!(entry.holder, Some(host("a")));
    assert_eq!(entry.held, Generation(2));
}

/// What a controller in charge answers about the VM.
fn controller_says(row: SiteVm) -> SiteAnswer {
    SiteAnswer {
        from: None,
        standing: Standing::Known,
        in_charge: true,
        stamp: row.stamp,
        vms: BTreeMap::from([(vm(), row)]),
        ..SiteAnswer::default()
    }
}

fn row(held: u64, may_hold: &[&str]) -> SiteVm {
    SiteVm {
        holder: Some(host("a")),
        held: Generation(held),
        may_hold: may_hold.iter().map(|name| host(name)).collect(),
        deleted: false,
        stamp: Stamp {
            epoch: 0,
            number: 9,
        },
    }
}

#[test]
fn a_handover_that_no_row_tells_of_yet_is_asked_of_its_other_host() {
    let mut site = HostSite::new(host("a"), life("m", "1", 1), SiteTable::default());
    site.wish(vm(), Generation(2));
    site.hear(controller_says(row(2, &["a", "b"])));
    assert!(matches!(site.judge(&vm(), 0, false), Judged::Wait(_)));
    site.hear(SiteAnswer {
        from: Some(host("b")),
        in_charge: false,
        records: vec![holds(4)],
        ..controller_says(row(2, &["a", "b"]))
    });
    assert!(matches!(site.judge(&vm(), 0, false), Judged::Never(_)));
}

#[test]
fn a_host_does_not_give_way_to_a_later_life_of_its_own() {
    let mut site = HostSite::new(host("a"), life("m", "1", 1), SiteTable::default());
    site.wish(vm(), Generation(2));
    site.hear(controller_says(row(4, &["a"])));
    assert!(matches!(site.judge(&vm(), 0, false), Judged::Never(_)));
}

#[test]
fn a_fenced_host_is_asked_by_a_survey_and_its_answer_counts() {
    let mut book = Book::default();
    join(&mut book, "a");
    poll(&mut book, "a", life("m", "1", 1), Vec::new());
    let held = grant(&mut book, "a");
    book.lose(&host("a"));
    book.fence(&host("a")).expect("fenced");
    let survey = book.begin_survey(&vm(), &[]).expect("a survey");
    assert!(survey.hosts.contains(&host("a")));
    let answer = SurveyAnswer {
        claim: holds(held.0).claim,
        may_live: true,
        ..no(&host("a"), held)
    };
    let answers = BTreeMap::from([(host("a"), answer)]);
    let found = book.take_survey(&survey, &answers);
    assert!(matches!(found, Surveyed::HeldBy { .. }), "{found:?}");
}

#[test]
fn a_late_report_does_not_undo_what_was_granted_since() {
    let mut book = Book::default();
    for name in ["a", "b", "c"] {
        join(&mut book, name);
        poll(&mut book, name, lives(&host(name)), Vec::new());
    }
    grant(&mut book, "a");
    let first = book.permit_migration(&vm(), &host("a"), &host("b"));
    first.expect("permitted");
    let second = book.permit_migration(&vm(), &host("b"), &host("c"));
    let second = second.expect("permitted").generation;
    book.migration_ended(&vm(), &host("b"), &host("c"), true);
    book.migration_ended(&vm(), &host("a"), &host("b"), true);
    let entry = book.entry(&vm()).expect("an entry");
    assert_eq!(
        (entry.holder.clone(), entry.held),
        (Some(host("c")), second)
    );
}

#[test]
fn a_fenced_stranger_that_is_enrolled_again_does_not_stay_fenced() {
    let mut book = Book::default();
    book.add_fenced_stranger(host("a"));
    assert!(book.is_fenced(&host("a")));
    join(&mut book, "a");
    assert!(!book.is_fenced(&host("a")));
}
