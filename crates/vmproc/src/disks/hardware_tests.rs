//! What a guest sees of its disks, which is part of its VM's hardware version: it stays as it is for as long as the VM lives.
//!
//! Where this fails, guests that were started by an older build would meet other disks after a migration or when their VM
//! process is renewed. A change belongs to a new hardware version (`godwit_types::version::HARDWARE`), and the older one keeps what
//! its file says. What QEMU's command line adds, the size of a queue for one, is in `crates/qemu/tests/golden`. The file of a new
//! version is written with UPDATE_GOLDEN=1.

use super::*;
use crate::testing::Site;
use godwit_blockio::{Access, Image};
use godwit_types::version::HARDWARE;
use godwit_vhost::block::{Geometry, feature};
use rustix::process::{getegid, geteuid};
use std::fmt::Write as _;
use std::fs::File;
use std::path::Path;

const FEATURES: [(&str, u64); 13] = [
    ("seg-max", feature::SEG_MAX),
    ("read-only", feature::READ_ONLY),
    ("block-size", feature::BLOCK_SIZE),
    ("flush", feature::FLUSH),
    ("topology", feature::TOPOLOGY),
    ("queues", feature::QUEUES),
    ("discard", feature::DISCARD),
    ("write-zeroes", feature::WRITE_ZEROES),
    ("log-all", feature::LOG_ALL),
    ("indirect", feature::INDIRECT),
    ("event-index", feature::EVENT_INDEX),
    ("protocol", feature::PROTOCOL),
    ("version-1", feature::VERSION_1),
];

/// Fields of `struct virtio_blk_config`: where each begins, and its bytes.
const CONFIG: [(&str, usize, usize); 21] = [
    ("capacity", 0, 8),
    ("size_max", 8, 4),
    ("seg_max", 12, 4),
    ("cylinders", 16, 2),
    ("heads", 18, 1),
    ("sectors", 19, 1),
    ("blk_size", 20, 4),
    ("physical_block_exp", 24, 1),
    ("alignment_offset", 25, 1),
    ("min_io_size", 26, 2),
    ("opt_io_size", 28, 4),
    ("writeback", 32, 1),
    ("unused", 33, 1),
    ("num_queues", 34, 2),
    ("max_discard_sectors", 36, 4),
    ("max_discard_seg", 40, 4),
    ("discard_sector_alignment", 44, 4),
    ("max_write_zeroes_sectors", 48, 4),
    ("max_write_zeroes_seg", 52, 4),
    ("write_zeroes_may_unmap", 56, 1),
    ("unused1", 57, 3),
];

#[test]
fn what_a_guest_sees_of_its_disks_stays_as_it_is_within_a_hardware_version() {
    for version in HARDWARE.min.max(2)..=HARDWARE.max {
        let made = [1, 2, 4, 16].map(|vcpus| seen(version, vcpus)).concat();
        let file = format!("tests/golden/disks-of-hardware-{version}");
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(file);
        if std::env::var_os("UPDATE_GOLDEN").is_some() {
            std::fs::write(&file, &made).unwrap();
        }
        let golden = std::fs::read_to_string(&file).unwrap();
        let mut lines = golden.lines().zip(made.lines());
        let differs = lines.find(|(old, new)| old != new);
        assert!(
            golden == made,
            "disks of hardware version {version} have changed: {differs:#?}"
        );
    }
}

/// What a guest with so many vCPUs sees of a disk that it writes, and of one that it only reads.
fn seen(version: u32, vcpus: u32) -> String {
    let (site, directory) = (Site::new(), tempfile::tempdir_in("/var/tmp").unwrap());
    let disk = |name: &str, read_only| {
        let path = directory.path().join(name);
        File::create(&path).unwrap().set_len(4 << 20).unwrap();
        DiskSpec {
            read_only,
            ..DiskSpec::new(name, path.to_str().unwrap())
        }
    };
    let spec = VmSpec {
        hardware: Some(version),
        vcpus,
        disks: vec![disk("root", false), disk("iso", true)],
        ..VmSpec::placeholder(&site.config.vm)
    };
    let ram = Arc::new(RamFile::create(&site.paths.ram_file(1), 16 << 20, None).unwrap());
    let user = User {
        uid: geteuid().as_raw(),
        gid: getegid().as_raw(),
    };
    let (qemu, right) = ((user, 1), (Some(Generation(2)), None));
    let disks = Disks::begin(&site.config, &site.paths, &spec, qemu, &ram, right).unwrap();
    let mut text = String::new();
    for (disk, back_end) in spec.disks.iter().zip(disks.back_ends()) {
        let BackEnd::Served { queues, .. } = back_end else {
            panic!("QEMU has the image itself");
        };
        let image = Image::open(Path::new(&disk.path), Access::ReadOnly, BLOCK).unwrap();
        let access = if disk.read_only {
            "read only"
        } else {
            "written"
        };
        let name = &disk.name;
        writeln!(
            text,
            "disk '{name}', {access}, {vcpus} vCPUs: {queues} queues"
        )
        .unwrap();
        tell(&mut text, &disks.0.geometry((disk, queues), &image));
    }
    disks.end();
    text
}

fn tell(text: &mut String, geometry: &Geometry) {
    let offered = geometry.features();
    let has = FEATURES.iter().filter(|(_, bit)| offered & bit != 0);
    let names: Vec<&str> = has.map(|(name, _)| *name).collect();
    writeln!(text, "serial {}", geometry.serial).unwrap();
    writeln!(text, "features {offered:#x} {}", names.join(" ")).unwrap();
    let config = geometry.config();
    let mut end = 0;
    for (name, at, len) in CONFIG {
        assert_eq!(at, end, "{name}");
        end = at + len;
        let mut value = [0; 8];
        value[..len].copy_from_slice(&config[at..end]);
        writeln!(text, "{name} {}", u64::from_le_bytes(value)).unwrap();
    }
    assert_eq!(end, config.len());
    text.push('\n');
}
