//! What an old copy of the database may not grant, and whom it believes while it learns.

use super::common::{enrolled, host};
use super::{GAP, grant, hear, heard, holds, life, said, survey, vm, web_on_a};
use godwit_site::{Book, Heard, HostRow, HostSite, News, Refusal, Surveyed};
use godwit_types::site::{Claim, RecordSaid, SiteTable, Stamp, Standing, WholeSurvey};
use godwit_types::{Generation, HostName};

fn whole(of: &str, table: SiteTable, records: Vec<RecordSaid>) -> WholeSurvey {
    WholeSurvey {
        instance: life(of, 1),
        records,
        unread: Default::default(),
        table,
    }
}

/// The table of a host that has heard a word and knows nothing else.
fn at(stamp: Stamp) -> SiteTable {
    SiteTable {
        stamp,
        ..SiteTable::default()
    }
}

fn read(book: &mut Book, of: &str, at: Stamp, whole: WholeSurvey) {
    let ticket = book.ask();
    book.take_whole(&host(of), at, ticket, whole);
}

#[test]
fn a_restored_database_grants_nothing_until_every_host_that_a_table_names_was_read() {
    let (mut old, _) = web_on_a();
    let mut book = old.clone();
    // Life goes on: host c is enrolled and gets the VM; host a's table knows.
    old.add_host(enrolled("c"), HostRow::default());
    hear(&mut old, "c", Vec::new());
    let held = grant(&mut old, "web", "c");
    let mut a = HostSite::new(host("a"), life("a", 1), SiteTable::default());
    old.updated(&host("a"), Standing::Known, a.heard());
    a.update(old.update_for(&host("a")).expect("news for a"))
        .unwrap();
    let ticket = book.ask();
    let news = book.hear(&host("a"), ticket, heard("a", a.heard().stamp, Vec::new()));
    assert!(
        news.iter()
            .any(|one| matches!(one, News::RestoredCopy { .. })),
        "{news:?}"
    );
    let refused = book.begin_survey(&vm("web"), &[host("a")]);
    assert!(matches!(refused, Err(Refusal::Restored { .. })));
    let takeover = book.takeover().expect("it must take over");
    assert_eq!(takeover.stamp.epoch, old.stamp().epoch + 1);
    a.accept(takeover.stamp).unwrap();
    read(
        &mut book,
        "a",
        takeover.stamp,
        whole("a", a.table().clone(), Vec::new()),
    );
    read(
        &mut book,
        "b",
        takeover.stamp,
        whole("b", at(takeover.stamp), Vec::new()),
    );
    assert_eq!(book.waits_for(), [host("c")]);
    assert!(book.finish_takeover().is_err());
    let enrol = book.takeover().unwrap().enrol;
    let named: Vec<&HostName> = enrol.iter().map(|site| &site.name).collect();
    assert_eq!(named, [&host("c")]);
    book.add_host(enrol[0].clone(), HostRow::default());
    read(
        &mut book,
        "c",
        takeover.stamp,
        whole(
            "c",
            at(takeover.stamp),
            vec![said("web", held, holds(held))],
        ),
    );
    assert_eq!(book.finish_takeover(), Ok(true));
    assert!(book.is_in_charge() && book.stamp() > takeover.stamp);
    assert_eq!(book.entry(&vm("web")).unwrap().holder, Some(host("c")));
    // Who heard the new epoch refuses the old controller.
    assert!(a.accept(old.stamp()).is_err());
    a.accept(book.stamp()).unwrap();
}

pub(super) fn moved_to(generation: u64, to: &str) -> Claim {
    Claim::Moved {
        generation: Generation(generation),
        to: host(to),
    }
}

pub(super) fn gave_to(generation: u64, to: &str) -> Claim {
    Claim::Gave {
        generation: Generation(generation),
        to: host(to),
    }
}

#[test]
fn a_host_that_nobody_enrolled_is_shown_with_who_names_it_and_holds_no_vm() {
    let (mut book, held) = web_on_a();
    // Host b lies about a VM that host a has.
    let lies = vec![said("web", held + 1, gave_to(held + 1, "x"))];
    let news = hear(&mut book, "b", lies);
    assert!(
        news.iter().any(|one| matches!(one, News::Stranger { .. })),
        "{news:?}"
    );
    assert!(!book.may_hold(&vm("web")).contains(&host("x")));
    let names = book.names_strangers();
    assert_eq!(names.len(), 1, "{names:?}");
    assert_eq!(names[0].by, host("b"));
    assert!(names[0].named.contains(&host("x")) && !names[0].too_many);
    // The liar takes it back: the VM starts elsewhere, without anybody's word about x.
    hear(&mut book, "b", Vec::new());
    assert_eq!(book.names_strangers(), []);
    assert!(grant(&mut book, "web", "b") > held);
    // A person may say that x is off; then it is not shown any more.
    hear(
        &mut book,
        "b",
        vec![said("web", held + 1, moved_to(held + 1, "x"))],
    );
    assert_eq!(book.names_strangers().len(), 1);
    book.fence(&host("x")).unwrap();
    assert_eq!(book.names_strangers(), []);
}

