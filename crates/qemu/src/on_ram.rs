//! On which RAM file a process lives: how a QEMU is found that no identity file tells of.
//!
//! Owns nothing. Which file a process maps is the kernel's word: only a QEMU of the VM may open the VM's RAM file. The path
//! of that file is not, since everybody may mount something of his own at any place of his own view: file system and inode
//! count. A process that has not come that far has a command line alone, which whoever starts it chooses, a program with
//! root's rights, too. It is believed of a user of this host's QEMUs whose RAM file it is: such a file is given to its user
//! before its QEMU is started. Refuses: to take a process that could not be looked at for one that is gone, since a QEMU
//! that is missed may run a guest that is started a second time; to wait for a process that is nobody's QEMU.
//!
//! A QEMU of a common user that the configuration named before is found for as long as its RAM file is there.
//!
//! Where RAM files share their file system with what everybody may write, as below `/dev/shm`, a removed one can be forged.

use godwit_types::vm::{Accelerator, UIDS};
use rustix::fs::{major, minor};
use rustix::io::Errno;
use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

/// Longest part of a command line that is looked at, in bytes.
const TEXT_MAX: u64 = 16 << 20;
/// What the kernel puts behind the path of a file that has no name any more.
const DELETED: &str = " (deleted)";

/// Whether a QEMU of this host may run as this user. VMs that were started before each had a user of its own, or that have
/// none, run as the common one.
pub fn is_qemus(uid: u32, common_uid: u32) -> bool {
    uid == 0 || uid == common_uid || UIDS.contains(&uid)
}

/// The users whose processes are looked at, for one look at all of them.
#[derive(Debug)]
pub struct Users {
    common_uid: u32,
    /// Those whose RAM files are there: also a common user that the host's configuration named before.
    owners: BTreeSet<u32>,
}

impl Users {
    /// By the files in the directory as it is now.
    pub fn of(ram_dir: &Path, common_uid: u32) -> io::Result<Self> {
        let mut owners = BTreeSet::new();
        if let Some(files) = gone_is_none(std::fs::read_dir(ram_dir))? {
            for file in files {
                let owner = gone_is_none(file?.metadata())?;
                owners.extend(owner.map(|file| file.uid()));
            }
        }
        Ok(Self { common_uid, owners })
    }

    fn looks_at(&self, uid: u32) -> bool {
        is_qemus(uid, self.common_uid) || self.owners.contains(&uid)
    }
}

/// The name of the file in `ram_dir` that a process lives on, if it lives on any.
pub fn ram_file_of(pid: i32, ram_dir: &Path, users: &Users) -> io::Result<Option<String>> {
    let common_uid = users.common_uid;
    let proc = Path::new("/proc").join(pid.to_string());
    // First of all, since it waits for nothing: to read the command line or the mappings of a process that anybody started
    // may take for ever.
    let uid = match gone_is_none(std::fs::metadata(&proc)) {
        Ok(None) => return Ok(None),
        Ok(Some(owner)) => Some(owner.uid()),
        // One that is there and cannot be looked at may be ours.
        Err(_) => None,
    };
    if let Some(uid) = uid
        && !users.looks_at(uid)
    {
        return Ok(None);
    }
    let Some(line) = gone_is_none(read(&proc.join("cmdline")))? else {
        return Ok(None);
    };
    let told = told(&line, ram_dir);
    // Others of root are many and never ours without saying so.
    if told.is_none() && !uid.is_some_and(|uid| uid != 0 && is_qemus(uid, common_uid)) {
        return Ok(None);
    }
    let mut process = Process {
        ram_dir,
        uid,
        common_uid,
        is_seen: true,
    };
    let maps = File::open(proc.join("maps"));
    let found = maps.and_then(|maps| find_mapped(BufReader::new(maps), &process));
    match gone_is_none(found) {
        Ok(None) => return Ok(None),
        Ok(Some(Some(name))) => return Ok(Some(name)),
        Ok(Some(None)) => {}
        // What it says of itself has to do.
        Err(_) => process.is_seen = false,
    }
    Ok(told.filter(|name| process.is_believed(name)))
}

/// Whose word about a RAM file is weighed.
struct Process<'a> {
    ram_dir: &'a Path,
    /// None of one that is there and could not be looked at.
    uid: Option<u32>,
    common_uid: u32,
    /// Whether what it maps could be looked at.
    is_seen: bool,
}

