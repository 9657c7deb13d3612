//! QEMU reads a chain of deltas as we do.

use godwit_delta::{
    BLOCK, Descriptor, GRAIN, Grain, Id, Kind, Label, Layout, Parent, States, Use, header, table,
    words_for,
};
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::AtomicU64;

/// Grains of a delta and what each is filled with.
type Written = Vec<(u64, Grain, u8)>;

fn delta(
    directory: &Path,
    name: &str,
    bytes: u64,
    (id, parent): (u8, &Parent),
    grains: &Written,
) -> Parent {
    let layout = Layout::of(bytes).unwrap();
    let label = Label {
        id: Id([id; 16]),
        in_use: Use::Frozen,
    };
    let extent = format!("{name}.grains");
    let file = fs::File::create(directory.join(&extent)).unwrap();
    file.set_len(layout.file_bytes()).unwrap();
    file.write_all_at(&header::encode(&layout, &label), 0)
        .unwrap();
    file.write_all_at(&table::directory(&layout), layout.directory().start)
        .unwrap();
    let words: Box<[AtomicU64]> = (0..words_for(&layout)).map(|_| AtomicU64::new(0)).collect();
    let states = States::over(words, &layout).unwrap();
    for (grain, state, fill) in grains {
        states.set(*grain..grain + 1, *state);
        if *state == Grain::Present {
            file.write_all_at(&[*fill; GRAIN as usize], layout.data_at() + grain * GRAIN)
                .unwrap();
        }
    }
    for block in states.marked() {
        let bytes = table::encode(block, &states.block(block));
        assert_eq!(bytes.len() as u64, BLOCK);
        file.write_all_at(&bytes, layout.block_at(block)).unwrap();
    }
    let cid = label.id.cid();
    let descriptor = Descriptor {
        kind: Kind::Delta,
        cid,
        parent: Some(parent.clone()),
        bytes,
        extent,
    };
    fs::write(
        directory.join(format!("{name}.vmdk")),
        descriptor.encode().unwrap(),
    )
    .unwrap();
    Parent {
        cid,
        hint: format!("{name}.vmdk"),
    }
}

fn qemu_img(directory: &Path, arguments: &[&str]) -> String {
    let output = Command::new("qemu-img")
        .args(arguments)
        .current_dir(directory)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success(),
        "qemu-img {arguments:?}: {said}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    said
}

fn chain(bytes: u64) {
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path();
    let mut plain: Vec<u8> = (0..bytes).map(|at| (at / 512 % 251) as u8).collect();
    fs::write(at.join("base.raw"), &plain).unwrap();
    let base = Descriptor {
        kind: Kind::Raw,
        cid: 7,
        parent: None,
        bytes,
        extent: "base.raw".to_owned(),
    };
    fs::write(at.join("base.vmdk"), base.encode().unwrap()).unwrap();
    let last = bytes.div_ceil(GRAIN) - 1;
    let mut parent = Parent {
        cid: 7,
        hint: "base.vmdk".to_owned(),
    };
    let layers: [Written; 3] = [
        vec![
            (0, Grain::Present, 201),
            (1, Grain::Zero, 0),
            (4095, Grain::Present, 202),
            (4096, Grain::Present, 203),
            (5001, Grain::Present, 207),
        ],
        vec![
            (1, Grain::Present, 204),
            (2, Grain::Zero, 0),
            (4096, Grain::Zero, 0),
            (last, Grain::Present, 205),
        ],
        vec![
            (0, Grain::Zero, 0),
            (600, Grain::Present, 206),
            (5000, Grain::Zero, 0),
        ],
    ];
    for (number, grains) in layers.iter().enumerate() {
        parent = delta(
            at,
            &format!("d{number}"),
            bytes,
            (number as u8 + 10, &parent),
            grains,
        );
        for (grain, _, fill) in grains {
            let range = (grain * GRAIN) as usize..((grain + 1) * GRAIN).min(bytes) as usize;
            plain[range].fill(*fill);
        }
        fs::write(at.join("expected"), &plain).unwrap();
        let name = parent.hint.clone();
        println!(
            "{}",
            qemu_img(
                at,
                &["compare", "-f", "vmdk", "-F", "raw", &name, "expected"]
            )
        );
        qemu_img(at, &["convert", "-f", "vmdk", "-O", "raw", &name, "out"]);
        assert!(fs::read(at.join("out")).unwrap() == plain);
    }
    println!(
        "{}",
        qemu_img(at, &["info", "--backing-chain", &parent.hint])
    );
}

#[test]
fn qemu_reads_a_chain_of_three_as_we_mean_it_whatever_the_size() {
    // A multiple of a table's reach, of a grain, and of a sector alone.
    for bytes in [32 << 20, (24 << 20) + 4096, (24 << 20) + 512 * 3] {
        chain(bytes);
    }
}
