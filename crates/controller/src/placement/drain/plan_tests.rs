//! Properties of the plan, over many houses: no host is overfilled, no more at once than allowed, and it always ends.

use super::*;
use proptest::prelude::*;

fn host(index: usize) -> HostName {
    HostName::new(format!("h{index}")).unwrap()
}

fn waiting(index: usize, memory_mib: u64, estimate_s: Option<f64>, may: &[usize]) -> Waiting {
    Waiting {
        name: VmName::new(format!("v{index:02}")).unwrap(),
        memory_mib,
        estimate_s,
        writes_share: 0.0,
        may_go_to: may.iter().map(|index| host(*index)).collect(),
    }
}

fn rooms(free: &[u64]) -> Rooms {
    let rooms = free.iter().enumerate();
    rooms.map(|(index, free)| (host(index), *free)).collect()
}

fn begun(vm: &Waiting, to: &HostName) -> Moving {
    Moving {
        to: to.clone(),
        memory_mib: vm.memory_mib,
        writes_share: vm.writes_share,
    }
}

#[test]
fn the_quickest_goes_first() {
    let vms = [
        waiting(0, 100, Some(9.0), &[0]),
        waiting(1, 100, Some(2.0), &[0]),
        waiting(2, 10, None, &[0]),
    ];
    let next = next(&vms, &[], &rooms(&[1000]), 2).unwrap();
    assert_eq!(next.0, vms[1].name);
}

#[test]
fn a_small_one_does_not_take_the_room_of_a_big_one() {
    let vms = [
        waiting(0, 1000, Some(60.0), &[0]),
        waiting(1, 200, Some(1.0), &[0, 1]),
    ];
    // Host 0 has most room, but only the big one's.
    let next = next(&vms, &[], &rooms(&[1100, 300]), 2).unwrap();
    assert_eq!(next, (vms[1].name.clone(), host(1)));
}

#[test]
fn two_do_not_compete_for_the_same_room() {
    let vms = [waiting(0, 600, None, &[0]), waiting(1, 600, None, &[0])];
    let all = rooms(&[1000]);
    let (first, to) = next(&vms, &[], &all, 4).unwrap();
    let under_way = [begun(&vms[0], &to)];
    assert_eq!(first, vms[0].name);
    assert_eq!(next(&vms[1..], &under_way, &all, 4), None);
}

#[test]
fn a_busy_writer_moves_alone() {
    let mut busy = waiting(0, 100, Some(1.0), &[0]);
    busy.writes_share = 0.4;
    let calm = waiting(1, 100, Some(2.0), &[0]);
    let all = rooms(&[1000]);
    let vms = [busy.clone(), calm.clone()];
    assert_eq!(next(&vms, &[], &all, 2).unwrap().0, busy.name);
    // Nobody beside it, and it beside nobody.
    let under_way = |vm: &Waiting| [begun(vm, &host(0))];
    assert_eq!(next(&vms[1..], &under_way(&busy), &all, 2), None);
    assert_eq!(next(&vms[..1], &under_way(&calm), &all, 2), None);
    let calmer = waiting(2, 100, Some(9.0), &[0]);
    let next = next(&[busy, calmer.clone()], &under_way(&calm), &all, 2);
    assert_eq!(next.unwrap().0, calmer.name);
}

#[test]
fn what_was_asked_is_bounded_and_said() {
    assert_eq!(describe(None, 9, 2).0, AT_ONCE);
    assert_eq!(describe(Some(1), 9, 2).0, 1);
    assert_eq!(describe(Some(0), 9, 2).0, 1);
    assert_eq!(describe(Some(99), 99, 2).0, AT_ONCE_MAX);
    assert_eq!(describe(None, 1, 2).0, 1);
    assert!(
        describe(Some(3), 9, 2)
            .1
            .contains("at most 3 at once, as asked")
    );
}

fn a_vm() -> impl Strategy<Value = (u64, Option<f64>, f64, Vec<usize>)> {
    (
        1_u64..5_000,
        proptest::option::of(0.1_f64..1_000.0),
        0.0_f64..1.0,
        proptest::collection::vec(0_usize..4, 0..4),
    )
}

proptest! {
    #[test]
    fn a_drain_ends_and_overfills_nobody(
        vms in proptest::collection::vec(a_vm(), 0..12),
        free in proptest::collection::vec(0_u64..10_000, 1..4),
        at_once in 0_u32..6,
        order_of_ends in proptest::collection::vec(0_usize..16, 64),
    ) {
        let mut left: Vec<Waiting> = vms
            .into_iter()
            .enumerate()
            .map(|(index, (memory_mib, estimate_s, writes_share, may))| Waiting {
                writes_share,
                ..waiting(index, memory_mib, estimate_s, &may)
            })
            .collect();
        let mut free = rooms(&free);
        let mut moving: Vec<Moving> = Vec::new();
        for end in order_of_ends {
            while let Some((name, to)) = next(&left, &moving, &free, at_once) {
                let index = left.iter().position(|vm| vm.name == name).unwrap();
                let vm = left.remove(index);
                prop_assert!(vm.may_go_to.contains(&to));
                moving.push(begun(&vm, &to));
                prop_assert!(moving.len() <= at_once.max(1) as usize);
                for (host, room) in &free {
                    let sent: u64 = moving.iter().filter(|vm| vm.to == *host).map(|vm| vm.memory_mib).sum();
                    prop_assert!(sent <= *room);
                }
            }
            if moving.is_empty() {
                break;
            }
            let done = moving.remove(end % moving.len());
            *free.get_mut(&done.to).unwrap() -= done.memory_mib;
        }
        prop_assert!(moving.is_empty(), "it did not end");
        // What is left fits nowhere.
        for vm in &left {
            let fits = |host: &HostName| free.get(host).is_some_and(|room| *room >= vm.memory_mib);
            prop_assert!(!vm.may_go_to.iter().any(fits), "{vm:?} in {free:?}");
        }
    }
}
