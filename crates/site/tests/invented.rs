//! What a host that is enrolled and lies can do to others: it names them as holders, invents hosts and VMs, and is the
//! first to be polled.

mod common;

use common::{enrolled, host};
use godwit_site::{Book, Heard, HostRow, Row, Surveyed, Takeover};
use godwit_types::site::{
    Claim, Instance, RecordSaid, SiteHeard, SiteHost, SiteTable, SiteVm, Stamp, Standing,
    SurveyAnswer, WholeSurvey,
};
use godwit_types::{Generation, HostName, VmName};
use std::collections::BTreeMap;

fn web() -> VmName {
    VmName::new("web").unwrap()
}

fn life(of: &str) -> Instance {
    Instance {
        counter: 1,
        boot_id: "1".to_owned(),
        machine_id: of.to_owned(),
    }
}

fn said(vm: VmName, highest: u64, claim: Claim) -> RecordSaid {
    RecordSaid {
        vm,
        highest: Generation(highest),
        may_live: claim.may_hold(),
        claim,
        images: Vec::new(),
    }
}

fn hear(book: &mut Book, of: &str, records: Vec<RecordSaid>) {
    let (ticket, knows) = (book.ask(), book.stamp());
    let heard = Heard {
        instance: life(of),
        knows: SiteHeard {
            stamp: knows,
            complete: knows,
        },
        records,
    };
    book.hear(&host(of), ticket, heard);
}

/// Surveys every host that may hold a VM, and `on`: each says no, but for those that lie on.
fn all_say_no(book: &mut Book, vm: &VmName, on: &[HostName]) -> Surveyed {
    let survey = book.begin_survey(vm, on).unwrap();
    let knows = book.stamp();
    let no = |of: &HostName| SurveyAnswer {
        highest: survey.level,
        claim: Claim::No,
        may_live: false,
        instance: life(of.as_str()),
        knows: SiteHeard {
            stamp: knows,
            complete: knows,
        },
        images: Vec::new(),
    };
    let answers: BTreeMap<_, _> = survey.hosts.iter().map(|of| (of.clone(), no(of))).collect();
    book.take_survey(&survey, &answers)
}

/// Hosts a, b and x; VM web was granted to a.
fn web_on_a() -> (Book, Generation) {
    let mut book = Book::default();
    for name in ["a", "b", "x"] {
        book.add_host(enrolled(name), HostRow::default());
        hear(&mut book, name, Vec::new());
    }
    let Surveyed::Free(free) = all_say_no(&mut book, &web(), &[host("a")]) else {
        panic!("not free");
    };
    let granted = book.grant(free, &host("a")).unwrap().generation;
    (book, granted)
}

#[test]
fn a_host_that_another_one_names_as_a_holder_can_still_be_removed() {
    let (mut book, _) = web_on_a();
    let to_b = || Claim::Gave {
        generation: Generation(1 << 39),
        to: host("b"),
    };
    let invented = VmName::new("invented").unwrap();
    let lies = || vec![said(web(), 1, to_b()), said(invented.clone(), 1, to_b())];
    hear(&mut book, "x", lies());
    assert!(
        !book.may_hold(&web()).contains(&host("b")),
        "x was never let hold web, so that it gave it to nobody"
    );

    let _ = all_say_no(&mut book, &invented, &[]);
    hear(&mut book, "x", lies());
    assert_eq!(book.may_be_on(&host("b")), [], "b said a binding no");
    book.remove(&host("b"), false).unwrap();
}

/// A book on an old copy of its database, as x has heard.
fn restored_by_x() -> (Book, Takeover) {
    let (mut book, _) = web_on_a();
    let ticket = book.ask();
    let later = Stamp {
        epoch: 0,
        number: 1 << 20,
    };
    let heard = Heard {
        instance: life("x"),
        knows: SiteHeard {
            stamp: later,
            complete: later,
        },
        records: Vec::new(),
    };
    book.hear(&host("x"), ticket, heard);
    let takeover = book.takeover().unwrap();
    (book, takeover)
}

fn read(book: &mut Book, of: &str, at: Stamp, table: SiteTable, records: Vec<RecordSaid>) {
    let ticket = book.ask();
    let whole = WholeSurvey {
        instance: life(of),
        table: SiteTable { stamp: at, ..table },
        records,
        unread: Default::default(),
    };
    book.take_whole(&host(of), at, ticket, whole);
}

/// The same, where hosts a and b were read at the takeover's word, which is told.
fn restored_but_for_x() -> (Book, Stamp) {
    let (mut book, takeover) = restored_by_x();
    for name in ["a", "b"] {
        let (at, nothing) = (takeover.stamp, SiteTable::default());
        read(&mut book, name, at, nothing, Vec::new());
    }
    (book, takeover.stamp)
}

