//! Who opens a delta, as what, and what of it counts then: after a kill, without its map, beside others, and where somebody else has written it.

mod common;

use common::chain::{BOOT, BYTES, Chain, freeze, opening};
use common::deltas::open_parent;
use common::{request, run};
use godwit_blockio::delta::{NewDelta, create, is_empty, is_frozen};
use godwit_blockio::{Access, Data, Engine, Error, Image, Outcome, Stack, Work};
use godwit_delta::{Id, Layout, Parent, header};
use std::fs;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::Path;
use std::time::Duration;

#[test]
fn what_was_answered_is_there_after_a_kill_and_what_no_map_tells_of_is_not_guessed() {
    let mut chain = Chain::new(BYTES);
    chain.add();
    for number in 0..4 {
        let mut stack = chain.stack();
        chain.work(&mut stack, 40, number);
        // As after a kill: nobody closes anything.
        drop(stack);
    }
    chain.must_be_plain(&mut chain.stack());
    let map = chain.names[0].with_extension("states");
    let kept = fs::read(&map).unwrap();
    fs::remove_file(&map).unwrap();
    let refused = chain.open_top(BOOT, false).unwrap_err().to_string();
    assert!(
        refused.contains("end what still runs on it first"),
        "{refused}"
    );
    // A map of another delta, or of another boot, is as none.
    for at in [8, 24, 40] {
        let mut other = kept.clone();
        other[at] ^= 1;
        fs::write(&map, &other).unwrap();
        assert!(chain.open_top(BOOT, false).is_err(), "byte {at}");
    }
    fs::write(&map, &kept).unwrap();
    let mut stack = chain.stack();
    chain.must_be_plain(&mut stack);
    let done = run(&mut stack, vec![request(Work::Flush, Data::None)]);
    assert_eq!(done[0].1, Outcome::Done);
    drop(stack);
    // Everything was flushed: after another boot, or by a person's word, the tables say all.
    fs::remove_file(&map).unwrap();
    chain.open_top(Id([1; 16]), false).unwrap();
    drop(chain.open_top(Id([1; 16]), true).unwrap());
    let engine = Engine::new(chain.base(Access::ReadOnly)).unwrap();
    let mut stack = Stack::new(Vec::new(), engine);
    let top = chain.open_top(Id([1; 16]), false).unwrap();
    stack.put_deltas(vec![top]).unwrap();
    chain.must_be_plain(&mut stack);
}

#[test]
fn a_delta_of_a_larger_disk_is_empty_where_its_file_is_and_its_tables_are_not_read() {
    let directory = tempfile::tempdir_in("/var/tmp").unwrap();
    let descriptor = directory.path().join("root.raw.d1.vmdk");
    let parent = Parent {
        cid: 7,
        hint: "root.raw.vmdk".to_owned(),
    };
    let new = NewDelta {
        descriptor: &descriptor,
        bytes: BYTES,
        id: Id([7; 16]),
        parent: &parent,
    };
    create(&new).unwrap();
    let extent = directory.path().join("root.raw.d1-sesparse.vmdk");
    let is_empty = |bytes_max| {
        let file = fs::File::options().read(true).write(true).open(&extent);
        is_empty((file.unwrap(), &extent), bytes_max, 512).unwrap()
    };
    assert!(is_empty(BYTES) && is_empty(2 * BYTES) && is_empty(0));
    // A table whose entries say nothing.
    let tables = Layout::of(BYTES).unwrap().tables();
    let file = fs::File::options().write(true).open(&extent).unwrap();
    file.write_all_at(&[0; 512], tables.start).unwrap();
    assert!(is_empty(BYTES) && is_empty(2 * BYTES));
    assert!(!is_empty(BYTES / 2) && !is_empty(0));
}

