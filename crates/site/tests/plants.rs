//! Rules that no seed of the simulator judges: each fails once its fault is planted (GODWIT_PLANT, in a build that can plant).

use godwit_site::plant::Plant;
use godwit_site::{Book, HostRow, HostSite, Judged};
use godwit_types::site::{
    Claim, Instance, SiteAnswer, SiteHost, SiteTable, SiteVm, Stamp, Standing, SurveyAnswer,
};
use godwit_types::{Generation, HostName, VmName};
use std::collections::{BTreeMap, BTreeSet};

fn planted() -> Option<Plant> {
    Plant::from_name(&std::env::var("GODWIT_PLANT").ok()?)
}

fn host(name: &str) -> HostName {
    HostName::new(name).unwrap()
}

fn web() -> VmName {
    VmName::new("web").unwrap()
}

fn enrolled(name: &str) -> SiteHost {
    SiteHost {
        name: host(name),
        address: "192.0.2.1:1".parse().unwrap(),
        serial: name.to_owned(),
        counter: 0,
    }
}

#[test]
fn a_no_from_before_a_host_was_named_again_does_not_take_it_out() {
    let mut book = Book::default();
    book.plant = planted();
    for name in ["a", "b"] {
        book.add_host(enrolled(name), HostRow::default());
    }
    let only = BTreeSet::from([host("b")]);
    let (survey, _) = book.survey_of(&web(), only).unwrap();
    book.permit_migration(&web(), &host("a"), &host("b"))
        .unwrap();
    let no = SurveyAnswer {
        highest: survey.level,
        claim: Claim::No,
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

#[test]
fn an_answer_that_is_older_than_what_the_host_knows_boots_nothing() {
    let table = SiteTable {
        hosts: ["a", "b", "c"].map(enrolled).to_vec(),
        had_second: true,
        vms: BTreeMap::from([(web(), row(5))]),
        ..SiteTable::default()
    };
    let mut site = HostSite::new(host("a"), Instance::default(), table);
    site.plant = planted();
    site.wish(web(), Generation(3));
    let answer = |number| SiteAnswer {
        from: Some(host("b")),
        standing: Standing::Known,
        in_charge: false,
        stamp: Stamp::default(),
        vms: BTreeMap::from([(web(), row(number))]),
        records: Vec::new(),
    };
    site.hear(answer(4));
    let judged = site.judge(&web(), 0, false);
    assert!(matches!(judged, Judged::Wait(_)), "{judged:?}");
    site.hear(answer(5));
    assert_eq!(site.judge(&web(), 0, false), Judged::Boot);
}