#[test]
fn invented_holders_of_a_table_are_bounded_and_end_with_their_teller() {
    let (mut book, takeover) = restored_by_x();
    let at = takeover.stamp;
    let row = SiteVm {
        holder: Some(host("y1")),
        held: Generation(1 << 20),
        may_hold: (0..5000).map(|y| host(&format!("y{y}"))).collect(),
        deleted: false,
        stamp: at,
    };
    let table = SiteTable {
        complete: at,
        vms: [(web(), row)].into(),
        ..SiteTable::default()
    };
    let gave = Claim::Gave {
        generation: Generation(9),
        to: host("z"),
    };
    let also = vec![said(VmName::new("db").unwrap(), 9, gave)];
    read(&mut book, "a", at, SiteTable::default(), Vec::new());
    read(&mut book, "b", at, SiteTable::default(), Vec::new());
    read(&mut book, "x", at, table, also);
    let named = book.may_hold(&web()).len();
    assert!(named <= 1 + 512, "{named} hosts may hold web");

    book.lose(&host("x"));
    drop(book.remove(&host("x"), true).unwrap());
    assert_eq!(book.finish_takeover(), Ok(true));
    assert_eq!(book.may_hold(&web()), [host("a")].into());
    assert_eq!(book.may_hold(&VmName::new("db").unwrap()), [].into());
    let invented = [host("y1"), host("y4999"), host("z")];
    for name in invented {
        assert_eq!(book.may_be_on(&name), []);
    }
    let Surveyed::Free(free) = all_say_no(&mut book, &web(), &[host("b")]) else {
        panic!("web waits for hosts that nobody enrolled");
    };
    book.grant(free, &host("b")).unwrap();
}

#[test]
fn a_migration_of_this_book_is_no_hearsay_whoever_is_heard_first() {
    for destination_first in [true, false] {
        let (mut book, _) = web_on_a();
        let permitted = book
            .permit_migration(&web(), &host("a"), &host("b"))
            .unwrap()
            .generation;
        let holds = Claim::Holds {
            generation: permitted,
            on: true,
        };
        let arrived = vec![said(web(), permitted.0, holds)];
        if destination_first {
            hear(&mut book, "b", arrived.clone());
        }
        book.migration_ended(&web(), &host("a"), &host("b"), true);
        hear(&mut book, "b", arrived);
        let entry = book.entry(&web()).unwrap();
        assert_eq!(entry.holder, Some(host("b")));
        assert!(!entry.hearsay, "destination first: {destination_first}");
    }
}

/// A table by which host b is such a machine, as of a word.
fn table_of_b(machine: &str, counter: u64, number: u64) -> SiteTable {
    SiteTable {
        hosts: vec![SiteHost {
            counter,
            machine_id: machine.to_owned(),
            ..enrolled("b")
        }],
        hosts_at: Stamp { epoch: 0, number },
        ..SiteTable::default()
    }
}

fn lies_of_b(machine: &str) -> SiteTable {
    table_of_b(machine, 1 << 40, 1 << 20)
}

/// A machine speaks as a host, which is read whole.
fn powers_on(book: &mut Book, (of, machine): (&str, &str), counter: u64) {
    let instance = Instance {
        counter,
        boot_id: counter.to_string(),
        ..life(machine)
    };
    let (ticket, at) = (book.ask(), book.takeover().unwrap().stamp);
    let whole = WholeSurvey {
        instance,
        table: SiteTable {
            stamp: at,
            ..SiteTable::default()
        },
        records: Vec::new(),
        unread: Default::default(),
    };
    book.take_whole(&host(of), at, ticket, whole);
}

#[test]
fn a_table_that_lies_of_a_machine_locks_no_host_out_once_its_teller_is_gone() {
    let (mut book, at) = restored_but_for_x();
    read(&mut book, "x", at, lies_of_b("nobody's"), Vec::new());
    read(&mut book, "b", at, SiteTable::default(), Vec::new());
    assert_eq!(book.waits_for(), [host("b")]);
    assert_eq!(book.tells_another_machine(&host("b")), Some(&host("x")));
    book.lose(&host("x"));
    drop(book.remove(&host("x"), true).unwrap());
    read(&mut book, "b", at, SiteTable::default(), Vec::new());
    assert_eq!(book.finish_takeover(), Ok(true));
}

#[test]
fn a_former_machine_is_not_the_host_by_an_everyday_word_that_the_host_is_off() {
    let (mut book, takeover) = restored_by_x();
    let at = takeover.stamp;
    read(&mut book, "a", at, SiteTable::default(), Vec::new());
    read(
        &mut book,
        "x",
        at,
        table_of_b("other", 7, 1 << 10),
        Vec::new(),
    );
    book.lose(&host("b"));
    book.fence(&host("b")).unwrap();
    assert_eq!(book.waits_for(), [host("b")], "it may come back as either");
    powers_on(&mut book, ("b", "b"), 5);
    assert_eq!(book.standing(&host("b")), Standing::SecondInstance);
    powers_on(&mut book, ("b", "other"), 7);
    assert_eq!(book.finish_takeover(), Ok(true));
}

