//! The site's rules, one by one: what a survey, a silence, a person's word and an old copy mean.

#[path = "../common/mod.rs"]
mod common;
mod handover;
mod restored;

use restored::{gave_to, moved_to};

use common::{enrolled, host};
use godwit_site::{
    Book, Entry, Free, Heard, HostRow, HostSite, Judged, News, Refusal, Surveyed, Whereabouts,
};
use godwit_types::site::{
    BootWish, Claim, Instance, RecordSaid, SiteAnswer, SiteHeard, SiteQuestion, SiteTable, Stamp,
    Standing, SurveyAnswer,
};
use godwit_types::{Generation, HostName, VmName};
use std::collections::BTreeMap;

/// How far a grant goes beyond a host that was fenced unheard.
const GAP: u64 = 1 << 20;

fn vm(name: &str) -> VmName {
    VmName::new(name).unwrap()
}

fn holds(generation: u64) -> Claim {
    Claim::Holds {
        generation: Generation(generation),
        on: true,
    }
}

fn gave(generation: u64) -> Claim {
    Claim::Gave {
        generation: Generation(generation),
        to: host("b"),
    }
}

fn moved(generation: u64) -> Claim {
    Claim::Moved {
        generation: Generation(generation),
        to: host("b"),
    }
}

fn said(name: &str, highest: u64, claim: Claim) -> RecordSaid {
    RecordSaid {
        vm: vm(name),
        highest: Generation(highest),
        claim,
        may_live: true,
        images: Vec::new(),
    }
}

fn life(of: &str, counter: u64) -> Instance {
    Instance {
        counter,
        boot_id: "boot".into(),
        machine_id: of.to_owned(),
    }
}

fn site(hosts: &[&str]) -> Book {
    let mut book = Book::default();
    for name in hosts {
        book.add_host(enrolled(name), HostRow::default());
    }
    book
}

fn heard(of: &str, knows: Stamp, records: Vec<RecordSaid>) -> Heard {
    Heard {
        instance: life(of, 1),
        knows: SiteHeard {
            stamp: knows,
            complete: knows,
        },
        records,
    }
}

/// A host is asked and answers at once.
fn hear(book: &mut Book, of: &str, records: Vec<RecordSaid>) -> Vec<News> {
    let (ticket, knows) = (book.ask(), book.stamp());
    book.hear(&host(of), ticket, heard(of, knows, records))
}

/// Nothing that a book of these tests says is later.
fn newest() -> Stamp {
    Stamp {
        epoch: 9,
        number: 1 << 40,
    }
}

/// What a host of this house answers to a survey.
fn surveyed(of: &str, highest: Generation, claim: Claim) -> SurveyAnswer {
    SurveyAnswer {
        highest,
        may_live: claim.may_hold(),
        claim,
        instance: life(of, 1),
        knows: SiteHeard {
            stamp: newest(),
            complete: newest(),
        },
        images: Vec::new(),
    }
}

fn no(of: &HostName, highest: Generation) -> SurveyAnswer {
    surveyed(of.as_str(), highest, Claim::No)
}

/// Surveys a VM for a grant to a host; everybody holds nothing and says so, but for those that are silent.
fn survey(book: &mut Book, name: &str, on: &str, silent: &[&str]) -> Surveyed {
    let begun = book.begin_survey(&vm(name), &[host(on)]).unwrap();
    let asked = begun.hosts.iter();
    let answering = asked.filter(|host| !silent.contains(&host.as_str()));
    let answers: BTreeMap<_, _> = answering
        .map(|host| (host.clone(), no(host, begun.level)))
        .collect();
    book.take_survey(&begun, &answers)
}

fn free(surveyed: Surveyed) -> Free {
    match surveyed {
        Surveyed::Free(free) => free,
        other => panic!("not free: {other:?}"),
    }
}

fn grant(book: &mut Book, name: &str, on: &str) -> u64 {
    let free = free(survey(book, name, on, &[]));
    book.grant(free, &host(on)).unwrap().generation.0
}

