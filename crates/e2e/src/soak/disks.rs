//! The disks of a soak's VMs: what each of them must hold, whatever happened to it, and where its image is.
//!
//! Of three VMs two boot from a disk that their host alone has, and write it all the time; the memory of every third is all that
//! it has, since only such a VM can be run twice by a person's word. What a guest was answered is read from its memory, again and
//! again, so that it is known also of a guest whose host lost its power. Owns these ledgers. A disk excuses nothing: no round
//! puts an older image back, so every write that a guest was answered is there at a round's end.

use crate::soak::checks::{Kind, Violation};
use crate::soak::site::Site;
use crate::stack::{STORES, STORES_IN, Stack};
use anyhow::{Context as _, Result, ensure};
use godwit_testkit::guest::boot_disk::{self, Spread};
use godwit_testkit::guest::disk_ledger::Ledger;
use godwit_testkit::testvol::Settings;
use rustix::fs::{fgetxattr, flistxattr};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{File, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

const BYTES: u64 = 16 << 20;
const SPREAD: Spread = Spread {
    places: 256,
    apart: 128,
    has_lives: true,
    counts_until_mib: Some(28),
};
/// How fast datastores are: a disk takes about two seconds to move.
const RATE: u64 = 10 << 20;
const LATENCY: Duration = Duration::from_micros(200);
/// The record of who has an image, with a number behind: the highest one counts.
const RECORD: &str = "user.godwit.holder.";
/// One VM in so many has no disk.
const WITHOUT: usize = 3;

/// The path at which a VM's image is in a datastore.
pub fn place(vm: &str, store: &str) -> PathBuf {
    Path::new(STORES_IN)
        .join(store)
        .join(format!("{vm}-root.raw"))
}

/// The datastore that a path is in.
pub fn store_of(path: &str) -> Option<&'static str> {
    let inside = |name: &&&str| Path::new(path).starts_with(Path::new(STORES_IN).join(name));
    STORES.iter().find(inside).copied()
}

/// The path of a VM's disk, as a view of it says.
pub fn path_in(view: &Value) -> Option<&str> {
    view["spec"]["disk"][0]["path"].as_str()
}

/// What the disks of all VMs must hold.
#[derive(Debug)]
pub struct Disks(BTreeMap<String, Mutex<Ledger>>);

impl Disks {
    pub fn new(vms: &[String]) -> Result<Self> {
        let with = vms.iter().enumerate();
        let with = with.filter(|(number, _)| number % WITHOUT != 0);
        let made = with.map(|(_, vm)| Ok((vm.clone(), Mutex::new(Ledger::new(BYTES, SPREAD)?))));
        Ok(Self(made.collect::<Result<_>>()?))
    }

    /// Whether a VM has a disk.
    pub fn has(&self, vm: &str) -> bool {
        self.0.contains_key(vm)
    }

    /// Takes note of what a guest was answered, as its memory says; that of a host to which it comes may be older.
    pub fn note(&self, vm: &str, ram: &File) {
        let (Some(ledger), Ok(progress)) = (self.0.get(vm), boot_disk::progress(ram)) else {
            return;
        };
        lock(ledger).note(progress.round);
    }

    /// What is wrong with the image of a guest that stands still.
    fn check(&self, vm: &str, ram: &File, image: &File) -> Result<Vec<String>> {
        let progress = boot_disk::progress(ram)?;
        if progress.is_wrong {
            return Ok(vec![format!("the guest read something else: {progress:?}")]);
        }
        let mut ledger = lock(self.0.get(vm).context("it has no disk")?);
        ledger.note(progress.round);
        // Of a guest that died, the last rounds are not known.
        Ok(ledger.check(image, u32::MAX)?)
    }

    /// Makes the image of a VM that has a disk, durable, for the common group of the host's QEMUs.
    pub fn make(&self, stack: &Stack, vm: &str, host: &str) -> Result<PathBuf> {
        let ledger = self.0.get(vm).context("it has no disk")?;
        let at = place(vm, STORES[0]);
        let image = stack.inside(host, &at)?;
        std::fs::write(&image, lock(ledger).image()?)?;
        let mut command = stack.machine(host)?.command("chgrp");
        let given = command.arg("nogroup").arg(&at).output()?;
        ensure!(given.status.success(), "{given:?}");
        let file = File::open(&image)?;
        file.set_permissions(Permissions::from_mode(0o660))?;
        file.sync_all()?;
        File::open(image.parent().context("no directory")?)?.sync_all()?;
        Ok(at)
    }
}

