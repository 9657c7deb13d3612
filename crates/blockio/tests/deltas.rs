//! Deltas on real files beside a plain image: a guest reads from a chain what it would read from one image, whatever was frozen or merged between, and
//! QEMU reads the same.

mod common;

use common::chain::{BOOT, BYTES, Chain, freeze, opening};
use common::deltas::{open_parent, open_unlocked};
use common::{guest, request, run};
use godwit_blockio::delta::{
    AT_ONCE_MAX, Delta, Merged, NewDelta, Outliving, Target, create, describe_over, merge,
};
use godwit_blockio::{Access, Buffer, Data, Engine, Image, Outcome, Stack, Work};
use godwit_delta::Id;
use godwit_guestmem::{DeviceReadable, DeviceWritable};
use std::fs;
use std::os::fd::AsFd as _;
use vm_memory::{Bytes as _, GuestAddress};

fn merge_down(
    delta: &Delta,
    into: &Image,
    goes_on: impl FnMut(Merged) -> Option<usize>,
) -> Result<Option<Merged>, godwit_blockio::Error> {
    merge(
        delta,
        Target::Raw(into.as_fd(), into.bytes()),
        false,
        goes_on,
    )
}

#[test]
fn a_chain_of_three_is_read_as_one_image_by_us_and_by_qemu_and_merged_into_its_base() {
    for bytes in [BYTES, 16 << 20, (17 << 20) + 4096] {
        let mut chain = Chain::new(bytes);
        for number in 0..3 {
            chain.add();
            let mut stack = chain.stack();
            chain.work(&mut stack, 150, number);
            chain.must_be_plain(&mut stack);
            drop(freeze(&mut stack));
            drop(stack);
            chain.must_be_so_to_qemu(number as usize);
        }
        for number in 0..3 {
            let open = || open_parent(&chain.names[number], opening("this")).unwrap();
            let into = chain.base(Access::ReadWrite);
            let mut pieces = 0;
            let half = merge_down(&open(), &into, |_| {
                pieces += 1;
                (pieces < 20).then_some(pieces)
            });
            assert_eq!(half.unwrap(), None, "it was to end early");
            let whole = merge_down(&open(), &into, |_| Some(AT_ONCE_MAX))
                .unwrap()
                .unwrap();
            assert!(whole.copied > 0 && whole.zeroed > 0);
        }
        assert!(fs::read(chain.at("base.raw")).unwrap() == chain.plain);
    }
}

#[test]
fn a_delta_is_frozen_and_another_put_above_it_beside_a_guest_that_goes_on() {
    let mut chain = Chain::new(BYTES);
    chain.add();
    let mut stack = chain.stack();
    for number in 0..3 {
        chain.work(&mut stack, 60, number);
        let mut deltas = freeze(&mut stack);
        chain.add();
        deltas.push(chain.open_top(BOOT, false).unwrap());
        stack.put_deltas(deltas).unwrap();
        chain.must_be_plain(&mut stack);
    }
    // The lowest is brought into the base, beside the guest, and left out.
    drop(stack);
    let lowest = open_parent(&chain.names[0], opening("this")).unwrap();
    let engine = Engine::new(chain.base(Access::ReadWrite)).unwrap();
    let mut stack = Stack::new(Vec::new(), engine);
    let mut deltas = vec![lowest];
    deltas.extend(
        chain.names[1..3]
            .iter()
            .map(|one| open_parent(one, opening("this")).unwrap()),
    );
    deltas.push(chain.open_top(BOOT, false).unwrap());
    stack.put_deltas(deltas).unwrap();
    let source = open_parent(&chain.names[0], opening("other")).unwrap();
    let lent = stack.bottom.lend().unwrap();
    let base = Image::of(lent.into(), &chain.at("base.raw"), Access::ReadWrite, 512).unwrap();
    let mut seed = 10;
    let done = merge_down(&source, &base, |_| {
        seed += 1;
        chain.work(&mut stack, 1, seed);
        Some(4)
    });
    assert!(done.unwrap().is_some());
    let mut deltas = stack.take_deltas().unwrap();
    deltas.remove(0);
    stack.put_deltas(deltas).unwrap();
    chain.work(&mut stack, 20, 1000);
    chain.must_be_plain(&mut stack);
}

#[test]
fn a_top_comes_down_into_the_delta_below_which_is_the_top_from_then_on() {
    let mut chain = Chain::new(BYTES);
    chain.add();
    let mut stack = chain.stack();
    chain.work(&mut stack, 40, 1);
    let mut deltas = freeze(&mut stack);
    chain.add();
    deltas.push(chain.open_top(BOOT, false).unwrap());
    stack.put_deltas(deltas).unwrap();
    chain.work(&mut stack, 40, 2);
    let mut below = open_unlocked(&chain.names[0]).unwrap();
    let flushed = run(&mut stack, vec![request(Work::Flush, Data::None)]);
    assert_eq!(flushed[0].1, Outcome::Done);
    let top = open_unlocked(&chain.names[1]).unwrap();
    let merged = merge(&top, Target::Delta(&mut below), false, |_| {
        Some(AT_ONCE_MAX)
    });
    assert!(merged.unwrap().is_some());
    let map = chain.names[0].with_extension("states");
    let outliving = Outliving {
        map: &map,
        boot: BOOT,
        no_guest_lives: true,
    };
    let frozen = open_unlocked(&chain.names[0]).unwrap();
    let refused = frozen.into_top(opening("this"), outliving).unwrap_err();
    assert!(refused.to_string().contains("it is frozen"), "{refused}");
    below.thaw().unwrap();
    drop(stack.take_deltas().unwrap());
    let below = below.into_top(opening("this"), outliving).unwrap();
    stack.put_deltas(vec![below]).unwrap();
    chain.work(&mut stack, 40, 3);
    chain.must_be_plain(&mut stack);
    // As after a kill.
    drop(stack);
    chain.names.pop();
    chain.must_be_plain(&mut chain.stack());
}