/// Host a holds VM web, both hosts are heard.
fn web_on_a() -> (Book, u64) {
    let mut book = site(&["a", "b"]);
    for name in ["a", "b"] {
        hear(&mut book, name, Vec::new());
    }
    let held = grant(&mut book, "web", "a");
    hear(&mut book, "a", vec![said("web", held, holds(held))]);
    (book, held)
}

#[test]
fn one_dead_host_of_32_blocks_only_the_vms_that_it_may_hold() {
    let names: Vec<String> = (0..32).map(|n| format!("h{n}")).collect();
    let hosts: Vec<&str> = names.iter().map(String::as_str).collect();
    let mut book = site(&hosts);
    for name in &hosts {
        hear(&mut book, name, Vec::new());
        grant(&mut book, &format!("vm-{name}"), name);
    }
    book.lose(&host("h31"));
    let mut started = 0;
    for name in &hosts {
        let vm = format!("vm-{name}");
        match survey(&mut book, &vm, "h0", &["h31"]) {
            Surveyed::Free(free) => {
                book.grant(free, &host("h0")).unwrap();
                started += 1;
            }
            Surveyed::Refused(Refusal::Silent { hosts, .. }) => {
                assert_eq!((vm.as_str(), hosts), ("vm-h31", vec![host("h31")]));
            }
            other => panic!("{vm}: {other:?}"),
        }
    }
    assert_eq!(started, 31);
}

#[test]
fn a_fenced_host_lets_its_vm_start_far_above_and_is_no_longer_fenced_once_heard() {
    let (mut book, held) = web_on_a();
    assert!(matches!(
        book.fence(&host("a")),
        Err(Refusal::Answers { .. })
    ));
    book.lose(&host("a"));
    let refused = survey(&mut book, "web", "b", &["a"]);
    assert!(matches!(refused, Surveyed::Refused(Refusal::Silent { .. })));
    book.fence(&host("a")).unwrap();
    let found = free(survey(&mut book, "web", "b", &["a"]));
    let started = book.grant(found, &host("b")).unwrap().generation.0;
    assert!(started >= held + GAP, "{started} after {held}");
    assert!(!book.may_hold(&vm("web")).contains(&host("a")));
    let news = hear(&mut book, "a", Vec::new());
    assert!(
        matches!(news[..], [News::FencedAnswered { .. }]),
        "{news:?}"
    );
    assert!(!book.is_fenced(&host("a")));
}

#[test]
fn a_grant_follows_the_last_survey_only() {
    let (mut book, _) = web_on_a();
    let early = free(survey(&mut book, "web", "b", &[]));
    let late = free(survey(&mut book, "web", "b", &[]));
    let stale = book.grant(early, &host("b"));
    assert!(matches!(stale, Err(Refusal::Stale { .. })), "{stale:?}");
    book.grant(late, &host("b")).unwrap();
}

#[test]
fn a_no_from_before_a_host_was_named_does_not_take_it_out() {
    let (mut book, _) = web_on_a();
    let begun = book.begin_survey(&vm("web"), &[host("b")]).unwrap();
    book.permit_migration(&vm("web"), &host("a"), &host("b"))
        .unwrap();
    let answers = BTreeMap::from([(host("b"), no(&host("b"), begun.level))]);
    let verdict = book.take_survey(&begun, &answers);
    assert!(matches!(verdict, Surveyed::Refused(_)), "{verdict:?}");
    assert!(book.may_hold(&vm("web")).contains(&host("b")));
}

#[test]
fn a_member_that_may_hold_stays_in_the_set_whatever_polls_say() {
    let (mut book, _) = web_on_a();
    hear(&mut book, "a", Vec::new());
    assert!(book.may_hold(&vm("web")).contains(&host("a")));
    assert_ne!(book.whereabouts(&vm("web")), Whereabouts::Nowhere);
}