fn lock(ledger: &Mutex<Ledger>) -> std::sync::MutexGuard<'_, Ledger> {
    ledger.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Gives every host's datastores the pace at which a move of a disk takes a while.
pub fn set_pace(stack: &Stack) -> Result<()> {
    for host in stack.hosts() {
        let volumes = stack.machine(&host)?.volumes().iter();
        for volume in volumes.filter(|volume| volume.at().starts_with(STORES_IN)) {
            volume.change(|settings| {
                *settings = Settings {
                    latency: LATENCY,
                    bytes_per_second: Some(RATE),
                    shares: true,
                    ..Settings::default()
                }
            });
        }
    }
    Ok(())
}

impl Site {
    /// The description of a VM with its disk at this path.
    pub fn describe_with_disk(&self, vm: &str, path: &Path) -> Result<String> {
        let text = format!(
            "name = \"{vm}\"\nvcpus = 1\nmemory_mib = 32\naccelerator = \"tcg\"\n[[disk]]\nname = \"root\"\npath = \"{}\"\n",
            path.display()
        );
        self.stack.describe(vm, &text)
    }

    /// All files in a host's datastores, by their paths there.
    pub fn images(&self, host: &str) -> Result<BTreeSet<PathBuf>> {
        let mut found = BTreeSet::new();
        for store in STORES {
            let directory = Path::new(STORES_IN).join(store);
            for entry in std::fs::read_dir(self.stack.inside(host, &directory)?)? {
                found.insert(directory.join(entry?.file_name()));
            }
        }
        Ok(found)
    }

    /// Where a host has a whole image of a VM. Where two are, the host's own record said which one is the disk.
    pub fn image_at(&self, vm: &str, host: &str) -> Option<PathBuf> {
        let all = self.images(host).unwrap_or_default();
        let here = STORES.map(|store| place(vm, store));
        let mut here = here.into_iter().filter(|path| all.contains(path));
        match (here.next(), here.next()) {
            (Some(one), Some(_)) => Some(self.noted(vm, host).unwrap_or(one)),
            (one, _) => one,
        }
    }

    /// What a person who empties a host's state directory keeps of it: where the disks of its VMs are.
    pub fn note_disks(&self, host: &str) -> Result<()> {
        for vm in &self.vms {
            let record = format!("{}/vms/{vm}/disks.json", crate::stack::site::HOST_STATE);
            let Ok(text) = std::fs::read_to_string(self.stack.inside(host, record)?) else {
                continue; // it never had that VM
            };
            let record: Value = serde_json::from_str(&text)?;
            if let Some(path) = record["disks"][0]["path"].as_str() {
                let mut noted = self.noted.lock().unwrap_or_else(PoisonError::into_inner);
                noted.insert((vm.clone(), host.to_owned()), path.into());
            }
        }
        Ok(())
    }

    fn noted(&self, vm: &str, host: &str) -> Option<PathBuf> {
        let noted = self.noted.lock().unwrap_or_else(PoisonError::into_inner);
        noted.get(&(vm.to_owned(), host.to_owned())).cloned()
    }
}

/// What is wrong with the disk of a paused VM.
pub fn writes(site: &Site, vm: &str, home: &str) -> Option<Violation> {
    let found = || -> Result<Vec<String>> {
        let view = site.ask_host(home, &["vm", "show", vm])?;
        let path = path_in(&view).context("its host names no disk")?;
        let image = site.stack.inside(home, path)?;
        let image = File::open(&image).with_context(|| format!("{path} on {home}"))?;
        let ram = File::open(site.stack.ram_file(vm, home)?)?;
        let mut wrong = site.disks.check(vm, &ram, &image)?;
        wrong.extend(claimed_by_another(&image, vm, home)?);
        Ok(wrong)
    };
    let wrong = found().unwrap_or_else(|error| vec![format!("{error:#}")]);
    let what = format!("its disk on {home}: {}", wrong.join("; "));
    (!wrong.is_empty()).then(|| Violation::new(Kind::Writes, vm, what))
}

