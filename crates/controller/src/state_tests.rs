//! Tests of the inventory: who wins when hosts say different things.

use super::*;

fn host(name: &str) -> HostName {
    HostName::new(name).unwrap()
}

fn web() -> VmName {
    VmName::new("web").unwrap()
}

fn spec() -> VmSpec {
    VmSpec::from_toml("name = \"web\"\nvcpus = 1\nmemory_mib = 64\nkernel = \"/k\"").unwrap()
}

fn says(state: VmState, generation: u64, holds: bool) -> Vec<HostVm> {
    vec![HostVm {
        spec: spec(),
        state,
        generation: Generation(generation),
        claim: match holds {
            true => godwit_types::site::Claim::Holds {
                generation: Generation(generation),
                on: true,
            },
            false => godwit_types::site::Claim::No,
        },
        migration: None,
        accelerator: Some(Accelerator::Tcg),
        vm_process_pid: None,
        qemu_pid: None,
        note: None,
    }]
}

/// Hosts a and b, connected, and VM web on record at a.
fn state() -> State {
    let mut state = State::default();
    for name in ["a", "b"] {
        let mut entry = HostEntry::new("192.0.2.1:1".parse().unwrap(), "1".into());
        entry.state = HostState::Connected;
        entry.heard = true;
        state.hosts.insert(host(name), entry);
    }
    let entry = VmEntry {
        spec: spec(),
        resolved: None,
        host: Some(host("a")),
    };
    state.vms.insert(web(), entry);
    state
}

fn cut(state: &mut State, name: &str) {
    state.hosts.get_mut(&host(name)).unwrap().state = HostState::Unreachable;
}

fn place_and_state(state: &State) -> (Option<String>, VmState) {
    let place = state.place(&web()).map(|place| place.host.to_string());
    (place, state.vm_state(&web()))
}

#[test]
fn the_highest_held_generation_wins() {
    let mut state = state();
    state.observe(&host("a"), says(VmState::Running, 3, true));
    assert_eq!(
        place_and_state(&state),
        (Some("a".into()), VmState::Running)
    );
    let changes = state.observe(&host("b"), says(VmState::Running, 4, true));
    assert!(changes.contains(&Change::Generation(web(), Generation(4))));
    assert!(changes.contains(&Change::Moved(web(), host("b"))));
    assert_eq!(
        place_and_state(&state),
        (Some("b".into()), VmState::Running)
    );
    // What a said before it was cut off does not come back.
    let changes = state.observe(&host("a"), says(VmState::Running, 3, true));
    assert!(!changes.contains(&Change::Moved(web(), host("a"))));
    assert_eq!(place_and_state(&state).0, Some("b".into()));
}

#[test]
fn a_host_that_answers_and_knows_nothing_holds_nothing() {
    let mut state = state();
    assert_eq!(place_and_state(&state), (None, VmState::Stopped));
    cut(&mut state, "a");
    assert_eq!(
        place_and_state(&state),
        (Some("a".into()), VmState::Unreachable)
    );
}

#[test]
fn an_incoming_copy_does_not_hide_the_running_one() {
    let mut state = state();
    state.observe(&host("a"), says(VmState::Running, 3, true));
    state.observe(&host("b"), says(VmState::Incoming, 3, false));
    assert_eq!(
        place_and_state(&state),
        (Some("a".into()), VmState::Running)
    );
}

#[test]
fn doubt_is_shown_until_somebody_holds_more() {
    let mut state = state();
    state.observe(&host("a"), says(VmState::Running, 3, true));
    state.observe(&host("a"), says(VmState::InDoubt, 4, false));
    cut(&mut state, "b");
    assert_eq!(
        place_and_state(&state),
        (Some("a".into()), VmState::InDoubt)
    );
    state.observe(&host("b"), says(VmState::Running, 4, true));
    state.hosts.get_mut(&host("b")).unwrap().state = HostState::Connected;
    assert_eq!(
        place_and_state(&state),
        (Some("b".into()), VmState::Running)
    );
}

#[test]
fn a_destination_in_doubt_is_shown_when_the_source_is_gone() {
    let mut state = state();
    state.observe(&host("a"), says(VmState::Running, 3, true));
    state.observe(&host("b"), says(VmState::InDoubt, 3, false));
    assert_eq!(
        place_and_state(&state),
        (Some("a".into()), VmState::Running)
    );
    cut(&mut state, "a");
    assert_eq!(
        place_and_state(&state),
        (Some("b".into()), VmState::InDoubt)
    );
    let note = state.vm_view(&web()).unwrap().note.unwrap();
    assert!(
        note.contains("godwit vm resolve web --run-on b --confirm-fenced a"),
        "{note}"
    );
}

#[test]
fn an_unknown_vm_that_is_held_is_adopted() {
    let mut state = state();
    state.vms.clear();
    state.observe(&host("a"), says(VmState::Stopped, 7, false));
    assert!(state.vms.is_empty());
    let changes = state.observe(&host("b"), says(VmState::Running, 7, true));
    assert!(
        changes
            .iter()
            .any(|change| matches!(change, Change::Adopted(_)))
    );
    assert_eq!(state.ledger.next(&web()), Some(Generation(8)));
}

#[test]
fn lists_begin_with_what_is_in_doubt() {
    let mut state = state();
    let early = VmName::new("aaa").unwrap();
    let mut other = spec();
    other.name = early.clone();
    let entry = VmEntry {
        spec: other,
        resolved: None,
        host: None,
    };
    state.vms.insert(early, entry);
    assert_eq!(state.vm_views()[0].spec.name.as_str(), "aaa");
    state.observe(&host("a"), says(VmState::InDoubt, 3, false));
    assert_eq!(state.vm_views()[0].spec.name, web());
}