impl Process<'_> {
    /// Whether it is the RAM file of this name that it maps, and not another one at the same place of its own view.
    fn lives_on(&self, mapped: &Mapped) -> bool {
        let Some(uid) = self.uid else {
            return true;
        };
        let file = gone_is_none(std::fs::metadata(self.ram_dir.join(&mapped.name)));
        let device = std::fs::metadata(self.ram_dir).map(|dir| dir.dev());
        let is_there = device.is_ok_and(|device| (major(device), minor(device)) == mapped.device);
        let is_another =
            matches!(&file, Ok(Some(file)) if !mapped.is_removed && file.ino() != mapped.inode);
        if is_there && !is_another {
            return true;
        }
        match file {
            // A file system that gives other numbers here than there: what the user may open has to do.
            Ok(Some(file)) => file.uid() == uid,
            // A directory that was mounted anew under a QEMU.
            Ok(None) => is_qemus(uid, self.common_uid),
            Err(_) => true,
        }
    }

    /// Whether the command line of one that maps no RAM file tells the truth.
    fn is_believed(&self, name: &str) -> bool {
        let Some(uid) = self.uid else {
            return true;
        };
        let file = gone_is_none(std::fs::metadata(self.ram_dir.join(name)));
        let is_its = match file {
            Ok(Some(file)) => file.uid() == uid,
            // It may map one that was removed if nobody could look.
            Ok(None) => !self.is_seen,
            Err(_) => true,
        };
        is_qemus(uid, self.common_uid) && is_its
    }
}

/// What runs the guest of a QEMU, by its command line.
pub(crate) fn accelerator_of(pid: i32) -> Accelerator {
    let line = read(&Path::new("/proc").join(pid.to_string()).join("cmdline")).unwrap_or_default();
    let mut arguments = line.split(|byte| *byte == 0).map(String::from_utf8_lossy);
    match arguments.any(|text| text.split(',').any(|part| part == "accel=kvm")) {
        true => Accelerator::Kvm,
        false => Accelerator::Tcg,
    }
}

/// How much memory the command line of a QEMU gives its guest, in bytes: the QEMU's own word, where nobody else has one.
pub fn memory_told(pid: i32) -> io::Result<Option<u64>> {
    let line = read(&Path::new("/proc").join(pid.to_string()).join("cmdline"))?;
    Ok(line.split(|byte| *byte == 0).find_map(|argument| {
        let text = std::str::from_utf8(argument).ok()?;
        let mut parts = text.strip_prefix("memory-backend-file,")?.split(',');
        let size = parts.find_map(|part| part.strip_prefix("size="))?;
        let mib: u64 = size.strip_suffix('M')?.parse().ok()?;
        mib.checked_mul(1 << 20)
    }))
}

/// Only these two mean that a process is gone.
fn gone_is_none<T>(looked: io::Result<T>) -> io::Result<Option<T>> {
    match looked {
        Ok(seen) => Ok(Some(seen)),
        Err(error) => match Errno::from_io_error(&error) {
            Some(Errno::NOENT | Errno::SRCH) => Ok(None),
            _ => Err(error),
        },
    }
}

fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    File::open(path)?.take(TEXT_MAX).read_to_end(&mut text)?;
    Ok(text)
}

/// The RAM file on a command line.
fn told(line: &[u8], ram_dir: &Path) -> Option<String> {
    line.split(|byte| *byte == 0).find_map(|argument| {
        let text = std::str::from_utf8(argument).ok()?;
        let parts = text.strip_prefix("memory-backend-file,")?;
        let mut parts = parts.split(',');
        let path = parts.find_map(|part| part.strip_prefix("mem-path="))?;
        name_in(ram_dir, path)
    })
}

/// What a process maps under the name of a RAM file.
#[derive(Debug, PartialEq, Eq)]
struct Mapped {
    name: String,
    /// Major and minor number of its file system.
    device: (u32, u32),
    inode: u64,
    is_removed: bool,
}

/// The RAM file in a list of mappings that the process lives on. The list is read to its end, line by line: how long it is the
/// process chooses, which could else hide its RAM file behind what is looked at; the kernel bounds their number.
fn find_mapped(mut maps: impl BufRead, process: &Process<'_>) -> io::Result<Option<String>> {
    let mut line = Vec::new();
    loop {
        line.clear();
        if maps.read_until(b'\n', &mut line)? == 0 {
            return Ok(None);
        }
        let text = String::from_utf8_lossy(&line);
        let found = mapped_by(text.trim_end_matches('\n'), process.ram_dir);
        if let Some(found) = found.filter(|found| process.lives_on(found)) {
            return Ok(Some(found.name));
        }
    }
}

