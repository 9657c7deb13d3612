//! Heads of qcow2 images, and chains of them, as they are made and as nobody makes them.

use super::*;

const LENGTH: usize = 112;

fn head(version: u32) -> Vec<u8> {
    let mut head = vec![0; 4096];
    head[..4].copy_from_slice(MAGIC);
    head[4..8].copy_from_slice(&version.to_be_bytes());
    head[20..24].copy_from_slice(&16u32.to_be_bytes());
    head[24..32].copy_from_slice(&(1u64 << 30).to_be_bytes());
    if version == 3 {
        head[100..104].copy_from_slice(&(LENGTH as u32).to_be_bytes());
    }
    head
}

fn with(at: usize, bytes: &[u8]) -> Result<Format, String> {
    let mut head = head(3);
    head[at..at + bytes.len()].copy_from_slice(bytes);
    format_of(&head)
}

fn qcow2(backing: Option<(&str, Kind)>) -> Format {
    let backing = backing.map(|(name, kind)| Backing {
        name: name.to_owned(),
        kind,
    });
    Format::Qcow2(Qcow2 {
        bytes: 1 << 30,
        backing,
    })
}

/// One over a file of that name, which is of that format, as far as it says so.
fn over(version: u32, name: &[u8], format: Option<&[u8]>) -> Vec<u8> {
    let mut head = head(version);
    let mut at = if version == 3 { LENGTH } else { 72 };
    // A table that nobody needs comes first.
    let told = [(0x6803_f857u32, &b"names of features"[..])];
    let format = format.map(|format| (0xe279_2acau32, format));
    for (kind, content) in told.into_iter().chain(format) {
        head[at..at + 4].copy_from_slice(&kind.to_be_bytes());
        head[at + 4..at + 8].copy_from_slice(&(content.len() as u32).to_be_bytes());
        head[at + 8..at + 8 + content.len()].copy_from_slice(content);
        at += 8 + content.len().next_multiple_of(8);
    }
    at += 8;
    head[at..at + name.len()].copy_from_slice(name);
    head[8..16].copy_from_slice(&(at as u64).to_be_bytes());
    head[16..20].copy_from_slice(&(name.len() as u32).to_be_bytes());
    head
}

#[test]
fn an_image_that_could_show_other_files_is_refused() {
    assert_eq!(format_of(&head(2)), Ok(qcow2(None)));
    assert_eq!(with(79, &[8 | 16]), Ok(qcow2(None)));
    for (at, value, told) in [
        (15, &[1][..], "no name can be"),
        (19, &[1], "no name can be"),
        (35, &[2], "encrypted"),
        (79, &[4], "another file"),
        (79, &[2], "qemu-img check -r all"),
        (79, &[1], "not closed"),
        (72, &[1], "not known"),
        (4, &[0, 0, 0, 4], "version 4"),
        (24, &[0; 8], "empty"),
        (24, &[0x7f; 8], "at most"),
        (23, &[8], "clusters of 2^8"),
        (20, &[0xff; 4], "clusters of"),
        (100, &[0, 0, 0, 96], "96 bytes"),
        (100, &[0xff; 4], "its head"),
    ] {
        let refusal = with(at, value).unwrap_err();
        assert!(refusal.contains(told), "{at}: {refusal}");
    }
    for length in 4..HEAD_3 {
        assert!(format_of(&head(3)[..length]).is_err(), "{length}");
    }
    assert_eq!(format_of(b""), Ok(Format::Raw));
    assert!(format_of(b"KDMV and more").unwrap_err().contains("VMDK"));
}