#[test]
fn a_map_of_an_earlier_process_is_not_taken_for_the_one_of_a_later_one() {
    let mut chain = Chain::new(BYTES);
    chain.add();
    let mut stack = chain.stack();
    chain.work(&mut stack, 40, 1);
    let map = chain.names[0].with_extension("states");
    let first = fs::read(&map).unwrap();
    // As after a kill, and with a new run directory: what was flushed counts for a new guest.
    let done = run(&mut stack, vec![request(Work::Flush, Data::None)]);
    assert_eq!(done[0].1, Outcome::Done);
    drop(stack);
    fs::remove_file(&map).unwrap();
    drop(chain.open_top(BOOT, true).unwrap());
    let mut stack = chain.stack();
    chain.work(&mut stack, 40, 2);
    drop(stack);
    let second = fs::read(&map).unwrap();
    fs::write(&map, &first).unwrap();
    let refused = chain.open_top(BOOT, false).unwrap_err().to_string();
    assert!(refused.contains("of an earlier process"), "{refused}");
    fs::write(&map, &second).unwrap();
    chain.must_be_plain(&mut chain.stack());
}

#[test]
fn a_map_of_a_build_that_knows_of_no_numbers_counts_and_gets_one() {
    let mut chain = Chain::new(BYTES);
    chain.add();
    let mut stack = chain.stack();
    chain.work(&mut stack, 40, 1);
    drop(stack);
    let map = chain.names[0].with_extension("states");
    let number = || fs::read(&map).unwrap()[48..56].to_vec();
    let mut older = fs::read(&map).unwrap();
    older[48..56].fill(0);
    fs::write(&map, &older).unwrap();
    chain.must_be_plain(&mut chain.stack());
    assert_ne!(number(), [0; 8]);
    // What such a build left of the delta says none either.
    let extent = chain.at("d0-sesparse.vmdk");
    let mut content = fs::read(&extent).unwrap();
    content[4608..5120].fill(0);
    fs::write(&extent, &content).unwrap();
    chain.must_be_plain(&mut chain.stack());
}

#[test]
fn a_map_that_somebody_removed_is_there_again_before_another_program_looks_for_it() {
    let mut chain = Chain::new(BYTES);
    chain.add();
    let mut stack = chain.stack();
    chain.work(&mut stack, 40, 1);
    let map = chain.names[0].with_extension("states");
    fs::remove_file(&map).unwrap();
    stack.keep_maps().unwrap();
    let number = || fs::metadata(&map).unwrap().ino();
    let kept = number();
    chain.work(&mut stack, 40, 2);
    stack.keep_maps().unwrap();
    assert_eq!(number(), kept, "it was there");
    drop(stack);
    chain.must_be_plain(&mut chain.stack());
}

#[test]
fn many_share_a_parent_that_nobody_writes_and_a_top_is_one_disks_alone() {
    let mut chain = Chain::new(BYTES);
    chain.add();
    let top = chain.open_top(BOOT, false).unwrap();
    assert!(matches!(
        chain.open_top_within(BOOT, false, Duration::ZERO),
        Err(Error::InUse { .. })
    ));
    top.close().unwrap();
    let parent = |name| open_parent(&chain.names[0], opening(name)).unwrap();
    let both = (parent("a"), parent("b"));
    assert!(matches!(
        chain.open_top_within(BOOT, false, Duration::ZERO),
        Err(Error::InUse { .. })
    ));
    drop(both);
    let mut top = chain.open_top(BOOT, false).unwrap();
    top.freeze().unwrap();
    let both = (parent("a"), parent("b"));
    drop((top, both));
    let refused = chain.open_top(BOOT, false).unwrap_err().to_string();
    assert!(refused.contains("it is frozen"), "{refused}");
}

