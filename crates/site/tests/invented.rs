//! What a host that is enrolled and lies can do to others: it names them as holders, invents hosts and VMs, and is the
//! first to be polled.

mod common;

use common::{enrolled, host};
use godwit_site::{Book, Heard, HostRow, Surveyed, Takeover};
use godwit_types::site::{
    Claim, Instance, RecordSaid, SiteHeard, SiteTable, SiteVm, Stamp, SurveyAnswer, WholeSurvey,
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