#[test]
fn an_open_delta_goes_by_what_another_one_of_it_has_got() {
    let mut chain = Chain::new(BYTES);
    chain.add();
    let mut stack = chain.stack();
    for number in 0..2 {
        chain.work(&mut stack, 40, number);
        let mut deltas = freeze(&mut stack);
        chain.add();
        deltas.push(chain.open_top(BOOT, false).unwrap());
        stack.put_deltas(deltas).unwrap();
    }
    let lowest = open_unlocked(&chain.names[0]).unwrap();
    let mut above = open_unlocked(&chain.names[1]).unwrap();
    let merged = merge(&lowest, Target::Delta(&mut above), true, |_| Some(4));
    assert!(merged.unwrap().is_some());
    let mut deltas = stack.take_deltas().unwrap();
    deltas
        .remove(0)
        .go_by(open_unlocked(&chain.names[1]).unwrap());
    deltas[0].go_by(above);
    stack.put_deltas(deltas).unwrap();
    chain.must_be_plain(&mut stack);
    chain.work(&mut stack, 20, 7);
    chain.must_be_plain(&mut stack);
}

#[test]
fn a_guests_own_buffers_are_read_in_pieces_and_written_in_part() {
    let mut chain = Chain::new(BYTES);
    chain.add();
    let mut stack = chain.stack();
    let (ram, memory) = guest();
    for (start, len, at) in [
        (1024u64, 512usize, 4096u64),
        (8192, 4096, 8192),
        (20 << 10, 9216, 65536),
        (BYTES - 512, 512, 512),
    ] {
        memory
            .write_slice(&vec![0xee; len], GuestAddress(at))
            .unwrap();
        let mut from = DeviceReadable::new(&ram);
        from.push(&memory, at, len).unwrap();
        let range = start..start + len as u64;
        chain.plain[start as usize..range.end as usize].fill(0xee);
        let done = run(
            &mut stack,
            vec![request(Work::Write(range), Data::FromGuest(from))],
        );
        assert_eq!(done[0].1, Outcome::Done);
    }
    let zeroes = Work::WriteZeroes {
        range: 2048..16384,
        unmap: false,
    };
    chain.plain[2048..16384].fill(0);
    assert_eq!(
        run(&mut stack, vec![request(zeroes, Data::None)])[0].1,
        Outcome::Done
    );
    let mut to = DeviceWritable::new(&ram);
    // Buffers that direct IO takes, and some that it does not.
    for (at, len) in [
        (1_000_448u64, 512usize),
        (1_100_001, 60_000),
        (1_200_003, 5024),
    ] {
        to.push(&memory, at, len).unwrap();
    }
    let done = run(
        &mut stack,
        vec![request(Work::Read(0..65_536), Data::ToGuest(to))],
    );
    assert_eq!(done[0].1, Outcome::Done);
    let mut seen = Vec::new();
    for (at, len) in [
        (1_000_448u64, 512usize),
        (1_100_001, 60_000),
        (1_200_003, 5024),
    ] {
        let mut part = vec![0; len];
        memory.read_slice(&mut part, GuestAddress(at)).unwrap();
        seen.extend(part);
    }
    assert!(seen == chain.plain[..65_536]);
    chain.must_be_plain(&mut stack);
}

#[test]
fn what_is_outside_of_the_disk_is_refused() {
    let mut chain = Chain::new(BYTES);
    chain.add();
    let mut stack = chain.stack();
    let wrong = [
        Work::Read(BYTES - 512..BYTES + 512),
        Work::Read(0..0),
        Work::Discard(BYTES..BYTES + 512),
    ];
    for work in wrong {
        let len = work.transfers() as usize;
        let done = run(
            &mut stack,
            vec![request(work, Data::Own(Buffer::zeroed(len)))],
        );
        assert!(matches!(done[0].1, Outcome::Failed(_)));
    }
}

#[test]
fn a_delta_that_cannot_be_made_to_its_end_leaves_no_file() {
    let chain = Chain::new(BYTES);
    let parent = chain.parent.clone();
    let files = || {
        let names = fs::read_dir(chain.at("base.raw").parent().unwrap()).unwrap();
        let mut names: Vec<_> = names.map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    };
    let new = NewDelta {
        descriptor: &chain.at("one.vmdk"),
        bytes: BYTES,
        id: Id([1; 16]),
        parent: &parent,
    };
    // Each name of it is somebody else's in turn.
    for taken in ["one.vmdk", "one-sesparse.vmdk"] {
        fs::write(chain.at(taken), "theirs").unwrap();
        let before = files();
        assert!(create(&new).is_err(), "{taken}");
        assert_eq!(files(), before);
        assert_eq!(fs::read(chain.at(taken)).unwrap(), b"theirs");
        fs::remove_file(chain.at(taken)).unwrap();
    }
    create(&new).unwrap();
    // What stands in the way of another text is a directory.
    let unfinished = chain.at("one.vmdk.new");
    fs::create_dir(&unfinished).unwrap();
    assert!(describe_over(new.descriptor, &parent).is_err());
    fs::remove_dir(unfinished).unwrap();
    describe_over(new.descriptor, &parent).unwrap();
}
