//! A guest whose disk is linked to an image on a file system of its own, which is mounted for reading only.

use super::snapshots::description_of;
use super::{BYTES, LONG, LOOK_EVERY, Site, tail};
use anyhow::{Error, Result, ensure};
use godwit_e2e::guests::{disk, vm_with_disk};
use godwit_qemu::make_disk::{Maker, Progress};
use godwit_qemu::reserved::Reserved;
use godwit_qemu::user::User;
use godwit_testkit::guest::boot_disk;
use godwit_types::vm::{Accelerator, DiskSpec};
use std::fs::{File, Permissions};
use std::os::unix::fs::{FileExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant, SystemTime};

/// As which the hosts' QEMUs run under emulation.
const NOBODY: User = User {
    uid: 65_534,
    gid: 65_534,
};
/// What was written just now has no disk linked to it.
const LONG_AGO: Duration = Duration::from_secs(60);

/// The image to which the disk is linked, until this is dropped.
pub struct Golden {
    directory: PathBuf,
    content: Vec<u8>,
}

impl Golden {
    fn image(&self) -> PathBuf {
        self.directory.join("base.raw")
    }

    /// With all that a disk of [`Site`] has in the beginning.
    fn make(directory: PathBuf) -> Result<Self> {
        std::fs::create_dir(&directory)?;
        mount(&["-t", "tmpfs", "-o", "mode=0755", "golden"], &directory)?;
        // From here on it is unmounted whatever comes.
        let mut golden = Self {
            directory,
            content: Vec::new(),
        };
        let file = File::create(golden.image())?;
        file.set_len(BYTES)?;
        file.write_all_at(&boot_disk::sector()?, 0)?;
        file.write_all_at(&tail(0), 8192)?;
        file.write_all_at(&[7; 512], BYTES - 512)?;
        file.set_permissions(Permissions::from_mode(0o644))?;
        file.set_modified(SystemTime::now() - LONG_AGO)?;
        drop(file);
        golden.content = std::fs::read(golden.image())?;
        mount(&["-o", "remount,ro"], &golden.directory)?;
        Ok(golden)
    }

    /// Nobody has written it.
    pub fn is_unchanged(&self) -> Result<()> {
        let now = std::fs::read(self.image())?;
        ensure!(now == self.content, "what disks are linked to was written");
        Ok(())
    }
}

impl Drop for Golden {
    fn drop(&mut self) {
        // Whoever has the image open keeps it for so long.
        let mut command = Command::new("umount");
        let _ = command.arg("--lazy").arg(&self.directory).status();
    }
}

fn mount(words: &[&str], directory: &Path) -> Result<()> {
    let mounted = Command::new("mount").args(words).arg(directory).status()?;
    ensure!(mounted.success(), "mount {words:?} failed");
    Ok(())
}

impl Site {
    /// As [`Site::local`], with a disk that is linked to such an image.
    pub fn linked() -> Result<(Self, Golden)> {
        let directory = tempfile::tempdir_in("/var/tmp")?;
        std::fs::set_permissions(directory.path(), Permissions::from_mode(0o755))?;
        let pair = Self::on_the_machine(Accelerator::Tcg, directory.path())?;
        let golden = Golden::make(directory.path().join("golden"))?;
        let path = directory.path().join("images/root.raw");
        let spec = vm_with_disk(pair.dir(), &path, false)?;
        let linked = DiskSpec {
            from: Some(golden.image().to_string_lossy().into_owned()),
            linked: true,
            ..disk("root", &path, false)?
        };
        let maker = Maker {
            vm: &spec.name,
            user: NOBODY,
            reserved: &Reserved::default(),
            stores: std::slice::from_ref(&golden.directory),
        };
        let made = maker.make(&linked, &Progress::default());
        made.map_err(Error::msg)?;
        pair.boot(&spec)?;
        let site = Self {
            pair,
            path,
            others: Vec::new(),
            _directory: directory,
        };
        site.goes_on(&site.pair.a, 10)?;
        Ok((site, golden))
    }

    /// The disk is where it was, linked as before, with no log over it; nothing of it is in the other directory.
    pub fn is_linked_still(&self, other: &Path) -> Result<()> {
        let deadline = Instant::now() + LONG;
        loop {
            let described = std::fs::read(description_of(&self.path))?;
            let described: serde_json::Value = serde_json::from_slice(&described)?;
            let images = described["images"].as_object().map_or(0, |all| all.len());
            let has = |what| described.get(what).is_some();
            let there = std::fs::read_dir(other)?.count();
            if images == 2 && !has("elsewhere") && !has("leaving") && there == 0 {
                return Ok(());
            }
            ensure!(
                Instant::now() < deadline,
                "{there} files are at the other place, and it is {described}"
            );
            std::thread::sleep(LOOK_EVERY);
        }
    }
}