/// What the image says of itself, where it is not that this VM on this host has it.
fn claimed_by_another(image: &File, vm: &str, home: &str) -> Result<Option<String>> {
    let mut names = [0; 4096];
    let length = flistxattr(image, names.as_mut_slice())?;
    let names = String::from_utf8_lossy(names.get(..length).unwrap_or_default()).into_owned();
    let numbers = names
        .split('\0')
        .filter_map(|name| name.strip_prefix(RECORD)?.parse::<u64>().ok());
    let Some(last) = numbers.max() else {
        return Ok(Some("it does not say who has it".to_owned()));
    };
    let mut text = [0; 4096];
    let length = fgetxattr(image, format!("{RECORD}{last}"), text.as_mut_slice())?;
    let record: Value = serde_json::from_slice(text.get(..length).unwrap_or_default())?;
    let is_ours = record["vm"] == vm && record["holder"] == home;
    Ok((!is_ours).then(|| format!("it says of itself: {record}")))
}

/// Files in a host's datastores beside the images of the VMs that run there, or an image that is missing.
pub fn left_over(site: &Site, host: &str, homes: &BTreeMap<String, String>) -> Option<String> {
    let mut want = BTreeSet::new();
    for (vm, _) in homes
        .iter()
        .filter(|(vm, home)| *home == host && site.disks.has(vm))
    {
        for view in [
            site.ask_host(host, &["vm", "show", vm]),
            site.ask(&["vm", "show", vm]),
        ] {
            match view {
                Ok(view) => want.extend(path_in(&view).map(PathBuf::from)),
                Err(error) => return Some(format!("{error:#}")),
            }
        }
    }
    // What was kept of a disk whose source a person gave up is for a person to remove.
    match site.images(host).map(but_kept) {
        Ok(found) if found == want => None,
        Ok(found) => Some(format!("images are {found:?} instead of {want:?}")),
        Err(error) => Some(format!("{error:#}")),
    }
}

/// All files but those that were kept, with what belongs to them: `IMAGE.kept-ID.images` tells of files `IMAGE.d*`.
fn but_kept(found: BTreeSet<PathBuf>) -> BTreeSet<PathBuf> {
    let text = |path: &Path| path.to_string_lossy().into_owned();
    let own = |path: &PathBuf| {
        let path = text(path);
        let (own, _) = path.strip_suffix(".images")?.split_once(".kept-")?;
        Some(own.to_owned())
    };
    let layered: Vec<String> = found.iter().filter_map(own).collect();
    let is_part = |path: &str| {
        let mut rests = layered
            .iter()
            .filter_map(|own| path.strip_prefix(own.as_str()));
        rests.any(|rest| rest.starts_with(".d") || rest == ".vmdk")
    };
    let is_kept = |path: &PathBuf| text(path).contains(".kept-") || is_part(&text(path));
    found
        .iter()
        .filter(|path| !is_kept(path))
        .cloned()
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_kept_of_a_disk_with_snapshots_is_all_its_files_and_no_other_disks() {
        let files = |all: &[&str]| all.iter().map(PathBuf::from).collect::<BTreeSet<_>>();
        let delta = "/s/vm1-root.raw.d2-sesparse.vmdk";
        let kept = [
            "/s/vm1-root.raw.kept-7",
            "/s/vm1-root.raw.kept-7.images",
            delta,
        ];
        let others = ["/s/vm1-root.raw", "/s/vm2-root.raw.d1.vmdk"];
        let all = [&kept[..], &others[..]].concat();
        assert_eq!(but_kept(files(&all)), files(&others));
        assert_eq!(but_kept(files(&[delta])), files(&[delta]));
    }

    #[test]
    fn two_of_three_vms_have_a_disk() {
        let vms: Vec<String> = (0..6).map(|number| format!("vm{number}")).collect();
        let disks = Disks::new(&vms).unwrap();
        let with = vms.iter().filter(|vm| disks.has(vm));
        assert_eq!(with.collect::<Vec<_>>(), ["vm1", "vm2", "vm4", "vm5"]);
    }

    #[test]
    fn a_path_is_in_the_datastore_whose_directory_it_is_in() {
        for store in STORES {
            let at = place("vm1", store);
            assert_eq!(at.to_str().and_then(store_of), Some(store));
        }
        assert_eq!(store_of("/var/tmp/vm1-root.raw"), None);
    }
}
