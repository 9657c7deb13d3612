//! A few files as an ISO 9660 file system with one directory, as the names of Linux (Rock Ridge) and of Windows (Joliet) have them.
//!
//! Pure: the same files give the same bytes on every host and at any time. Writes what ECMA-119, IEEE P1282 and the Joliet specification
//! say that a reader needs, and no more. Refuses: names and sizes that would not fit into a directory of one sector.

/// Bytes of a sector.
pub const SECTOR: usize = 2048;
/// Most files: their records fill one sector.
const FILES_MAX: usize = 8;
/// Longest name of a file, bytes.
const NAME_LEN_MAX: usize = 32;
/// Longest name of the volume, in characters of two bytes.
const LABEL_LEN_MAX: usize = 16;

/// Where everything begins, in sectors.
const PRIMARY: usize = 16;
const JOLIET: usize = 17;
const END: usize = 18;
const PATHS: [usize; 4] = [19, 20, 21, 22];
const ROOT: usize = 23;
const JOLIET_ROOT: usize = 24;
const FIRST_FILE: usize = 25;

/// When everything was made: always the same, since the bytes are to be.
const DATE: [u8; 7] = [120, 1, 1, 0, 0, 0, 0];
const LONG_DATE: &[u8; 17] = b"2020010100000000\0";
const NO_DATE: &[u8; 17] = b"0000000000000000\0";

const IS_DIRECTORY: u8 = 2;
const MODE_DIRECTORY: u32 = 0o040_555;
/// The guest's root alone reads what may be secret.
const MODE_FILE: u32 = 0o100_400;

/// A file, by its name.
#[derive(Debug, Clone, Copy)]
pub struct File<'a> {
    pub name: &'a str,
    /// Its name for readers that know the plain standard alone: `D` characters, 8 and 3.
    pub plain: &'a str,
    pub bytes: &'a [u8],
}

/// Which names a directory or a descriptor has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Names {
    Plain,
    Joliet,
}

/// A file with its place.
struct Placed<'a> {
    file: File<'a>,
    sector: usize,
}