/// A book on an old copy of its database, as host a has heard, and the word that it would take over with.
fn restored() -> (Book, Stamp) {
    let (mut book, _) = web_on_a();
    let later = Stamp {
        epoch: 0,
        number: 1 << 20,
    };
    let ticket = book.ask();
    book.hear(&host("a"), ticket, heard("a", later, Vec::new()));
    let at = book.takeover().expect("it must take over").stamp;
    (book, at)
}

#[test]
fn a_restored_controller_waits_for_the_host_that_a_record_names_until_it_is_fenced() {
    let (mut book, word) = restored();
    let to_x = vec![said("web", 9, moved_to(9, "x"))];
    read(&mut book, "a", word, whole("a", at(word), to_x));
    read(&mut book, "b", word, whole("b", at(word), Vec::new()));
    assert_eq!(book.waits_for(), [host("x")]);
    assert_eq!(book.told_by(&host("x")), [host("a")]);
    book.fence(&host("x")).unwrap();
    assert_eq!(book.finish_takeover(), Ok(true));
    hear(&mut book, "a", vec![said("web", 9, moved_to(9, "x"))]);
    assert!(grant(&mut book, "web", "b") > GAP);
}

#[test]
fn a_table_of_thousands_of_invented_hosts_is_not_believed_and_ends_with_its_teller() {
    let (mut book, word) = restored();
    let invented = (0..5000).map(|number| enrolled(&format!("x{number}")));
    let table = SiteTable {
        hosts: invented.collect(),
        complete: word,
        ..at(word)
    };
    read(&mut book, "a", word, whole("a", at(word), Vec::new()));
    read(&mut book, "b", word, whole("b", table, Vec::new()));
    let enrol = book.takeover().expect("it takes over").enrol;
    assert!(enrol.len() <= 512, "{}", enrol.len());
    let names = book.names_strangers();
    assert_eq!((names.len(), &names[0].by), (1, &host("b")));
    assert!(names[0].too_many && book.waits_for().contains(&host("b")));
    book.lose(&host("b"));
    drop(book.remove(&host("b"), true).unwrap());
    assert_eq!(book.waits_for(), []);
    assert_eq!(book.finish_takeover(), Ok(true));
}

/// Each agent's own new life makes one more word, which must not be taken for the one that the copy lacks.
#[test]
fn a_copy_that_is_one_word_behind_is_found_though_every_agent_was_restarted_since() {
    let (mut book, _) = web_on_a();
    let later = Stamp {
        number: book.stamp().number + 1,
        ..book.stamp()
    };
    let answer = Heard {
        instance: life("a", 2),
        ..heard("a", later, Vec::new())
    };
    let ticket = book.ask();
    book.hear(&host("a"), ticket, answer);
    assert!(book.is_restored());
}

/// A controller that was just started, with its last word; it has heard none of these hosts yet.
fn started(hosts: &[&str]) -> (Book, Stamp) {
    let word = Stamp {
        epoch: 0,
        number: 7,
    };
    let mut book = Book::new(word);
    for name in hosts {
        book.load_host(enrolled(name), HostRow::default());
    }
    (book, word)
}

/// What a controller learns while it starts are words of its own, which would hide the one that its copy lacks.
#[test]
fn a_copy_is_found_whatever_was_heard_before_the_host_that_knows_a_later_word() {
    let (mut book, word) = started(&["a", "b", "c"]);
    let records = vec![said("web", 1, holds(1)), said("db", 1, holds(1))];
    let answer = |of: &str, number| Heard {
        instance: life(of, 2),
        ..heard(of, Stamp { number, ..word }, records.clone())
    };
    let mut hear = |of: &str, number| {
        let ticket = book.ask();
        book.hear(&host(of), ticket, answer(of, number));
        (book.stamp(), book.is_restored())
    };
    assert_eq!(hear("a", 7), (word, false));
    assert_eq!(hear("b", 7), (word, false));
    assert!(hear("c", 8).1);
    // One that lacks nothing learns it all from the next answers.
    let (mut newest, _) = started(&["a", "b"]);
    let ticket = newest.ask();
    newest.hear(&host("a"), ticket, answer("a", 7));
    newest.lose(&host("b"));
    assert_eq!((newest.stamp(), newest.entry(&vm("web"))), (word, None));
    let ticket = newest.ask();
    newest.hear(&host("a"), ticket, answer("a", 7));
    assert!(newest.stamp() > word && newest.entry(&vm("web")).is_some());
}

