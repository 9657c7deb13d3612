//! Tests of the inventory: who wins when hosts say different things.

use super::shown::unheard_info;
use super::*;
use godwit_site::{Entry, HostRow};
use godwit_types::Generation;
use godwit_types::disk_activity::{DiskActivity, DiskWork};
use godwit_types::site::{Claim, SiteHost, SiteTable, SurveyAnswer};
use godwit_types::vm::{Accelerator, DiskSpec, Firmware};
use std::collections::BTreeMap;

fn host(name: &str) -> HostName {
    HostName::new(name).unwrap()
}

fn web() -> VmName {
    VmName::new("web").unwrap()
}

fn spec() -> VmSpec {
    VmSpec::from_toml("name = \"web\"\nvcpus = 1\nmemory_mib = 64\nkernel = \"/k\"").unwrap()
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

fn promised(generation: u64) -> Claim {
    Claim::Promised {
        generation: Generation(generation),
        from: host("a"),
    }
}

fn says(state: VmState, generation: u64, claim: Claim) -> Vec<HostVm> {
    vec![HostVm {
        spec: spec(),
        state,
        generation: Generation(generation),
        claim,
        migration: None,
        accelerator: Some(Accelerator::Tcg),
        vm_process_pid: None,
        vm_process: None,
        qemu_pid: None,
        note: None,
        disks: Vec::new(),
        images: Vec::new(),
        guest: None,
    }]
}

/// Hosts a and b, and VM web, granted to host a under generation 3.
fn state() -> State {
    let mut state = State::default();
    for name in ["a", "b"] {
        let entry = HostEntry::new("192.0.2.1:1".parse().unwrap(), "1".into());
        let site = SiteHost {
            name: host(name),
            address: entry.address,
            serial: entry.serial.clone(),
            counter: 0,
            machine_id: String::new(),
        };
        state.hosts.insert(host(name), entry);
        state.book.add_host(site, HostRow::default());
    }
    let held = Generation(3);
    let entry = Entry {
        holder: Some(host("a")),
        held,
        highest: held,
        may_hold: BTreeMap::from([(host("a"), held)]),
        ..Entry::default()
    };
    state.book.add_entry(web(), entry);
    let (spec, resolved) = (spec(), None);
    state.vms.insert(web(), VmEntry { spec, resolved });
    state
}

/// A host is asked and answers at once.
fn hear(state: &mut State, name: &str, vms: Vec<HostVm>) -> Observed {
    let ticket = state.book.ask();
    take(state, name, ticket, vms)
}

/// A host answers what it was asked then.
fn take(state: &mut State, name: &str, ticket: Ticket, vms: Vec<HostVm>) -> Observed {
    let entry = state.hosts.get_mut(&host(name)).unwrap();
    entry.state = HostState::Connected;
    let info = unheard_info(&host(name), entry.address);
    state.observe(&host(name), ticket, &info, vms)
}

/// The migration of VM web from a to b is permitted.
fn permit(state: &mut State) -> u64 {
    let permitted = state
        .book
        .permit_migration(&web(), &host("a"), &host("b"))
        .unwrap();
    permitted.generation.0
}

fn place_and_state(state: &State) -> (Option<String>, VmState) {
    let place = state.place(&web()).map(|place| place.host.to_string());
    (place, state.vm_state(&web()))
}

fn is(host: &str, state: VmState) -> (Option<String>, VmState) {
    (Some(host.to_owned()), state)
}

#[test]
fn a_handover_is_seen_and_an_older_answer_does_not_bring_it_back() {
    let mut state = state();
    hear(&mut state, "a", says(VmState::Running, 3, holds(3)));
    assert_eq!(place_and_state(&state), is("a", VmState::Running));
    assert_eq!(permit(&mut state), 4);
    let early = state.book.ask();
    let observed = hear(&mut state, "b", says(VmState::Running, 4, holds(4)));
    let moved = News::Held {
        vm: web(),
        host: host("b"),
    };
    assert!(observed.news.contains(&moved), "{observed:?}");
    assert_eq!(place_and_state(&state), is("b", VmState::Running));
    // What a said before it gave the VM is late, and no second holder.
    take(&mut state, "a", early, says(VmState::Running, 3, holds(3)));
    assert_eq!(place_and_state(&state), is("b", VmState::Running));
    // Asked now it still says so: two hosts hold the VM.
    hear(&mut state, "a", says(VmState::Running, 3, holds(3)));
    assert_eq!(place_and_state(&state), is("b", VmState::RunningTwice));
}

#[test]
fn a_vm_is_stopped_only_when_every_host_that_may_hold_it_said_no() {
    let mut state = state();
    // Not heard yet.
    assert_eq!(place_and_state(&state), is("a", VmState::Unreachable));
    // The host that got it knows nothing of it any more: that is no binding no.
    hear(&mut state, "b", Vec::new());
    hear(&mut state, "a", Vec::new());
    assert_eq!(place_and_state(&state), is("a", VmState::HandingOver));
    state.lose(&host("a"));
    assert_eq!(place_and_state(&state), is("a", VmState::Unreachable));
    hear(&mut state, "a", says(VmState::Stopped, 3, Claim::No));
    assert_eq!(place_and_state(&state), (None, VmState::Stopped));
}

#[test]
fn a_destination_that_was_named_and_is_silent_makes_the_vm_unreachable() {
    let mut state = state();
    hear(&mut state, "b", Vec::new());
    hear(&mut state, "a", says(VmState::Running, 3, holds(3)));
    permit(&mut state);
    state.lose(&host("b"));
    let moved = Claim::Moved {
        generation: Generation(4),
        to: host("b"),
    };
    hear(&mut state, "a", says(VmState::Stopped, 4, moved));
    assert_eq!(place_and_state(&state), is("b", VmState::Unreachable));
}

#[test]
fn a_vm_whose_disk_only_a_silent_host_has_is_not_said_to_start_elsewhere() {
    let mut state = state();
    hear(&mut state, "a", says(VmState::Running, 3, holds(3)));
    state.lose(&host("a"));
    let mut note = |shared| {
        let disk = DiskSpec {
            shared,
            ..DiskSpec::new("root", "/root.raw")
        };
        state.vms.get_mut(&web()).unwrap().spec.disks = vec![disk];
        state.vm_view(&web(), 0).unwrap().note.unwrap()
    };
    let (alone, shared) = (note(false), note(true));
    state.vms.get_mut(&web()).unwrap().spec.firmware = Firmware::Uefi;
    let variables = state.vm_view(&web(), 0).unwrap().note.unwrap();
    assert!(
        variables.ends_with("which alone has its UEFI variables"),
        "{variables}"
    );
    assert!(
        alone.ends_with("bring it back, which alone has its disk 'root'"),
        "{alone}"
    );
    assert!(
        shared.contains("run 'godwit host fenced a' and start web again"),
        "{shared}"
    );
}

#[test]
fn an_incoming_copy_does_not_hide_the_running_one() {
    let mut state = state();
    hear(&mut state, "a", says(VmState::Running, 3, holds(3)));
    permit(&mut state);
    let receiving = Claim::Receiving { from: host("a") };
    hear(&mut state, "b", says(VmState::Incoming, 3, receiving));
    assert_eq!(place_and_state(&state), is("a", VmState::Running));
}

#[test]
fn doubt_is_shown_until_somebody_holds_more() {
    let mut state = state();
    hear(&mut state, "a", says(VmState::Running, 3, holds(3)));
    permit(&mut state);
    hear(&mut state, "a", says(VmState::InDoubt, 4, gave(4)));
    state.lose(&host("b"));
    assert_eq!(place_and_state(&state), is("a", VmState::InDoubt));
    hear(&mut state, "b", says(VmState::Running, 4, holds(4)));
    assert_eq!(place_and_state(&state), is("b", VmState::Running));
}

#[test]
fn a_destination_in_doubt_is_shown_when_the_source_is_gone() {
    let mut state = state();
    hear(&mut state, "a", says(VmState::Running, 3, holds(3)));
    permit(&mut state);
    hear(&mut state, "b", says(VmState::InDoubt, 3, promised(4)));
    assert_eq!(place_and_state(&state), is("a", VmState::Running));
    state.lose(&host("a"));
    assert_eq!(place_and_state(&state), is("b", VmState::InDoubt));
    let note = state.vm_view(&web(), 0).unwrap().note.unwrap();
    assert!(
        note.contains("godwit vm resolve web --give-up-on b --confirm-fenced a"),
        "{note}"
    );
}

#[test]
fn a_host_that_takes_no_part_puts_no_vm_in_doubt() {
    let mut state = state();
    hear(&mut state, "a", says(VmState::Running, 3, holds(3)));
    let lies = [Claim::No, promised(9), promised(4), gave(9), holds(2)];
    for claim in lies.clone() {
        let mut lie = says(VmState::InDoubt, 9, claim);
        lie[0].note = Some("godwit vm resolve web --run-on b --confirm-fenced a".into());
        hear(&mut state, "b", lie);
        hear(&mut state, "a", says(VmState::Running, 3, holds(3)));
        let (place, shown) = place_and_state(&state);
        assert_ne!(shown, VmState::InDoubt);
        assert!(place.is_some());
    }
    // A permission for others does not make its word count.
    let mut state = self::state();
    hear(&mut state, "a", says(VmState::Running, 3, holds(3)));
    permit(&mut state);
    hear(&mut state, "b", says(VmState::InDoubt, 9, gave(4)));
    assert_eq!(place_and_state(&state), is("a", VmState::Running));
}

#[test]
fn what_ends_a_doubt_is_said_by_the_controller_alone() {
    let mut state = state();
    hear(&mut state, "a", says(VmState::Running, 3, holds(3)));
    permit(&mut state);
    let mut told = says(VmState::InDoubt, 4, gave(4));
    told[0].note = Some("run godwit vm resolve web --run-on x --confirm-fenced c".into());
    hear(&mut state, "a", told);
    state.lose(&host("b"));
    let note = state.vm_view(&web(), 0).unwrap().note.unwrap();
    assert!(note.contains("--run-on a --confirm-fenced b"), "{note}");
    assert!(!note.contains("--run-on x"), "{note}");
}

#[test]
fn what_disks_do_just_now_is_shown_and_is_no_news() {
    let mut state = state();
    let busy = |reads| {
        let mut said = says(VmState::Running, 3, holds(3));
        said[0].disks = vec![DiskActivity {
            disk: "root".into(),
            reads: DiskWork {
                requests: reads,
                ..DiskWork::default()
            },
            ..DiskActivity::default()
        }];
        said
    };
    let is_news = |observed: &Observed| {
        let of = |change: &Change| matches!(change, Change::State(_));
        observed.changes.iter().any(of)
    };
    assert!(is_news(&hear(&mut state, "a", busy(1))));
    assert!(!is_news(&hear(&mut state, "a", busy(2))));
    let shown = state.vm_view(&web(), 0).unwrap();
    assert_eq!(shown.disks[0].reads.requests, 2);
    let paused = hear(&mut state, "a", says(VmState::Paused, 3, holds(3)));
    assert!(is_news(&paused));
}

#[test]
fn an_unknown_vm_that_is_held_is_adopted() {
    let mut state = state();
    state.vms.clear();
    hear(&mut state, "b", says(VmState::Stopped, 3, Claim::No));
    assert!(state.vms.is_empty());
    let observed = hear(&mut state, "a", says(VmState::Running, 3, holds(3)));
    let adopted = |change: &Change| matches!(change, Change::Adopted(_));
    assert!(observed.changes.iter().any(adopted), "{observed:?}");
    assert!(state.vms.contains_key(&web()));
}

#[test]
fn what_nobody_granted_is_not_adopted_as_the_holder() {
    let mut state = state();
    hear(&mut state, "a", says(VmState::Running, 3, holds(3)));
    hear(&mut state, "b", says(VmState::Running, 9, holds(9)));
    let entry = state.book.entry(&web()).unwrap();
    assert_eq!(
        (&entry.holder, entry.held),
        (&Some(host("a")), Generation(3))
    );
    assert!(entry.may_hold.contains_key(&host("b")));
    assert_eq!(entry.highest, Generation(9));
}

#[test]
fn lists_begin_with_two_holders_then_doubt() {
    let mut state = state();
    for name in ["aaa", "bbb"] {
        let mut other = spec();
        other.name = VmName::new(name).unwrap();
        let entry = VmEntry {
            spec: other,
            resolved: None,
        };
        state.vms.insert(VmName::new(name).unwrap(), entry);
    }
    let first = |state: &State| state.vm_views(0)[0].spec.name.to_string();
    assert_eq!(first(&state), "aaa");
    let mut doubt = says(VmState::InDoubt, 3, promised(3));
    doubt[0].spec.name = VmName::new("bbb").unwrap();
    hear(&mut state, "a", doubt.clone());
    assert_eq!(first(&state), "bbb");
    doubt.extend(says(VmState::Running, 3, holds(3)));
    hear(&mut state, "a", doubt);
    hear(&mut state, "b", says(VmState::Running, 3, holds(3)));
    hear(&mut state, "a", says(VmState::Running, 3, holds(3)));
    assert_eq!(first(&state), "web");
    assert_eq!(state.vm_views(0)[0].copies.len(), 2);
}

#[test]
fn a_vm_whose_row_cannot_be_read_is_no_new_name_and_a_new_one_counts_once() {
    let mut state = State::default();
    let entry = HostEntry::new("192.0.2.1:1".parse().unwrap(), "1".into());
    state.hosts.insert(host("a"), entry);
    let mut answer = says(VmState::Running, 3, holds(3));
    // An answer may be heard again and again before it is learned.
    for _ in 0..3 {
        let brought = state.brought_with(&host("a"), &mut answer, 9);
        assert_eq!(brought, BTreeSet::from([web()]));
        state.hosts.get_mut(&host("a")).unwrap().brought = brought;
    }
    state.hosts.get_mut(&host("a")).unwrap().brought.clear();
    let row = crate::unread::UnreadRow::new("site_vms", "web", "noise");
    state.lacks(web(), Lack::Right(row));
    assert!(state.brought_with(&host("a"), &mut answer, 9).is_empty());
}

/// A host's list of VMs that nobody heard of.
fn invented(count: usize, claim: &Claim) -> Vec<HostVm> {
    let one = says(VmState::Stopped, 3, claim.clone());
    let names = (0..count).map(|n| VmName::new(format!("v{n}")).unwrap());
    let named = names.zip(one.into_iter().cycle()).map(|(name, mut vm)| {
        vm.spec.name = name;
        vm
    });
    named.collect()
}

#[test]
fn a_host_brings_no_more_new_vms_than_every_table_can_take() {
    let mut state = State::default();
    let entry = HostEntry::new("192.0.2.1:1".parse().unwrap(), "1".into());
    state.hosts.insert(host("a"), entry);
    let most = bounds::NEW_NAMES_MAX;
    let mut past = invented(5000, &Claim::No);
    let brought = state.brought_with(&host("a"), &mut past, most);
    assert_eq!((brought.len(), past.len()), (most, most));
    state.hosts.get_mut(&host("a")).unwrap().brought = brought;
    // What it may hold is not left out in silence.
    let mut held = invented(most, &holds(3));
    let brought = state.brought_with(&host("a"), &mut held, most);
    assert_eq!((brought.len(), held.len()), (most, most));
    let mut held = invented(most + 1, &holds(3));
    let brought = state.brought_with(&host("a"), &mut held, most);
    assert!(bounds::new_names(&host("a"), brought.len()).is_err());
}

#[test]
fn a_host_that_is_read_for_a_takeover_brings_no_endless_new_vms() {
    let mut state = State::default();
    let entry = HostEntry::new("192.0.2.1:1".parse().unwrap(), "1".into());
    state.hosts.insert(host("a"), entry);
    let whole = |from: usize, to: usize| WholeSurvey {
        instance: Default::default(),
        table: Default::default(),
        records: Vec::new(),
        unread: (from..to)
            .map(|n| VmName::new(format!("v{n}")).unwrap())
            .collect(),
    };
    state.bring_whole(&host("a"), &whole(0, 9000)).unwrap();
    state.bring_whole(&host("a"), &whole(0, 9000)).unwrap();
    state
        .bring_whole(&host("a"), &whole(9000, 18_000))
        .unwrap_err();
}

/// The VM was deleted and created anew after the database was copied: the controller would describe it with the deleted
/// one's user id and refuse its every move.
#[test]
fn an_old_copy_of_the_database_takes_the_user_id_that_the_holders_guest_has() {
    let uid = *UIDS.start();
    let described = |uid: Option<u32>| VmSpec { uid, ..spec() };
    let heard = |old: Option<u32>, told: u32, is_old_copy: bool| {
        let mut state = state();
        let entry = VmEntry {
            spec: described(old),
            resolved: old.map(|uid| described(Some(uid))),
        };
        state.vms.insert(web(), entry.clone());
        let other = VmEntry {
            spec: VmSpec {
                name: VmName::new("db").unwrap(),
                ..described(Some(uid + 9))
            },
            resolved: None,
        };
        state.vms.insert(other.spec.name.clone(), other);
        let mut info = unheard_info(&host("a"), "192.0.2.1:1".parse().unwrap());
        if is_old_copy {
            info.site.stamp.number += 7;
        }
        let mut vms = says(VmState::Running, 4, holds(4));
        vms[0].spec.uid = Some(told);
        let ticket = state.book.ask();
        state.observe(&host("a"), ticket, &info, vms);
        assert_eq!(
            (state.book.is_restored(), state.has_seen(&host("a"))),
            (is_old_copy, is_old_copy)
        );
        let entry = state.vms[&web()].clone();
        let is_kept = state.relearned.due.contains(&web());
        (
            entry.spec.uid,
            entry.resolved.and_then(|spec| spec.uid),
            is_kept,
        )
    };
    let new = Some(uid + 1);
    assert_eq!(heard(Some(uid), uid + 1, true), (new, new, true));
    // One that was copied before its first start.
    assert_eq!(heard(None, uid + 1, true), (new, new, true));
    // Nobody's word but the controller's own counts while its database is no old copy; never another VM's id, or root's.
    let old = Some(uid);
    assert_eq!(heard(Some(uid), uid + 1, false), (old, old, false));
    assert_eq!(heard(Some(uid), uid + 9, true), (old, old, false));
    let (described, _, is_kept) = heard(Some(uid), 0, true);
    assert_eq!((described, is_kept), (old, false));
}

/// Two hosts hold records of one name: one of the VM that was deleted while that host was off, one of the VM that was
/// created anew. The old copy of the database knows neither.
#[test]
fn a_vm_that_an_old_copy_lacks_is_described_by_its_newest_holder_whoever_is_heard_first() {
    for order in [["a", "b"], ["b", "a"]] {
        let mut state = state();
        state.vms.clear();
        for name in order {
            let (generation, kernel) = match name {
                "a" => (3, "/deleted"),
                _ => (9, "/new"),
            };
            let mut info = unheard_info(&host(name), "192.0.2.1:1".parse().unwrap());
            info.site.stamp.number += 7;
            let mut vms = says(VmState::Stopped, generation, holds(generation));
            vms[0].spec.kernel = kernel.into();
            let ticket = state.book.ask();
            state.observe(&host(name), ticket, &info, vms);
        }
        let entry = state.vms[&web()].clone();
        assert_eq!(entry.spec.kernel, "/new", "{order:?}");
        assert_eq!(entry.resolved.as_ref(), Some(&entry.spec));
        // Nothing of it is written before every host was read: a restart would believe the half of it.
        assert_eq!(state.due_descriptions(), []);
        let takeover = state.book.takeover().unwrap();
        for name in order {
            let ticket = state.book.ask();
            let whole = WholeSurvey {
                instance: Default::default(),
                table: SiteTable {
                    stamp: takeover.stamp,
                    ..SiteTable::default()
                },
                records: Vec::new(),
                unread: BTreeSet::new(),
            };
            state
                .book
                .take_whole(&host(name), takeover.stamp, ticket, whole);
        }
        assert_eq!(state.due_descriptions(), std::slice::from_ref(&entry));
        assert_eq!(state.due_descriptions(), []);
        state.still_due(std::slice::from_ref(&entry));
        assert_eq!(state.due_descriptions(), [entry]);
    }
}

/// The VM was stopped and started since the database was copied, on a host that gives it another CPU model.
#[test]
fn an_old_copy_of_the_database_takes_what_a_description_leaves_open_from_the_holder() {
    let mut state = state();
    let auto = VmSpec {
        cpu: "auto".into(),
        ..spec()
    };
    let on = |cpu: &str| VmSpec {
        cpu: cpu.into(),
        ..spec()
    };
    let [old, new] = ["Skylake-Server", "EPYC"];
    let entry = VmEntry {
        spec: auto.clone(),
        resolved: Some(on(old)),
    };
    state.vms.insert(web(), entry);
    let mut info = unheard_info(&host("a"), "192.0.2.1:1".parse().unwrap());
    info.site.stamp.number += 7;
    let mut vms = says(VmState::Running, 4, holds(4));
    vms[0].spec = VmSpec {
        accelerator: Accelerator::Tcg,
        ..on(new)
    };
    let ticket = state.book.ask();
    state.observe(&host("a"), ticket, &info, vms);
    let entry = &state.vms[&web()];
    assert_eq!((&entry.spec, &entry.resolved), (&auto, &Some(on(new))));
}

/// The holder answers a survey in words that are understood, and the VM was shown as unreachable, without a reason.
#[test]
fn a_vm_that_its_holder_tells_of_in_words_unknown_here_is_shown_with_why() {
    let mut state = state();
    hear(&mut state, "a", says(VmState::Running, 3, holds(3)));
    let mut info = unheard_info(&host("a"), "192.0.2.1:1".parse().unwrap());
    info.unread.insert(web(), "newer words".into());
    state.hosts.get_mut(&host("a")).unwrap().info = Some(info.clone());
    let ticket = state.book.ask();
    state.observe(&host("a"), ticket, &info, Vec::new());
    let damaged = |state: &State| {
        let view = state.vm_view(&web(), 0).unwrap();
        assert_eq!(view.state, VmState::DamagedRecord);
        assert_eq!(view.host, Some(host("a")));
        assert!(view.note.unwrap().contains("newer words"));
    };
    damaged(&state);
    let survey = state.book.begin_survey(&web(), &[]).unwrap();
    let answer = SurveyAnswer {
        highest: Generation(3),
        claim: holds(3),
        may_live: true,
        instance: info.instance,
        knows: info.site,
        images: Vec::new(),
    };
    let answers = BTreeMap::from([(host("a"), answer)]);
    state.book.take_survey(&survey, &answers);
    damaged(&state);
}

/// All hosts are shown by one look at all VMs, and each host as it is shown alone.
#[test]
fn hosts_that_are_shown_together_are_shown_as_each_alone() {
    let mut state = state();
    hear(&mut state, "a", says(VmState::Running, 3, holds(3)));
    hear(&mut state, "b", vec![]);
    let alone = ["a", "b"].map(|name| state.host_view(&host(name), 7).unwrap());
    assert_eq!(alone[0].vms, [web()]);
    assert_eq!(state.host_views(7), alone);
}