#[test]
fn a_gift_at_the_end_of_all_generations_binds_no_host() {
    for claim in [
        gave_to(u64::MAX, "b"),
        moved_to(u64::MAX, "b"),
        holds(u64::MAX),
    ] {
        let (mut book, held) = web_on_a();
        let mut third = enrolled("c");
        third.name = host("c");
        book.add_host(third, HostRow::default());
        hear(&mut book, "c", vec![said("web", u64::MAX, claim.clone())]);
        hear(&mut book, "c", Vec::new());
        let entry = book.entry(&vm("web")).unwrap();
        assert!(
            entry.highest.0 < 1 << 41 && entry.held.0 == held,
            "{entry:?}"
        );
        assert!(grant(&mut book, "web", "b") < 1 << 42, "{claim:?}");
    }
}

#[test]
fn a_host_that_others_asked_about_everything_is_granted_its_vm() {
    let (mut book, _) = web_on_a();
    // Peers can make its counter this, with whatever they ask.
    let pushed = godwit_ownership::PEERS_REACH;
    let begun = book.begin_survey(&vm("web"), &[host("b")]).unwrap();
    let answers = BTreeMap::from([
        (host("a"), no(&host("a"), begun.level)),
        (host("b"), no(&host("b"), pushed)),
    ]);
    let first = book.take_survey(&begun, &answers);
    assert!(matches!(first, Surveyed::Refused(Refusal::Stale { .. })));
    assert!(grant(&mut book, "web", "b") > pushed.0);
}

fn question(instance: Instance, stamp: Stamp) -> SiteQuestion {
    SiteQuestion {
        instance,
        knows: SiteHeard {
            stamp,
            complete: stamp,
        },
        wishes: vec![BootWish {
            vm: vm("web"),
            generation: Generation(1),
        }],
    }
}

#[test]
fn a_host_that_asks_is_told_who_it_is() {
    let (mut book, held) = web_on_a();
    hear(&mut book, "a", vec![said("web", held, holds(held))]);
    let mut ask = |instance, other_answers| {
        let question = question(instance, book.stamp());
        book.answer(&host("a"), &question, other_answers)
    };
    let same = ask(life("a", 1), false);
    assert_eq!((same.standing, same.in_charge), (Standing::Known, true));
    assert_eq!(same.vms[&vm("web")].holder, Some(host("a")));
    assert_eq!(same.vms[&vm("web")].held, Generation(held));
    let second = ask(life("clone", 2), true);
    assert_eq!(second.standing, Standing::SecondInstance);
    // The counter in a copied state directory is the same.
    assert_eq!(
        ask(life("clone", 1), false).standing,
        Standing::SecondInstance
    );
    assert_eq!(ask(life("a", 2), false).standing, Standing::Known);
    assert_eq!(ask(life("a", 1), false).standing, Standing::OldCopy);
    // With a good certificate it was not removed: this database is older than its enrolment.
    let asked = question(life("x", 1), book.stamp());
    let stranger = book.answer(&host("x"), &asked, false);
    assert_eq!(stranger.standing, Standing::Known);
}

#[test]
fn what_a_removed_host_held_is_granted_far_above() {
    let (mut book, held) = web_on_a();
    book.lose(&host("a"));
    assert!(matches!(
        book.remove(&host("a"), false),
        Err(Refusal::MayRun { .. })
    ));
    book.remove(&host("a"), true).unwrap();
    assert!(grant(&mut book, "web", "b") >= held + GAP);
    let asked = question(life("a", 1), book.stamp());
    let answer = book.answer(&host("a"), &asked, false);
    assert_eq!(answer.standing, Standing::Removed);
}

