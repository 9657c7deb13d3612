//! Extended attributes of a volume for images: kept by a sync of their file, and by no sync of its data alone.

use godwit_testkit::lab::Machine;
use godwit_testkit::lab::namespace::Plan;
use godwit_testkit::testvol::{self, Survives};
use rustix::fs::{XattrFlags, fgetxattr, flistxattr, fremovexattr, fsetxattr};
use rustix::io::Errno;
use std::fs::File;
use std::path::Path;

const AT: &str = "/var/lib/images";
const NAME: &str = "user.who";

fn value(file: &File) -> Result<String, Errno> {
    let mut bytes = [0; 64];
    let length = fgetxattr(file, NAME, bytes.as_mut_slice())?;
    Ok(String::from_utf8(bytes[..length].to_vec()).unwrap())
}

#[test]
fn an_attribute_survives_a_cut_once_its_file_was_synced_and_not_its_data_alone() {
    if let Some(why) = testvol::unavailable() {
        println!("skipped: {why}");
        return;
    }
    let plan = Plan {
        name: "attributes",
        visible: &[],
        shared: &[],
        outlive_maker: false,
    };
    let mut machine = Machine::start(&plan).unwrap();
    machine.mount_direct_volume(Path::new(AT)).unwrap();
    let (at, volume) = (machine.path_from_outside(AT), machine.volume(AT).unwrap());
    let file = File::create(at.join("image")).unwrap();
    assert_eq!(value(&file), Err(Errno::NODATA));
    fsetxattr(&file, NAME, b"a", XattrFlags::CREATE).unwrap();
    let again = fsetxattr(&file, NAME, b"b", XattrFlags::CREATE);
    assert_eq!(again, Err(Errno::EXIST));
    let foreign = fsetxattr(&file, "trusted.who", b"a", XattrFlags::empty());
    assert_eq!(foreign, Err(Errno::OPNOTSUPP));
    file.sync_all().unwrap();
    File::open(&at).unwrap().sync_all().unwrap();
    fsetxattr(&file, NAME, b"b", XattrFlags::REPLACE).unwrap();
    fsetxattr(&file, "user.more", b"", XattrFlags::empty()).unwrap();
    file.sync_data().unwrap();
    let mut names = [0; 64];
    let length = flistxattr(&file, names.as_mut_slice()).unwrap();
    assert_eq!(&names[..length], b"user.more\0user.who\0");
    assert_eq!(value(&file).as_deref(), Ok("b"));
    drop(file);
    volume.cut(Survives::Nothing);

    let file = File::open(at.join("image")).unwrap();
    assert_eq!(
        value(&file).as_deref(),
        Ok("a"),
        "its data alone was synced"
    );
    fremovexattr(&file, NAME).unwrap();
    file.sync_all().unwrap();
    drop(file);
    volume.cut(Survives::Nothing);
    let file = File::open(at.join("image")).unwrap();
    assert_eq!(value(&file), Err(Errno::NODATA));
}