#[test]
fn what_anybody_else_wrote_is_refused() {
    let mut chain = Chain::new(BYTES);
    chain.add();
    chain.open_top(BOOT, false).unwrap().close().unwrap();
    let extent = chain.at("d0-sesparse.vmdk");
    let good = fs::read(&extent).unwrap();
    let tables = 3 << 20;
    // The header, the label, the directory and an entry.
    for (at, byte) in [
        (40, 1u8),
        (4100, 1),
        (2 << 20, 9),
        (tables + 7, 0x30),
        (tables, 1),
    ] {
        let mut wrong = good.clone();
        wrong[at] ^= byte;
        // Present at its own place is right only for the first grain.
        let is_right = (at, byte) == (tables + 7, 0x30);
        fs::write(&extent, &wrong).unwrap();
        let opened = open_parent(&chain.names[0], opening("this"));
        assert_eq!(opened.is_ok(), is_right, "byte {at}");
    }
    // What it says of its length is compared before anything is made room for by it.
    let file = fs::File::open(&extent).unwrap();
    let of_another = (Id([0; 16]), BYTES + 4096);
    let refused = is_frozen((file, &extent), of_another, 512).unwrap_err();
    assert!(refused.to_string().contains("another delta"), "{refused}");
    let id = header::decode(&good).unwrap().1.id;
    for (bytes, fits) in [(BYTES, true), (BYTES + 4096, false)] {
        // Its directory is damaged: nobody gets as far as that.
        let mut wrong = good.clone();
        wrong[2 << 20] ^= u8::from(!fits);
        fs::write(&extent, &wrong).unwrap();
        let file = fs::File::open(&extent).unwrap();
        let looked = is_frozen((file, &extent), (id, bytes), 512);
        let why = looked.map_err(|error| error.to_string()).err();
        let is_of_length = why.as_ref().map(|why| why.contains("another length"));
        assert_eq!(is_of_length, (!fits).then_some(true), "{why:?}");
    }
    fs::write(&extent, &good[..good.len() - 4096]).unwrap();
    let cut = open_parent(&chain.names[0], opening("this")).unwrap_err();
    assert!(cut.to_string().contains("cut short"), "{cut}");
    fs::write(&extent, &good).unwrap();
    let taken = NewDelta {
        descriptor: &chain.names[0],
        bytes: BYTES,
        id: Id([9; 16]),
        parent: &chain.parent,
    };
    assert!(create(&taken).is_err(), "its name is taken");
    must_be_unchanged(&extent, &good);
}

fn must_be_unchanged(path: &Path, content: &[u8]) {
    assert!(fs::read(path).unwrap() == content);
}

/// The disk's own file bears locks and records alone.
#[test]
fn a_linked_disk_begins_as_an_image_that_it_never_writes() {
    let mut chain = Chain::new(BYTES);
    chain.add();
    let (own, base) = (chain.at("own.raw"), chain.plain.clone());
    fs::File::create(&own).unwrap().set_len(BYTES).unwrap();
    let top = |chain: &Chain| chain.open_top(BOOT, false).unwrap();
    let written = top(&chain).over(chain.base(Access::ReadWrite));
    assert!(written.is_err(), "it may be written");
    let image = Image::open(&own, Access::ReadWrite, 512).unwrap();
    let mut stack = Stack::new(Vec::new(), Engine::new(image).unwrap());
    let lowest = top(&chain).over(chain.base(Access::ReadOnly)).unwrap();
    stack.put_deltas(vec![lowest]).unwrap();
    chain.must_be_plain(&mut stack);
    chain.work(&mut stack, 60, 5);
    chain.must_be_plain(&mut stack);
    // It stays where it is when something is put above.
    let mut deltas = freeze(&mut stack);
    chain.add();
    deltas.push(top(&chain));
    stack.put_deltas(deltas).unwrap();
    chain.work(&mut stack, 60, 6);
    chain.must_be_plain(&mut stack);
    drop(stack);
    assert!(fs::read(chain.at("base.raw")).unwrap() == base);
    let own = fs::read(own).unwrap();
    assert!(own.iter().all(|byte| *byte == 0), "something is written");
    let other = Chain::new(BYTES + 512);
    let over_longer = top(&chain).over(other.base(Access::ReadOnly));
    assert!(over_longer.is_err(), "it is longer");
}