#[test]
fn where_a_vm_ran_is_as_before_a_grant_by_which_nothing_began() {
    let (mut book, held) = web_on_a();
    let ran = |book: &Book| {
        let ran = book.entry(&vm("web")).unwrap().ran();
        (ran.holder, ran.held.0)
    };
    let for_b = free(survey(&mut book, "web", "b", &[]));
    let granted = book.grant(for_b, &host("b")).unwrap();
    let under = granted.generation.0;
    book.nothing_began(&granted);
    assert_eq!(ran(&book), (Some(host("b")), under), "b may hold it still");
    drop(free(survey(&mut book, "web", "b", &[])));
    assert_eq!(ran(&book), (Some(host("b")), under), "b may have run it");
    book.nothing_began(&granted);
    assert_eq!(ran(&book), (Some(host("a")), held));
    // A host that joins anew under the name of one that was removed never had it.
    let mut without = book.clone();
    let removal = without.remove(&host("a"), true).unwrap();
    assert_eq!(ran(&without), (None, held));
    without.not_removed(removal);
    assert_eq!(ran(&without), (Some(host("a")), held));
    // An old copy of b's disk holds it by that grant after all.
    hear(&mut book, "b", vec![said("web", under, holds(under))]);
    assert_eq!(ran(&book), (Some(host("b")), under));
    // Nor does the end of an older start say anything of a newer one.
    let for_a = free(survey(&mut book, "web", "a", &[]));
    let newer = book.grant(for_a, &host("a")).unwrap();
    book.nothing_began(&granted);
    assert_eq!(ran(&book), (Some(host("a")), newer.generation.0));
}

#[test]
fn an_entry_is_kept_as_the_database_keeps_it() {
    let (book, held) = web_on_a();
    let entry = book.entry(&vm("web")).unwrap();
    let text = serde_json::to_string(entry).unwrap();
    let read: Entry = serde_json::from_str(&text).unwrap();
    assert_eq!(&read, entry);
    assert_eq!(read.may_hold[&host("a")], Generation(held));
}

/// Hosts a and b, host a's table as it was told that it is the machine `a`, and what host b answers to another machine.
fn site_with_a_clone() -> (HostSite, HostSite) {
    let (mut book, held) = web_on_a();
    let told = |book: &mut Book, of: &str, machine: &str, table: SiteTable| {
        let mut site = HostSite::new(host(of), life(machine, 2), table);
        book.updated(&host(of), Standing::Known, site.heard());
        if let Some(update) = book.update_for(&host(of)) {
            site.update(update).unwrap();
        }
        site
    };
    let a = told(&mut book, "a", "a", SiteTable::default());
    let b = told(&mut book, "b", "b", SiteTable::default());
    let mut clone = HostSite::new(host("a"), life("another", 2), a.table().clone());
    clone.wish(vm("web"), Generation(held));
    (clone, b)
}

#[test]
fn a_neighbour_does_not_let_a_clone_boot_what_the_host_beside_it_runs() {
    let (clone, b) = site_with_a_clone();
    let question = clone.question().unwrap();
    let answer = b.answer(&host("a"), &question, Vec::new());
    assert_eq!(answer.standing, Standing::SecondInstance);
    // Also one that has not heard of the machine yet.
    for standing in [answer.standing, Standing::Known] {
        let mut clone = clone.clone();
        clone.hear(SiteAnswer {
            standing,
            ..answer.clone()
        });
        let judged = clone.judge(&vm("web"), 600, false);
        assert!(matches!(judged, Judged::Never(_)), "{judged:?}");
        // A controller that is in charge knows that a person said that the first machine is off.
        let mut known = clone.clone();
        known.hear(SiteAnswer {
            from: None,
            in_charge: true,
            standing: Standing::Known,
            ..answer.clone()
        });
        assert_eq!(known.judge(&vm("web"), 0, false), Judged::Boot);
        // And where no controller answers, a person does.
        clone.boot_alone();
        assert_eq!(clone.judge(&vm("web"), 0, false), Judged::Boot);
    }
}