#[test]
fn the_file_below_is_named_with_its_format_or_the_image_is_refused() {
    for version in [2, 3] {
        for (format, kind) in [(&b"raw"[..], Kind::Raw), (b"qcow2", Kind::Qcow2)] {
            let head = over(version, b"../base.img", Some(format));
            assert_eq!(format_of(&head), Ok(qcow2(Some(("../base.img", kind)))));
            for length in 0..head.len() {
                // Whatever is cut off is told, or was not needed.
                let cut = format_of(&head[..length]);
                assert!(cut.is_err() || length < 4 || cut == format_of(&head));
            }
        }
        let refused = |name: &[u8], format: Option<&[u8]>, told: &str| {
            let refusal = format_of(&over(version, name, format)).unwrap_err();
            assert!(refusal.contains(told), "{refusal}");
        };
        refused(b"base", None, "rebase -u -F FORMAT -b base IMAGE");
        refused(b"base", Some(b"vmdk"), "of format \"vmdk\"");
        refused(b"base", Some(b""), "of format \"\"");
        refused(b"nbd://host/base", Some(b"raw"), "path of a file");
        refused(b"json:{}", Some(b"raw"), "path of a file");
        refused(b"ba\0se", Some(b"raw"), "no text");
        refused(b"\xff", Some(b"raw"), "no text");
        refused(&[b'a'; NAME_MAX + 1], Some(b"raw"), "no name can be");
    }
    // A part after the head that is longer than there is room for.
    let mut head = over(3, b"base", Some(b"raw"));
    head[LENGTH + 4..LENGTH + 8].copy_from_slice(&[0xff; 4]);
    assert_eq!(format_of(&head), Err(damaged()));
    let colon = format_of(&over(3, b"./a:b", Some(b"raw")));
    assert_eq!(colon, Ok(qcow2(Some(("./a:b", Kind::Raw)))));
}

/// A chain of files by name, of which each is its own number.
fn walked(files: &[(&str, Vec<u8>)]) -> Result<Vec<Link<usize>>, String> {
    let open = |path: &Path| -> Result<Found<usize>, String> {
        let path = path.to_str().unwrap();
        let at = files.iter().position(|(name, _)| *name == path);
        let at = at.ok_or("it is not there")?;
        Ok(Found {
            file: at,
            identity: (1, at as u64),
            head: files[at].1.clone(),
        })
    };
    let top = Path::new(files[0].0);
    walk(top, open(top)?, open)
}

#[test]
fn a_chain_is_walked_to_its_end_and_no_further_than_is_told() {
    let files = [
        ("/srv/a/top", over(3, b"../b/mid", Some(b"qcow2"))),
        ("/srv/a/../b/mid", over(2, b"/srv/base", Some(b"raw"))),
        // Its guest wrote that it is another image, which is none of its names.
        ("/srv/base", over(3, b"/etc/shadow", Some(b"raw"))),
    ];
    let chain = walked(&files).unwrap();
    let found: Vec<_> = chain
        .iter()
        .map(|link| (link.file, link.format.kind()))
        .collect();
    let expected = [(0, Kind::Qcow2), (1, Kind::Qcow2), (2, Kind::Raw)];
    assert_eq!(found, expected);
}

#[test]
fn chains_that_come_back_that_are_long_or_of_which_something_is_wrong_are_refused() {
    let refused = |files: &[(&str, Vec<u8>)], told: &[&str]| {
        let why = walked(files).unwrap_err();
        for told in told {
            assert!(why.contains(told), "{told}: {why}");
        }
    };
    let over_it = |name: &str| over(3, name.as_bytes(), Some(b"qcow2"));
    refused(
        &[("/a", over_it("a"))],
        &["/a cannot be used", "above itself"],
    );
    refused(
        &[("/a", over_it("b")), ("/b", over_it("a"))],
        &["/a cannot be used with its backing file /a", "above itself"],
    );
    refused(
        &[("/a", over_it("b"))],
        &["with its backing file /b", "not there"],
    );
    refused(
        &[("/a", over_it("b")), ("/b", vec![0; 512])],
        &["is none", "rebase -u -F raw"],
    );
    let names: Vec<String> = (0..=CHAIN_MAX).map(|at| format!("/{at}")).collect();
    let files: Vec<_> = (0..=CHAIN_MAX)
        .map(|at| (names[at].as_str(), over_it(&(at + 1).to_string())))
        .collect();
    refused(&files, &["which is the most", "qemu-img convert"]);
    let last = (names[CHAIN_MAX - 1].as_str(), head(3));
    let files: Vec<_> = files
        .into_iter()
        .take(CHAIN_MAX - 1)
        .chain([last])
        .collect();
    assert_eq!(walked(&files).map(|chain| chain.len()), Ok(CHAIN_MAX));
}