/// By the fence alone another machine is that host: it stands until that machine is noted.
#[test]
fn a_host_on_new_hardware_is_itself_though_it_answers_while_its_controller_starts() {
    let (mut book, word) = started(&["a"]);
    let row = HostRow {
        fenced: true,
        instance: life("old", 3),
        ..HostRow::default()
    };
    book.load_host(enrolled("b"), row);
    let answers = |book: &mut Book| {
        let answer = Heard {
            instance: life("new", 4),
            ..heard("b", word, Vec::new())
        };
        let ticket = book.ask();
        book.hear(&host("b"), ticket, answer);
        (book.standing(&host("b")), book.is_fenced(&host("b")))
    };
    assert_eq!(answers(&mut book), (Standing::Known, true));
    book.lose(&host("a"));
    assert_eq!(answers(&mut book), (Standing::Known, false));
    assert_eq!(answers(&mut book), (Standing::Known, false));
}

/// Host b receives VM web from host a. The lost controller permitted that, and no host's table knows it yet; it goes on without a controller.
fn taken_over_while_web_moves() -> Book {
    let (mut book, word) = restored();
    let receives = Claim::Receiving { from: host("a") };
    let of_a = vec![said("web", 3, holds(3))];
    let of_b = vec![said("web", 3, receives)];
    read(&mut book, "a", word, whole("a", at(word), of_a));
    read(&mut book, "b", word, whole("b", at(word), of_b));
    assert_eq!(book.finish_takeover(), Ok(true));
    book
}

#[test]
fn whoever_receives_a_vm_when_a_restored_controller_reads_him_may_come_to_hold_it() {
    let mut book = taken_over_while_web_moves();
    // It arrived, and its new host is silent: nobody else gets it.
    hear(&mut book, "a", vec![said("web", 4, moved_to(4, "b"))]);
    book.lose(&host("b"));
    let refused = survey(&mut book, "web", "a", &["b"]);
    assert!(
        matches!(&refused, Surveyed::Refused(Refusal::Silent { hosts, .. }) if *hosts == [host("b")]),
        "{refused:?}"
    );
    // Once it has said no it is out.
    assert!(grant(&mut book, "web", "a") > 4);
}

#[test]
fn a_move_that_ends_after_the_takeover_of_a_controller_that_forgot_it_is_believed_once_both_hosts_say_so()
 {
    for a_first in [false, true] {
        let mut book = taken_over_while_web_moves();
        let holder = |book: &Book| {
            let entry = book.entry(&vm("web")).unwrap();
            (entry.holder.clone(), entry.held)
        };
        let mut words = [
            ("a", vec![said("web", 4, moved_to(4, "b"))]),
            ("b", vec![said("web", 4, holds(4))]),
        ];
        if !a_first {
            words.reverse();
        }
        let [one, other] = words;
        hear(&mut book, one.0, one.1);
        assert_eq!(holder(&book), (Some(host("a")), Generation(3)), "{}", one.0);
        let news = hear(&mut book, other.0, other.1);
        assert_eq!(holder(&book), (Some(host("b")), Generation(4)));
        let is_told = |one: &News| matches!(one, News::Held { host: to, .. } if *to == host("b"));
        assert!(news.iter().any(is_told), "{news:?}");
        // It is used like any other, and moves on.
        book.permit_migration(&vm("web"), &host("b"), &host("a"))
            .expect("it is its holder");
    }
}

#[test]
fn a_forgotten_move_is_believed_though_a_person_had_its_guest_run_on_at_the_destination() {
    let (mut book, held) = web_on_a();
    let resolved = held + 1 + (1 << 20);
    hear(&mut book, "b", vec![said("web", resolved, holds(resolved))]);
    let holder = |book: &Book| book.entry(&vm("web")).unwrap().holder.clone();
    assert_eq!(holder(&book), Some(host("a")));
    let gave = gave_to(held + 1, "b");
    hear(&mut book, "a", vec![said("web", held + 1, gave)]);
    assert_eq!(holder(&book), Some(host("b")));
}

#[test]
fn nobody_takes_a_vm_by_saying_what_its_holder_does_not() {
    let (mut book, held) = web_on_a();
    let holder = |book: &Book| book.entry(&vm("web")).unwrap().holder.clone();
    // Neither a host that says that it holds it, nor one that names another as the giver.
    hear(&mut book, "b", vec![said("web", held + 1, holds(held + 1))]);
    assert_eq!(holder(&book), Some(host("a")));
    hear(
        &mut book,
        "b",
        vec![said("web", held + 2, gave_to(held + 2, "b"))],
    );
    assert_eq!(holder(&book), Some(host("a")));
    // The generations differ.
    hear(
        &mut book,
        "a",
        vec![said("web", held + 2, moved_to(held + 2, "b"))],
    );
    hear(&mut book, "b", vec![said("web", held + 1, holds(held + 1))]);
    assert_eq!(holder(&book), Some(host("a")));
}