#[test]
fn a_persons_word_lets_no_older_copy_run_on_that_the_controller_knows_to_be_overtaken() {
    let (mut book, held) = web_on_a();
    let gave = || vec![said("web", held + 1, restored::gave_to(held + 1, "b"))];
    hear(&mut book, "a", gave());
    assert_eq!(
        book.may_run_on(&vm("web"), &host("a"), Some(&host("b"))),
        Ok(())
    );
    // Whoever took it and gave it on says that it does not hold it.
    let mut given_on = book.clone();
    let to_c = vec![said("web", held + 2, restored::moved_to(held + 2, "c"))];
    hear(&mut given_on, "b", to_c);
    // It was taken, and the host that took it is silent since.
    let mut taken = book.clone();
    hear(
        &mut taken,
        "b",
        vec![said("web", held + 1, holds(held + 1))],
    );
    taken.lose(&host("b"));
    for book in [&given_on, &taken] {
        let refused = book.may_run_on(&vm("web"), &host("a"), Some(&host("b")));
        assert!(
            matches!(refused, Err(Refusal::Overtaken { .. })),
            "{refused:?}"
        );
    }
    // Once that host is off for good, or counts as off, its copy is lost by the person's word.
    let (mut fenced, mut removed) = (taken.clone(), taken.clone());
    fenced.fence(&host("b")).unwrap();
    removed.remove(&host("b"), true).unwrap();
    for book in [&fenced, &removed] {
        assert_eq!(
            book.may_run_on(&vm("web"), &host("a"), Some(&host("b"))),
            Ok(())
        );
    }
    // What the host says comes from an older life of it.
    let answer = Heard {
        instance: life("a", 0),
        ..heard("a", book.stamp(), gave())
    };
    let ticket = book.ask();
    book.hear(&host("a"), ticket, answer);
    let refused = book.may_run_on(&vm("web"), &host("a"), Some(&host("b")));
    assert!(
        matches!(refused, Err(Refusal::NotItself { .. })),
        "{refused:?}"
    );
}

/// A clone of a handover's destination would say that it refused, while the destination itself runs the VM.
#[test]
fn neither_a_clone_nor_an_older_copy_speaks_for_a_host_about_who_runs_a_vm() {
    let (clone, b) = site_with_a_clone();
    let known = b.knows(&host("a")).cloned();
    let a = HostSite::new(host("a"), life("a", 2), clone.table().clone());
    let from = host("a");
    assert_eq!(b.refuses_peer(&from, Some(a.instance()), None), None);
    assert_eq!(b.refuses_peer(&from, Some(&life("a", 9)), None), None);
    let why = b.refuses_peer(&from, Some(clone.instance()), None);
    assert!(why.unwrap().contains("another machine"));
    let why = b.refuses_peer(&from, Some(&life("a", 0)), None);
    assert!(why.unwrap().contains("older copy"));
    // Whoever answers at the host's address finds out by himself.
    let asker = host("b");
    assert_eq!(a.refuses_peer(&asker, None, known.as_ref()), None);
    let why = clone.refuses_peer(&asker, None, known.as_ref());
    assert!(why.unwrap().contains("another machine"));
    let copy = HostSite::new(host("a"), life("a", 0), clone.table().clone());
    let why = copy.refuses_peer(&asker, None, known.as_ref());
    assert!(why.unwrap().contains("older copy"));
    // Of an earlier build nobody knows more than its certificate says.
    assert_eq!(clone.refuses_peer(&asker, None, None), None);
}

#[test]
fn a_persons_word_boots_no_clone_that_the_controller_knows() {
    let (mut clone, b) = site_with_a_clone();
    let question = clone.question().unwrap();
    clone.hear(SiteAnswer {
        from: None,
        in_charge: true,
        ..b.answer(&host("a"), &question, Vec::new())
    });
    clone.boot_alone();
    let judged = clone.judge(&vm("web"), 600, false);
    assert!(matches!(judged, Judged::Never(_)), "{judged:?}");
}

#[test]
fn a_host_is_told_of_thousands_of_vms_in_parts() {
    let mut book = site(&["a", "b"]);
    for name in ["a", "b"] {
        hear(&mut book, name, Vec::new());
    }
    for number in 0..1200 {
        grant(&mut book, &format!("vm-{number}"), "b");
    }
    let mut a = HostSite::new(host("a"), life("a", 1), SiteTable::default());
    book.updated(&host("a"), Standing::Known, a.heard());
    let mut parts = 0;
    while let Some(update) = book.update_for(&host("a")) {
        assert!(update.vms.len() <= 500, "{} at once", update.vms.len());
        let you = update.you;
        a.update(update).unwrap();
        book.updated(&host("a"), you, a.heard());
        parts += 1;
    }
    assert_eq!((parts, a.table().vms.len()), (3, 1200));
    assert_eq!(a.heard().complete, book.stamp());
    assert!(!a.may_be_configured_alone());
}