/// Hosts b's row, as it is to be written.
fn row_of_b(book: &mut Book) -> HostRow {
    let batch = book.take_unwritten();
    let mut rows = batch.rows().iter().filter_map(|row| match row {
        Row::Host(of, row) if *of == host("b") => Some(row.clone()),
        _ => None,
    });
    rows.next().expect("it is written")
}

#[test]
fn a_machine_that_was_made_a_host_stays_it_for_older_tables_and_after_a_restart() {
    for (machine, by_a_table) in [("third", false), ("other", true)] {
        let (mut book, takeover) = restored_by_x();
        let at = takeover.stamp;
        read(&mut book, "a", at, SiteTable::default(), Vec::new());
        if by_a_table {
            read(
                &mut book,
                "x",
                at,
                table_of_b(machine, 7, 1 << 10),
                Vec::new(),
            );
        } else {
            read(&mut book, "x", at, table_of_b("b", 1, 1 << 10), Vec::new());
            book.lose(&host("b"));
            book.fence(&host("b")).unwrap();
        }
        powers_on(&mut book, ("b", machine), 8);
        powers_on(&mut book, ("b", machine), 8);
        assert_eq!(book.standing(&host("b")), Standing::Known, "{machine}");
        let row = row_of_b(&mut book);
        // Another life of the controller reads an older table first.
        let (mut book, takeover) = restored_by_x();
        let at = takeover.stamp;
        book.load_host(enrolled("b"), row);
        read(&mut book, "a", at, SiteTable::default(), Vec::new());
        read(&mut book, "x", at, table_of_b("b", 1, 1 << 9), Vec::new());
        powers_on(&mut book, ("b", machine), 9);
        assert_eq!(book.finish_takeover(), Ok(true), "{machine}");
        let row = row_of_b(&mut book);
        assert_eq!(
            row.machine_as_of,
            Stamp::default(),
            "an older build reads it"
        );
    }
}

#[test]
fn a_host_that_the_database_forgot_is_the_machine_that_tables_tell() {
    let (mut book, at) = restored_but_for_x();
    let mut table = table_of_b("other", 7, 1 << 10);
    table.complete = table.hosts_at;
    table.hosts[0].name = host("new");
    read(&mut book, "x", at, table, Vec::new());
    assert_eq!(book.to_enrol().len(), 1);
    book.add_host(enrolled("new"), HostRow::default());
    powers_on(&mut book, ("new", "former"), 9);
    assert_eq!(book.standing(&host("new")), Standing::SecondInstance);
    assert_eq!(book.waits_for(), [host("new")]);
    powers_on(&mut book, ("new", "other"), 7);
    assert_eq!(book.finish_takeover(), Ok(true));
}

#[test]
fn a_host_that_was_removed_while_it_was_read_tells_nothing() {
    let (mut book, at) = restored_but_for_x();
    book.lose(&host("x"));
    drop(book.remove(&host("x"), true).unwrap());
    let before = book.may_hold(&web());
    let from = host("b");
    let generation = Generation(9);
    let lies = vec![said(web(), 9, Claim::Promised { generation, from })];
    read(&mut book, "x", at, lies_of_b("nobody's"), lies);
    assert_eq!(book.may_hold(&web()), before);
    assert_eq!(book.tells_another_machine(&host("b")), None);
}

#[test]
fn a_host_whose_removal_was_not_written_is_read_again() {
    let (mut book, at) = restored_but_for_x();
    read(&mut book, "x", at, lies_of_b("nobody's"), Vec::new());
    book.lose(&host("x"));
    let removal = book.remove(&host("x"), true).unwrap();
    book.not_removed(removal);
    assert!(book.waits_for().contains(&host("x")));
}

#[test]
fn a_clone_that_knows_no_word_makes_no_older_copy_of_its_host() {
    let (mut book, _) = web_on_a();
    let stamp = book.stamp();
    let knows = SiteHeard {
        stamp,
        complete: stamp,
    };
    book.updated(&host("b"), Standing::Known, knows);
    let ticket = book.ask();
    let heard = Heard {
        instance: life("clone"),
        knows: SiteHeard::default(),
        records: Vec::new(),
    };
    book.hear(&host("b"), ticket, heard);
    assert_eq!(book.standing(&host("b")), Standing::SecondInstance);
    hear(&mut book, "b", Vec::new());
    assert_eq!(book.standing(&host("b")), Standing::Known);
}

#[test]
fn no_table_is_as_new_as_the_takeover_that_reads_it() {
    let (mut book, takeover) = restored_by_x();
    let at = takeover.stamp;
    let later = SiteTable {
        hosts_at: at,
        ..lies_of_b("nobody's")
    };
    read(&mut book, "x", at, later, Vec::new());
    assert_eq!(book.tells_another_machine(&host("b")), None);
}