/// A line has five words before the path, which may hold spaces. What a process calls its own memory has no inode.
fn mapped_by(line: &str, ram_dir: &Path) -> Option<Mapped> {
    let mut words = line.splitn(6, ' ').skip(3);
    let (device, inode) = (words.next()?, words.next()?);
    let path = words.next()?.trim_start();
    let path = Some(path).filter(|path| inode != "0" && path.starts_with('/'))?;
    let removed = path.strip_suffix(DELETED);
    let name = name_in(ram_dir, removed.unwrap_or(path))?;
    let (major, minor) = device.split_once(':')?;
    let number = |text| u32::from_str_radix(text, 16).ok();
    Some(Mapped {
        name,
        device: (number(major)?, number(minor)?),
        inode: inode.parse().ok()?,
        is_removed: removed.is_some(),
    })
}

fn name_in(ram_dir: &Path, path: &str) -> Option<String> {
    let name = Path::new(path).strip_prefix(ram_dir).ok()?.to_str()?;
    let is_name = !name.is_empty() && !name.contains('/');
    is_name.then(|| name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::Permissions;
    use std::os::fd::AsRawFd as _;
    use std::os::unix::fs::PermissionsExt as _;
    use std::os::unix::process::CommandExt as _;
    use std::path::PathBuf;
    use std::process::{Child, Command, Stdio};

    const COMMON: u32 = 61_234;

    struct Ended(Child);

    impl Drop for Ended {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    impl Ended {
        fn pid(&self) -> i32 {
            self.0.id() as i32
        }
    }

    fn found_on(pid: i32, ram_dir: &Path) -> io::Result<Option<String>> {
        ram_file_of(pid, ram_dir, &Users::of(ram_dir, COMMON)?)
    }

    /// A process of this user with this word on its command line, which is there when this returns.
    fn process(uid: u32, word: &str) -> Ended {
        let mut shell = Command::new("sh");
        shell.args(["-c", "echo; read line", "qemu", "-object", word]);
        shell.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = shell.uid(uid).gid(uid).spawn().expect("a shell");
        let mut said = [0];
        let stdout = child.stdout.as_mut().expect("a pipe");
        stdout.read_exact(&mut said).expect("a line");
        Ended(child)
    }

    fn backend(dir: &Path, name: &str) -> String {
        format!(
            "memory-backend-file,id=ram,size=1M,mem-path={},share=on",
            dir.join(name).display()
        )
    }

    #[test]
    fn a_hypervisor_is_found_under_the_common_user_and_under_every_id_that_a_vm_may_have() {
        if !rustix::process::geteuid().is_root() {
            return println!("skipped: becoming another user needs root");
        }
        let dir = tempfile::tempdir().expect("a directory");
        let dir = dir.path();
        let belongs_to = |uid| {
            std::fs::write(dir.join("web.3"), "").expect("a file");
            std::os::unix::fs::chown(dir.join("web.3"), Some(uid), None).expect("chown");
        };
        let ours = [0, COMMON, *UIDS.start(), UIDS.start() + 77, *UIDS.end()];
        for uid in ours {
            belongs_to(uid);
            let qemu = process(uid, &backend(dir, "web.3"));
            let found = found_on(qemu.pid(), dir).expect("looked at");
            assert_eq!(found.as_deref(), Some("web.3"), "user {uid}");
        }
        for uid in [COMMON + 1, UIDS.start() - 1] {
            let other = process(uid, &backend(dir, "web.3"));
            let found = found_on(other.pid(), dir).expect("looked at");
            assert_eq!(found, None, "user {uid} may write what it likes");
        }
        // Who took over another VM's QEMU, a program with root's rights that anybody started, as `su`, and a QEMU of the
        // common user, while this VM's file is there and when it is not.
        for uid in [UIDS.start() + 1, 0, COMMON] {
            belongs_to(*UIDS.start());
            let other = process(uid, &backend(dir, "web.3"));
            let found = || found_on(other.pid(), dir).expect("looked at");
            assert_eq!(found(), None, "user {uid}, whose file it is not");
            std::fs::remove_file(dir.join("web.3")).expect("removed");
            assert_eq!(found(), None, "user {uid}, and there is no file");
        }
    }

    #[test]
    fn a_hypervisor_whose_mappings_nobody_may_see_is_not_missed_because_its_file_was_removed() {
        let dir = tempfile::tempdir().expect("a directory");
        let process = |uid, is_seen| Process {
            ram_dir: dir.path(),
            uid,
            common_uid: COMMON,
            is_seen,
        };
        for uid in [Some(COMMON), Some(*UIDS.start()), None] {
            assert!(process(uid, false).is_believed("web.3"), "{uid:?}");
        }
        assert!(!process(Some(COMMON + 1), false).is_believed("web.3"));
        assert!(!process(Some(COMMON), true).is_believed("web.3"));
    }

    #[test]
    fn a_file_of_another_file_system_at_the_same_place_is_no_ram_file() {
        let dir = tempfile::tempdir().expect("a directory");
        let this = std::fs::metadata(dir.path()).expect("its metadata").dev();
        let this = (major(this), minor(this));
        let mounted_over = (this.0, this.1 + 1);
        let me = rustix::process::geteuid().as_raw();
        let lives = |uid, device, inode, is_removed| {
            let process = Process {
                ram_dir: dir.path(),
                uid: Some(uid),
                common_uid: COMMON,
                is_seen: true,
            };
            let name = "web.3".into();
            process.lives_on(&Mapped {
                name,
                device,
                inode,
                is_removed,
            })
        };
        let stranger = COMMON + 1;
        assert!(!lives(stranger, mounted_over, 7, false));
        assert!(!lives(stranger, mounted_over, 7, true));
        // The directory was mounted anew.
        assert!(lives(COMMON, mounted_over, 7, false));
        std::fs::write(dir.path().join("web.3"), "").expect("a file");
        let file = std::fs::metadata(dir.path().join("web.3")).expect("its metadata");
        assert!(!lives(stranger, mounted_over, file.ino(), false));
        assert!(!lives(COMMON, mounted_over, file.ino(), false));
        assert!(!lives(stranger, this, file.ino() + 1, false));
        assert!(lives(stranger, this, file.ino(), false));
        assert!(lives(stranger, this, file.ino() + 1, true));
        assert!(lives(me, mounted_over, 7, false), "its own file");
    }

    const MAPS: &str = "GODWIT_TEST_MAPS";
    const NAME: &str =
        "on_ram::tests::what_is_mapped_counts_before_what_a_command_line_says_and_whoever_maps_it";

    /// This very test as another process: it maps a file of this directory and waits, and its command line names another.
    fn on(dir: &Path, program: &Path, file: &str, uid: u32) -> Ended {
        let path = dir.join(file);
        std::fs::write(&path, [0; 4096]).expect("a file");
        let mut test = Command::new(program);
        test.args(["--exact", NAME, "--nocapture", "--skip"]);
        test.arg(backend(dir, "other.1"));
        test.env(MAPS, &path).uid(uid);
        std::os::unix::fs::chown(&path, Some(uid), None).expect("chown");
        let (stdin, stdout) = (Stdio::piped(), Stdio::piped());
        let mut child = test.stdin(stdin).stdout(stdout).spawn().expect("a test");
        let lines = BufReader::new(child.stdout.as_mut().expect("a pipe")).lines();
        let mut lines = lines.map_while(Result::ok);
        assert!(
            lines.any(|line| line.contains("mapped")),
            "it did not begin"
        );
        Ended(child)
    }

    fn map_and_wait(path: &std::ffi::OsStr) {
        use rustix::mm::{MapFlags, ProtFlags, mmap};
        let file = File::open(path).expect("its file");
        let (prot, flags) = (ProtFlags::READ, MapFlags::SHARED);
        // SAFETY: a new mapping at an address of the kernel's choice that nobody reads.
        unsafe { mmap(std::ptr::null_mut(), 4096, prot, flags, &file, 0) }.expect("mapped");
        println!("mapped");
        let _ = io::stdin().read(&mut [0]);
    }

    #[test]
    fn what_is_mapped_counts_before_what_a_command_line_says_and_whoever_maps_it() {
        if let Some(path) = std::env::var_os(MAPS) {
            return map_and_wait(&path);
        }
        if !rustix::process::geteuid().is_root() {
            return println!("skipped: becoming another user needs root");
        }
        // Not every file system that a machine's /tmp may be on gives a mapping the numbers that it gives a file.
        let dir = tempfile::tempdir_in("/dev/shm").expect("a directory");
        std::fs::set_permissions(dir.path(), Permissions::from_mode(0o711)).expect("chmod");
        let dir = &dir.path().canonicalize().expect("its path");
        // By its descriptor every user reaches it, wherever it lies. A copy elsewhere could not be run while a process that
        // another test is just starting still has it open for writing.
        let this = File::open("/proc/self/exe").expect("this test");
        let program = &PathBuf::from(format!("/proc/self/fd/{}", this.as_raw_fd()));
        // The last one: the administrator has changed the common user meanwhile.
        for uid in [COMMON, UIDS.start() + 5, COMMON + 1] {
            let qemu = on(dir, program, "web.7", uid);
            let found = || found_on(qemu.pid(), dir).expect("looked at");
            assert_eq!(found().as_deref(), Some("web.7"), "user {uid}");
            std::fs::remove_file(dir.join("web.7")).expect("removed");
            // Of a user that the configuration does not name any more nothing tells then.
            let told = is_qemus(uid, COMMON).then_some("web.7");
            assert_eq!(found().as_deref(), told, "its name is gone");
        }
    }

    #[test]
    fn a_process_that_is_gone_lives_on_nothing() {
        let found = found_on(i32::MAX, Path::new("/dev/shm"));
        assert_eq!(found.expect("a clear no"), None);
    }

    #[test]
    fn a_file_of_another_directory_is_none_of_ours() {
        let dir = Path::new("/dev/shm/godwit");
        let on = |path: &str| {
            let word = format!("memory-backend-file,id=ram,mem-path={path},share=on");
            told(word.as_bytes(), dir)
        };
        assert_eq!(on("/dev/shm/godwit/web.3").as_deref(), Some("web.3"));
        for other in [
            "/dev/shm/godwit",
            "/dev/shm/other/web.3",
            "/dev/shm/godwit/a/web.3",
        ] {
            assert_eq!(on(other), None, "{other}");
        }
        assert_eq!(told(b"mem-path=/dev/shm/godwit/web.3", dir), None);
        let named = "7e0-7e1 rw-p 00000000 00:00 0    [anon: /dev/shm/godwit/other.1]";
        let maps =
            format!("{named}\n7f0-7f1 rw-s 00000000 00:1f 7    /dev/shm/godwit/web.3 (deleted)\n");
        let found: Vec<_> = maps
            .lines()
            .filter_map(|line| mapped_by(line, dir))
            .collect();
        let wanted = Mapped {
            name: "web.3".into(),
            device: (0, 0x1f),
            inode: 7,
            is_removed: true,
        };
        assert_eq!(found, [wanted]);
    }

    /// Its list of mappings was cut at 16 MiB, behind which it could hide its RAM file, and was taken for gone.
    #[test]
    fn a_hypervisor_that_maps_ever_more_does_not_hide_its_ram_file() {
        let dir = tempfile::tempdir().expect("a directory");
        let process = Process {
            ram_dir: dir.path(),
            uid: None,
            common_uid: COMMON,
            is_seen: true,
        };
        let other = format!(
            "7f0-7f1 rw-s 00000000 00:1f 9    /tmp/{}\n",
            "x".repeat(4000)
        );
        let own = format!(
            "7f2-7f3 rw-s 00000000 00:1f 7    {}\n",
            dir.path().join("web.3").display()
        );
        let maps = format!("{}\u{fffd}\n{own}", other.repeat(6000));
        assert!(maps.len() as u64 > TEXT_MAX);
        let found = find_mapped(maps.as_bytes(), &process).expect("read");
        assert_eq!(found.as_deref(), Some("web.3"));
    }

    /// Reading the command line of a process may wait for whoever started it: a stranger's is not read.
    #[test]
    fn a_strangers_process_is_passed_over_by_its_owner_alone() {
        if !rustix::process::geteuid().is_root() {
            return println!("skipped: becoming another user needs root");
        }
        let dir = tempfile::tempdir().expect("a directory");
        let former = COMMON + 5;
        let says = backend(dir.path(), "web.3");
        let stranger = process(former, &says);
        let users = Users::of(dir.path(), COMMON).expect("no file yet");
        assert!(!users.looks_at(former));
        let found = ram_file_of(stranger.pid(), dir.path(), &users);
        assert_eq!(found.expect("looked at"), None);
        // A common user that the configuration named before has QEMUs yet.
        std::fs::write(dir.path().join("web.3"), "").expect("a file");
        std::os::unix::fs::chown(dir.path().join("web.3"), Some(former), None).expect("chown");
        let users = Users::of(dir.path(), COMMON).expect("a file");
        let looked = [0, COMMON, *UIDS.start(), former, former + 1];
        assert_eq!(
            looked.map(|uid| users.looks_at(uid)),
            [true, true, true, true, false]
        );
    }
}
