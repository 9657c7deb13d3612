//! What files of strangers may say.

use godwit_delta::{
    BYTES_MAX, Descriptor, GRAIN, Grain, Id, Kind, Label, Layout, Parent, States, Use, header,
    table, words_for,
};
use std::sync::atomic::AtomicU64;

#[test]
fn the_number_of_a_map_is_what_was_written_and_none_where_anything_else_is() {
    let said = header::encode_map(77);
    assert_eq!(header::decode_map(&said), 77);
    for at in [0, 8, 16, 30, said.len() - 1] {
        let mut wrong = said;
        wrong[at] ^= 1;
        assert_eq!(header::decode_map(&wrong), 0, "byte {at}");
    }
    assert_eq!(header::decode_map(&[0; header::LABEL]), 0);
    assert_eq!(header::decode_map(&[]), 0);
}

fn label() -> Label {
    Label {
        id: Id([3; 16]),
        in_use: Use::Open { boot: Id([9; 16]) },
    }
}

#[test]
fn a_header_is_read_as_it_was_written_and_no_other_way() {
    for bytes in [512, 4096, 10 << 30, BYTES_MAX] {
        let layout = Layout::of(bytes).unwrap();
        let head = header::encode(&layout, &label());
        assert_eq!(head.len(), header::HEAD);
        assert_eq!(header::decode(&head), Ok((layout, label())));
        for at in (0..1024).chain(4096..head.len()) {
            let mut wrong = head.clone();
            wrong[at] ^= 1;
            // One byte of the size may be another size, whose places are others then.
            assert!(header::decode(&wrong).is_err(), "byte {at}");
        }
        for length in [0, 8, 511, 1024, header::HEAD - 1] {
            assert!(header::decode(&head[..length]).is_err());
        }
    }
    for bytes in [0, 511, 513, BYTES_MAX + 512, u64::MAX] {
        assert!(Layout::of(bytes).is_err());
    }
}

#[test]
fn regions_follow_one_another_and_none_reaches_the_label() {
    for bytes in [512, 16 << 20, (1 << 40) + 512, BYTES_MAX] {
        let layout = Layout::of(bytes).unwrap();
        assert!(layout.directory().start > header::HEAD as u64);
        assert!(layout.directory().end <= layout.tables().start);
        assert!(layout.tables().end <= layout.data_at());
        assert!(layout.block_at(layout.blocks() - 1) < layout.tables().end);
        // QEMU keeps the place of a table in 32 bits, in sectors.
        assert!(layout.tables().end / 512 <= u64::from(u32::MAX));
    }
}

#[test]
fn a_table_says_absent_zero_or_present_at_its_own_place() {
    let layout = Layout::of((3 << 30) + 4096 * 5).unwrap();
    let words: Box<[AtomicU64]> = (0..words_for(&layout)).map(|_| AtomicU64::new(0)).collect();
    let states = States::over(words, &layout).unwrap();
    let last = layout.blocks() - 1;
    states.set(0..3, Grain::Present);
    states.set(2..9, Grain::Zero);
    states.set(layout.grains() - 2..u64::MAX, Grain::Present);
    assert_eq!(states.marked(), [0, last]);
    for block in [0, 1, last] {
        let words = states.block(block);
        let bytes = table::encode(block, &words);
        assert_eq!(table::decode(&layout, block, &bytes), Ok(words));
    }
    let good = table::encode(last, &states.block(last));
    let entry = |at: usize, said: u64| {
        let mut bytes = good.clone();
        bytes[at * 8..at * 8 + 8].copy_from_slice(&said.to_le_bytes());
        table::decode(&layout, last, &bytes)
    };
    let inside = (layout.grains() - 1) % 512;
    for said in [1, 1 << 60, 2 << 60 | 1, 3 << 60, 4 << 60, u64::MAX] {
        assert!(entry(inside as usize, said).is_err(), "{said:x}");
    }
    assert!(
        entry(inside as usize + 1, 2 << 60).is_err(),
        "behind the end"
    );
    assert!(table::decode(&layout, last, &good[1..]).is_err());
    assert!(table::check_directory(&layout, &table::directory(&layout)).is_ok());
    assert!(table::check_directory(&layout, &[0; 4096]).is_err());
}

#[test]
fn states_are_told_in_runs() {
    let layout = Layout::of(3000 * GRAIN).unwrap();
    let words: Box<[AtomicU64]> = (0..words_for(&layout)).map(|_| AtomicU64::new(0)).collect();
    let states = States::over(words, &layout).unwrap();
    states.set(31..33, Grain::Present);
    states.set(100..2000, Grain::Zero);
    let runs = [
        (0, Grain::Absent, 31),
        (31, Grain::Present, 33),
        (33, Grain::Absent, 100),
        (100, Grain::Zero, 2000),
        (2000, Grain::Absent, 3000),
    ];
    for (start, state, end) in runs {
        assert_eq!(states.run(&(start..3000)), (state, end));
        assert_eq!(states.run(&(start..end.min(start + 1))), (state, start + 1));
    }
}

#[test]
fn a_descriptor_is_read_as_it_was_written_and_names_no_file_elsewhere() {
    let good = Descriptor {
        kind: Kind::Delta,
        cid: 0xab,
        parent: Some(Parent {
            cid: 7,
            hint: "../base/root.vmdk".to_owned(),
        }),
        bytes: 20 << 30,
        extent: "root 1.grains".to_owned(),
    };
    let text = good.encode().unwrap();
    assert_eq!(Descriptor::decode(text.as_bytes()), Ok(good.clone()));
    for extent in ["", "..", "a/b", "/etc/passwd", "a\"b", "a\nb"] {
        let wrong = Descriptor {
            extent: extent.to_owned(),
            ..good.clone()
        };
        assert!(wrong.encode().is_err(), "{extent:?}");
    }
    let changed = |from: &str, to: &str| {
        assert!(text.contains(from), "{from}");
        Descriptor::decode(text.replace(from, to).as_bytes())
    };
    let wrong = [
        ("RW ", "RDONLY "),
        ("RW 41943040", "RW 0"),
        ("RW 41943040", "RW 99999999999999999999"),
        ("SESPARSE", "SPARSE"),
        ("\"seSparse\"", "\"vmfs\""),
        ("parentCID=00000007", "parentCID=ffffffff"),
        ("\nCID=", "\nCID=z"),
        ("\nCID=", "\nCID=1\nCID="),
        ("version=1", "version=2"),
        ("version=1", "nothing"),
    ];
    for (from, to) in wrong {
        assert!(changed(from, to).is_err(), "{from} {to}");
    }
    assert_eq!(changed("\nRW", "\nddb.uuid = \"1\"\nRW"), Ok(good));
    assert!(Descriptor::decode(&vec![b'#'; 17 << 10]).is_err());
    assert!(Descriptor::decode(&[0xff]).is_err());
}
