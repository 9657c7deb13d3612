//! The site's rules, one by one: what a survey, a silence, a person's word and an old copy mean.

mod common;

use common::{enrolled, host};
use godwit_site::{
    Book, Entry, Free, Heard, HostRow, HostSite, Judged, News, Refusal, Row, Surveyed, Ticket,
    Whereabouts,
};
use godwit_types::site::{
    BootWish, Claim, Instance, RecordSaid, SiteAnswer, SiteHeard, SiteQuestion, SiteTable, Stamp,
    Standing, SurveyAnswer, WholeSurvey,
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

/// What may happen next while two hosts hand a VM over and are polled meanwhile.
#[derive(Clone)]
struct Handover {
    book: Book,
    held: u64,
    /// How far the hosts are: 0 before the gift, 1 given, 2 taken, 3 acknowledged.
    progress: u8,
    polls: [Polled; 2],
}

/// The polls of one host: how many are left, and the one under way.
#[derive(Clone)]
struct Polled {
    left: u8,
    asked: Option<Ticket>,
    answer: Option<Vec<RecordSaid>>,
}

const NAMES: [&str; 2] = ["a", "b"];

impl Handover {
    fn record(&self, which: usize) -> Vec<RecordSaid> {
        let (held, next) = (self.held, self.held + 1);
        let claim = match (which, self.progress) {
            (0, 0) => holds(held),
            (0, 1 | 2) => gave(next),
            (0, _) => moved(next),
            (_, 0 | 1) => {
                return vec![said(
                    "web",
                    held,
                    Claim::Promised {
                        generation: Generation(next),
                        from: host("a"),
                    },
                )];
            }
            _ => holds(next),
        };
        let highest = if self.progress == 0 { held } else { next };
        vec![said("web", highest, claim)]
    }

    /// Every next step; returns how many ends there were.
    fn explore(&self) -> u64 {
        let mut ends = 0;
        let mut is_end = true;
        if self.progress < 3 {
            is_end = false;
            let mut next = self.clone();
            next.progress += 1;
            ends += next.explore();
        }
        for (which, of) in NAMES.into_iter().enumerate() {
            let polled = &self.polls[which];
            if polled.left == 0 {
                continue;
            }
            is_end = false;
            let mut next = self.clone();
            match (polled.asked, polled.answer.clone()) {
                (None, _) => next.polls[which].asked = Some(next.book.ask()),
                (Some(_), None) => next.polls[which].answer = Some(self.record(which)),
                (Some(ticket), Some(records)) => {
                    let knows = next.book.stamp();
                    next.book.hear(&host(of), ticket, heard(of, knows, records));
                    next.polls[which] = Polled {
                        left: polled.left - 1,
                        asked: None,
                        answer: None,
                    };
                    assert_eq!(next.book.twice(&vm("web")), None);
                    assert_ne!(next.book.whereabouts(&vm("web")), Whereabouts::Nowhere);
                }
            }
            ends += next.explore();
        }
        ends + u64::from(is_end)
    }
}

#[test]
fn a_handover_never_looks_like_two_holders_whatever_the_order_of_polls() {
    let (mut book, held) = web_on_a();
    let permitted = book.permit_migration(&vm("web"), &host("a"), &host("b"));
    assert_eq!(permitted.unwrap().generation.0, held + 1);
    let polled = |left| Polled {
        left,
        asked: None,
        answer: None,
    };
    let handover = Handover {
        book,
        held,
        progress: 0,
        polls: [polled(2), polled(1)],
    };
    assert_eq!(handover.clone().explore(), 18_480);
    let handover = Handover {
        polls: [polled(1), polled(2)],
        ..handover
    };
    assert_eq!(handover.explore(), 18_480);
}

#[test]
fn two_holders_are_seen_once_each_was_asked_after_the_others_claim() {
    let (mut book, held) = web_on_a();
    hear(&mut book, "b", vec![said("web", held + 5, holds(held + 5))]);
    assert_eq!(book.twice(&vm("web")), None);
    hear(&mut book, "a", vec![said("web", held, holds(held))]);
    let twice = book.twice(&vm("web")).expect("two hosts hold it");
    // The higher generation was never granted to b.
    let copies: Vec<_> = twice.copies.iter().map(|copy| copy.host.as_str()).collect();
    assert_eq!(copies, ["a", "b"]);
    assert_eq!(twice.to_pause().collect::<Vec<_>>(), [&host("b")]);
    assert!(matches!(
        book.permit_migration(&vm("web"), &host("a"), &host("b")),
        Err(Refusal::Twice { .. })
    ));
}

#[test]
fn of_two_granted_copies_the_lower_one_is_paused() {
    let (mut book, held) = web_on_a();
    let permitted = book.permit_migration(&vm("web"), &host("a"), &host("b"));
    let next = permitted.unwrap().generation.0;
    hear(&mut book, "b", vec![said("web", next, holds(next))]);
    hear(&mut book, "a", vec![said("web", held, holds(held))]);
    let twice = book.twice(&vm("web")).expect("two hosts hold it");
    assert!(twice.copies.iter().all(|copy| copy.granted));
    assert_eq!(twice.to_pause().collect::<Vec<_>>(), [&host("a")]);
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
fn a_migrations_end_makes_its_destination_the_holder() {
    let (mut book, _) = web_on_a();
    book.permit_migration(&vm("web"), &host("a"), &host("b"))
        .unwrap();
    book.lose(&host("b"));
    book.migration_ended(&vm("web"), &host("a"), &host("b"), true);
    let batch = book.take_unwritten();
    let written = batch.rows().iter().find_map(|row| match row {
        Row::Vm(_, entry) => Some(entry.holder.clone()),
        _ => None,
    });
    assert_eq!(written, Some(Some(host("b"))));
    let a_gave = vec![said(
        "web",
        book.highest(&vm("web")).0,
        moved(book.highest(&vm("web")).0),
    )];
    hear(&mut book, "a", a_gave);
    let silent = Whereabouts::Silent {
        hosts: vec![host("b")],
    };
    assert_eq!(book.whereabouts(&vm("web")), silent);
}

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

fn moved_to(generation: u64, to: &str) -> Claim {
    Claim::Moved {
        generation: Generation(generation),
        to: host(to),
    }
}

fn gave_to(generation: u64, to: &str) -> Claim {
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

#[test]
fn a_vm_leaves_only_from_its_holder() {
    let (mut book, held) = web_on_a();
    let refused = book.permit_migration(&vm("web"), &host("b"), &host("a"));
    assert!(
        matches!(&refused, Err(Refusal::NotHolder { holder, .. }) if *holder == host("a")),
        "{refused:?}"
    );
    assert_eq!(book.highest(&vm("web")).0, held);
    // A host that it may have reached since may pass it on, before the end is heard.
    let first = book.permit_migration(&vm("web"), &host("a"), &host("b"));
    first.expect("from its holder");
    let second = book.permit_migration(&vm("web"), &host("b"), &host("a"));
    second.expect("from where it went");
}

#[test]
fn a_vm_leaves_from_where_it_arrived_by_a_handover_that_a_restored_database_forgot() {
    let (mut book, held) = web_on_a();
    let arrived = Generation(held + 1);
    let record = |highest, claim| RecordSaid {
        vm: vm("web"),
        highest,
        claim,
        may_live: false,
    };
    let holds = Claim::Holds {
        generation: arrived,
        on: true,
    };
    hear(&mut book, "b", vec![record(arrived, holds)]);
    let early = book.permit_migration(&vm("web"), &host("b"), &host("a"));
    assert!(matches!(early, Err(Refusal::NotHolder { .. })), "{early:?}");
    let moved = Claim::Moved {
        generation: arrived,
        to: host("b"),
    };
    hear(&mut book, "a", vec![record(arrived, moved)]);
    book.permit_migration(&vm("web"), &host("b"), &host("a"))
        .expect("its former holder says that it went");
}

#[test]
fn a_copy_that_a_person_kept_can_be_moved() {
    let (mut book, held) = web_on_a();
    let kept = RecordSaid {
        vm: vm("web"),
        highest: Generation(held),
        claim: Claim::Holds {
            generation: Generation(held - 1),
            on: true,
        },
        may_live: true,
    };
    hear(&mut book, "b", vec![kept]);
    // The other copy was ended, and its host has nothing of the VM left.
    hear(&mut book, "a", Vec::new());
    book.permit_migration(&vm("web"), &host("b"), &host("a"))
        .expect("nobody else holds it");
}