/// The file system. The files must be in the order of their names.
pub fn image(label: &str, files: &[File<'_>]) -> Result<Vec<u8>, String> {
    let fits = |text: &str, most| text.is_ascii() && (1..=most).contains(&text.len());
    if files.len() > FILES_MAX || !fits(label, LABEL_LEN_MAX) {
        return Err("a seed has too many files, or its label is too long".to_owned());
    }
    let mut sector = FIRST_FILE;
    let mut placed = Vec::new();
    for &file in files {
        if !fits(file.name, NAME_LEN_MAX) || !fits(file.plain, NAME_LEN_MAX) {
            return Err(format!("the file '{}' has no name for a seed", file.name));
        }
        placed.push(Placed { file, sector });
        sector += file.bytes.len().div_ceil(SECTOR);
    }
    let (mut image, sectors) = (vec![0; sector * SECTOR], sector);
    put(
        &mut image,
        PRIMARY,
        &descriptor(Names::Plain, label, sectors)?,
    )?;
    put(
        &mut image,
        JOLIET,
        &descriptor(Names::Joliet, label, sectors)?,
    )?;
    put(&mut image, END, b"\xffCD001\x01")?;
    for (place, at) in PATHS.into_iter().enumerate() {
        let root = if place < 2 { ROOT } else { JOLIET_ROOT };
        put(&mut image, at, &path_table(root, place % 2 == 1)?)?;
    }
    put(&mut image, ROOT, &directory(Names::Plain, &placed)?)?;
    put(&mut image, JOLIET_ROOT, &directory(Names::Joliet, &placed)?)?;
    for Placed { file, sector } in &placed {
        put(&mut image, *sector, file.bytes)?;
    }
    Ok(image)
}

fn put(image: &mut [u8], sector: usize, bytes: &[u8]) -> Result<(), String> {
    let at = sector * SECTOR;
    let room = image.get_mut(at..at + bytes.len());
    room.ok_or("a seed has no room for its parts")?
        .copy_from_slice(bytes);
    Ok(())
}

/// A number in both orders of its bytes.
fn both32(value: usize) -> Result<[u8; 8], String> {
    let value = u32::try_from(value).map_err(|_| "a seed is too large")?;
    let mut bytes = [0; 8];
    let (low, high) = bytes.split_at_mut(4);
    low.copy_from_slice(&value.to_le_bytes());
    high.copy_from_slice(&value.to_be_bytes());
    Ok(bytes)
}

fn both16(value: u16) -> [u8; 4] {
    let ([a, b], [c, d]) = (value.to_le_bytes(), value.to_be_bytes());
    [a, b, c, d]
}

/// A text of a fixed length, filled with blanks.
fn filled(names: Names, text: &str, length: usize) -> Vec<u8> {
    let wide = |c: char| [0, u8::try_from(c).unwrap_or(b' ')];
    let (mut bytes, blank): (Vec<u8>, &[u8]) = match names {
        Names::Plain => (text.bytes().collect(), b" "),
        Names::Joliet => (text.chars().flat_map(wide).collect(), b"\0 "),
    };
    while bytes.len() + blank.len() <= length {
        bytes.extend_from_slice(blank);
    }
    bytes.resize(length, 0);
    bytes
}

/// The descriptor of a volume: what it is called, and where its root is.
fn descriptor(names: Names, label: &str, sectors: usize) -> Result<Vec<u8>, String> {
    let mut bytes = Vec::with_capacity(SECTOR);
    let (kind, tables, root) = match names {
        Names::Plain => (1, 0, ROOT),
        Names::Joliet => (2, 2, JOLIET_ROOT),
    };
    bytes.extend([kind]);
    bytes.extend(b"CD001\x01\0");
    bytes.extend(filled(names, "", 32));
    bytes.extend(filled(names, label, 32));
    bytes.extend([0; 8]);
    bytes.extend(both32(sectors)?);
    // UCS-2, level 3, where the names are Joliet's.
    let escape: &[u8] = if names == Names::Joliet { b"%/E" } else { b"" };
    bytes.extend(escape);
    bytes.extend(std::iter::repeat_n(0, 32 - escape.len()));
    bytes.extend(both16(1));
    bytes.extend(both16(1));
    bytes.extend(both16(SECTOR as u16));
    bytes.extend(both32(PATH_TABLE_LEN)?);
    let table = |index: usize| PATHS.get(tables + index).copied().unwrap_or_default() as u32;
    bytes.extend(table(0).to_le_bytes());
    bytes.extend([0; 4]);
    bytes.extend(table(1).to_be_bytes());
    bytes.extend([0; 4]);
    bytes.extend(record(&[0], root, SECTOR, IS_DIRECTORY, &[])?);
    // The set of volumes, its publisher, its preparer and its application.
    (0..4).for_each(|_| bytes.extend(filled(names, "", 128)));
    // Names of files about copyright and the like.
    (0..3).for_each(|_| bytes.extend(filled(names, "", 37)));
    bytes.extend(LONG_DATE);
    bytes.extend(LONG_DATE);
    bytes.extend(NO_DATE);
    bytes.extend(NO_DATE);
    bytes.extend([1, 0]);
    Ok(bytes)
}

const PATH_TABLE_LEN: usize = 10;

/// The table of all directories, of which there is one.
fn path_table(root: usize, big: bool) -> Result<Vec<u8>, String> {
    let root = u32::try_from(root).map_err(|_| "a seed is too large")?;
    let (at, parent) = match big {
        true => (root.to_be_bytes(), 1u16.to_be_bytes()),
        false => (root.to_le_bytes(), 1u16.to_le_bytes()),
    };
    Ok([&[1, 0], &at[..], &parent[..], &[0, 0]].concat())
}

/// What a directory says of one file, with what Rock Ridge adds.
fn record(
    name: &[u8],
    at: usize,
    length: usize,
    flags: u8,
    more: &[u8],
) -> Result<Vec<u8>, String> {
    let mut bytes = vec![0, 0];
    bytes.extend(both32(at)?);
    bytes.extend(both32(length)?);
    bytes.extend(DATE);
    bytes.extend([flags, 0, 0]);
    bytes.extend(both16(1));
    bytes.extend([u8::try_from(name.len()).map_err(|_| "a name is too long")?]);
    bytes.extend(name);
    // What follows begins at an even place, and the record ends at one.
    bytes.extend((bytes.len() % 2 == 1).then_some(0));
    bytes.extend(more);
    bytes.extend((bytes.len() % 2 == 1).then_some(0));
    let whole = u8::try_from(bytes.len()).map_err(|_| "a record is too long")?;
    if let Some(first) = bytes.first_mut() {
        *first = whole;
    }
    Ok(bytes)
}

fn directory(names: Names, files: &[Placed<'_>]) -> Result<Vec<u8>, String> {
    let root = if names == Names::Plain {
        ROOT
    } else {
        JOLIET_ROOT
    };
    let own = |bytes: Vec<u8>| {
        if names == Names::Plain {
            bytes
        } else {
            Vec::new()
        }
    };
    let of_root = posix(MODE_DIRECTORY, 2)?;
    let first = [
        &b"SP\x07\x01\xbe\xef\0"[..],
        &b"ER\x12\x01\x0a\0\0\x01RRIP_1991A"[..],
        &of_root[..],
    ]
    .concat();
    let mut bytes = record(&[0], root, SECTOR, IS_DIRECTORY, &own(first))?;
    bytes.extend(record(&[1], root, SECTOR, IS_DIRECTORY, &own(of_root))?);
    for Placed { file, sector } in files {
        let (name, more) = match names {
            Names::Plain => {
                let length = u8::try_from(file.name.len() + 5).map_err(|_| "a name is too long")?;
                let called = [&b"NM"[..], &[length, 1, 0], file.name.as_bytes()].concat();
                let more = [posix(MODE_FILE, 1)?, called].concat();
                (file.plain.as_bytes().to_vec(), more)
            }
            Names::Joliet => (filled(names, file.name, 2 * file.name.len()), Vec::new()),
        };
        bytes.extend(record(&name, *sector, file.bytes.len(), 0, &more)?);
    }
    match bytes.len() <= SECTOR {
        true => Ok(bytes),
        false => Err("a seed has too many files".to_owned()),
    }
}

/// Who may do what with a file, and that it is root's.
fn posix(mode: u32, links: usize) -> Result<Vec<u8>, String> {
    let mode = usize::try_from(mode).map_err(|_| "a mode is too large")?;
    let parts = [both32(mode)?, both32(links)?, both32(0)?, both32(0)?];
    Ok([&b"PX\x24\x01"[..], &parts.concat()[..]].concat())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    fn files() -> [File<'static>; 3] {
        [
            File {
                name: "meta-data",
                plain: "METADATA.;1",
                bytes: b"instance-id: web\n",
            },
            File {
                name: "network-config",
                plain: "NETCONF.;1",
                bytes: b"",
            },
            File {
                name: "user-data",
                plain: "USERDATA.;1",
                bytes: &[b'#'; 5000],
            },
        ]
    }

    #[test]
    fn the_same_files_are_the_same_bytes_in_whole_sectors() {
        let made = image("cidata", &files()).unwrap();
        assert_eq!(made, image("cidata", &files()).unwrap());
        assert_eq!(made.len(), (FIRST_FILE + 1 + 3) * SECTOR);
        let label = &made[PRIMARY * SECTOR + 40..][..32];
        assert_eq!(label, b"cidata                          ");
        assert_eq!(&made[PRIMARY * SECTOR + 881..][..2], &[1, 0]);
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let file = files()[0];
        assert!(image("a-label-of-17-byt", &[file]).is_err());
        assert!(image("cidata", &[file; FILES_MAX + 1]).is_err());
        let name = "x".repeat(NAME_LEN_MAX + 1);
        assert!(
            image(
                "cidata",
                &[File {
                    name: &name,
                    ..file
                }]
            )
            .is_err()
        );
        assert!(image("cidata", &[File { name: "", ..file }]).is_err());
        let longest = "x".repeat(NAME_LEN_MAX);
        let most = File {
            name: &longest,
            plain: &longest,
            ..file
        };
        image("cidata", &[most; FILES_MAX]).unwrap();
    }

    /// What a tool of the distribution says of the image; `None` on a machine that does not have it.
    fn told(tool: &str, arguments: &[&str]) -> Option<String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("seed.iso");
        std::fs::write(&path, image("cidata", &files()).unwrap()).unwrap();
        let path = path.to_str().unwrap();
        let arguments = arguments.iter().map(|argument| match *argument {
            "IMAGE" => path,
            other => other,
        });
        let output = match Command::new(tool).args(arguments).output() {
            Ok(output) => output,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                println!("skipped: there is no {tool}");
                return None;
            }
            Err(error) => panic!("{tool}: {error}"),
        };
        assert!(output.status.success(), "{tool}: {output:?}");
        Some(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    #[test]
    fn the_tools_of_others_find_label_names_and_content() {
        if let Some(said) = told("blkid", &["-p", "-o", "export", "IMAGE"]) {
            assert!(
                said.contains("LABEL=cidata") && said.contains("TYPE=iso9660"),
                "{said}"
            );
        }
        for names in ["-R", "-J"] {
            if let Some(said) = told("isoinfo", &[names, "-f", "-i", "IMAGE"]) {
                let listed: Vec<&str> = said.lines().collect();
                assert_eq!(
                    listed,
                    ["/meta-data", "/network-config", "/user-data"],
                    "{names}"
                );
            }
            if let Some(said) = told("isoinfo", &[names, "-x", "/user-data", "-i", "IMAGE"]) {
                assert_eq!(said, "#".repeat(5000), "{names}");
            }
        }
        if let Some(said) = told("isoinfo", &["-l", "-R", "-i", "IMAGE"]) {
            assert!(said.contains("-r--------"), "{said}");
        }
    }
}
