//! Datastores of this host, and the places in them that disks move to while their guest runs.
//!
//! Owns nothing: a datastore is a directory, or a block device, that the configuration names. Refuses: one that is not there, that cannot be written
//! or has too little room, a disk that is in it already, a place where a file is, and a device that holds a disk or for which several are meant; a dry run lists all of that which it can tell at once.

use crate::agent::{ACT, Agent, NEED, Reply, blocking, unexpected};
use crate::disk_record::DiskRecord;
use crate::preflight::{can_be_made, reserved_path};
use godwit_qemu::device::device_must_take;
use godwit_qemu::disk::{length_and_use, must_be_free, open_to_look};
use godwit_qemu::disk_place::{room_of, shares_blocks};
use godwit_qemu::holding::device_must_be_nobodys;
use godwit_qemu::layered::{bytes_over, use_of_linked};
use godwit_types::datastore::{Datastore, Datastores};
use godwit_types::disk_move::{
    DiskMove, DiskMoveLimit, DiskMoveState, DiskMoves, DiskPlace, MoveDisks,
};
use godwit_types::host_api::{VmAnswer, VmRequest};
use godwit_types::text::listed;
use godwit_types::vm::{DiskSpec, VmSpec};
use godwit_types::{ApiError, DatastoreName, ErrorCode, HostName, VmName, bytes_per_s};
use rustix::fs::{StatVfsMountFlags, statvfs};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::Path;
use std::sync::Arc;

/// Where disks of a VM would come to, how much each holds, and what stands in the way of that.
#[derive(Debug)]
pub(crate) struct Found {
    places: Vec<(DiskPlace, DiskMove)>,
    refusals: Vec<ApiError>,
}

/// What is known of a host whose datastore is named.
#[derive(Clone, Copy)]
pub(crate) struct Here<'a> {
    pub host: &'a HostName,
    pub stores: &'a Datastores,
    pub state_dir: &'a Path,
    /// Of the VM whose disks are meant.
    pub record: &'a DiskRecord,
}

impl Here<'_> {
    /// Whether an image can be made there, as far as that is known by looking.
    fn must_take(
        &self,
        store: &Datastore,
        path: &str,
        of: (&VmName, &DiskSpec),
    ) -> Result<(), String> {
        if !store.is_device() {
            return must_be_free(Path::new(path));
        }
        device_must_be_nobodys(self.state_dir, Some(of.0), path)?;
        device_must_take(path, self.measured(of.1).map_or(0, |(bytes, _)| bytes))
    }

    /// What a disk's images take; nothing of one that cannot be looked at, which its VM process then says.
    fn used_bytes(&self, disk: &DiskSpec) -> u64 {
        let (bytes, own) = self.measured(disk).unwrap_or_default();
        let path = Path::new(&disk.path);
        match use_of_linked(path) {
            // It becomes one image.
            Some(all) => all.min(bytes),
            None => own.saturating_add(bytes_over(path)),
        }
    }

    /// Bytes of its image, and those that it takes.
    fn measured(&self, disk: &DiskSpec) -> std::io::Result<(u64, u64)> {
        let end = self.record.end_of(self.stores, &disk.path);
        // A device may be named by a link to it.
        let path = Path::new(&disk.path).canonicalize()?;
        length_and_use(&open_to_look(&path)?, end)
    }
}

/// Places in a datastore of this host for disks of a VM; or why none can be named.
pub(crate) fn places(here: Here<'_>, spec: &VmSpec, wish: &MoveDisks) -> Result<Found, ApiError> {
    let host = here.host;
    let refused = |code, message: String| ApiError::new(code, message).on_host(host);
    let name = &wish.to;
    let store = here.stores.get(name).ok_or_else(|| {
        let known = listed(here.stores.keys());
        refused(
            ErrorCode::InvalidRequest,
            format!("host '{host}' has no datastore '{name}' (it has {known}): name its directory or block device below [datastores] in /etc/godwit/host.toml there, as in {name} = {{ path = \"/srv/{name}\" }}, and restart its agent"),
        )
    })?;
    wish.method
        .check_without(&wish.without)
        .and_then(|()| wish.method.check_first_log(wish.first_log))
        .map_err(|why| refused(ErrorCode::InvalidRequest, why))?;
    let disks = wished(spec, wish).map_err(|why| refused(ErrorCode::InvalidRequest, why))?;
    let room = match store.is_device() {
        true => one_disk(host, name, &disks).map(|()| u64::MAX),
        false => room_in(host, name, store).map_err(|why| refused(ErrorCode::Preflight, why)),
    }?;
    let shares_blocks = !store.is_device() && shares_blocks(Path::new(&store.path));
    let (mut needed, mut refusals) = (0_u64, Vec::new());
    let places = disks.iter().map(|disk| {
        let place = DiskPlace {
            disk: disk.name.clone(),
            path: store.image_of(&spec.name, &disk.name),
            shared: store.shared,
            max_bandwidth_mbit_per_s: wish.max_bandwidth_mbit_per_s,
            method: wish.method,
            without: wish.without.clone(),
            first_log: wish.first_log,
        };
        let what = format!("disk '{}' of VM '{}'", disk.name, spec.name);
        let free = match store.holds(&disk.path) {
            true => Err(format!(
                "{what} is in datastore '{name}' of host '{host}' already"
            )),
            false => here
                .must_take(store, &place.path, (&spec.name, disk))
                .map_err(|why| {
                    format!("{what} cannot move to datastore '{name}' of host '{host}': {why}")
                }),
        };
        let used = here.used_bytes(disk);
        let is_linked = use_of_linked(Path::new(&disk.path)).is_some();
        let is_copied = !shares_blocks || is_linked || !is_beside(disk, store);
        needed = needed.saturating_add(if is_copied { used } else { 0 });
        let refusal = free.map_err(|message| refused(ErrorCode::Preflight, message));
        refusals.extend(refusal.err());
        let planned = DiskMove {
            total_bytes: used,
            left_bytes: used,
            method: wish.method,
            ..DiskMove::planned(&disk.name, &disk.path, &place.path)
        };
        (place, planned)
    });
    let places = places.collect();
    if room < needed {
        let why = lacks_room(host, name, (needed, room));
        refusals.push(refused(ErrorCode::Preflight, why));
    }
    Ok(Found { places, refusals })
}

fn lacks_room(host: &HostName, store: &DatastoreName, (needed, room): (u64, u64)) -> String {
    let mib = |bytes: u64| bytes >> 20;
    format!(
        "the disks hold {} MiB, and datastore '{store}' of host '{host}' has {} MiB free for disks that come: make room there, or choose another one",
        mib(needed),
        mib(room)
    )
}

/// How long each takes at the speed of the last move between the same places that no cap held up, if there was one; never faster than the
/// cap that is wished for now.
fn estimate(planned: &mut [DiskMove], past: &[DiskMove], wish: &MoveDisks) {
    let directory = |path: &str| Path::new(path).parent().map(Path::to_owned);
    let ends = |disk: &DiskMove| (directory(&disk.from), directory(&disk.to));
    let cap = wish.max_bandwidth_mbit_per_s.map(bytes_per_s);
    for disk in planned {
        let speed = past.iter().find_map(|past| {
            let tells = past.state == DiskMoveState::Moved
                && past.limited_by != Some(DiskMoveLimit::Cap)
                && past.method == disk.method
                && ends(past) == ends(disk);
            let seconds = past.seconds.filter(|seconds| tells && *seconds > 0.0)?;
            Some(past.total_bytes as f64 / seconds).filter(|speed| *speed > 0.0)
        });
        let speed = speed.map(|speed| cap.map_or(speed, |cap| speed.min(cap)));
        disk.eta_s = speed.map(|speed| (disk.total_bytes as f64 / speed).ceil() as u64);
    }
}

fn wished<'a>(spec: &'a VmSpec, wish: &MoveDisks) -> Result<Vec<&'a DiskSpec>, String> {
    let vm = &spec.name;
    if wish.disks.is_empty() {
        let writable: Vec<&DiskSpec> = spec.disks.iter().filter(|disk| !disk.read_only).collect();
        return match writable.is_empty() {
            true => Err(format!("VM '{vm}' has no disk that its guest may write")),
            false => Ok(writable),
        };
    }
    let mut disks: Vec<&DiskSpec> = Vec::new();
    for name in &wish.disks {
        let found = spec.disks.iter().find(|disk| disk.name == *name);
        let found = found.ok_or_else(|| spec.no_disk(name))?;
        if found.read_only {
            return Err(format!(
                "the guest of VM '{vm}' only reads disk '{name}', which is not moved: copy its file, and edit the VM while it is off"
            ));
        }
        if disks.iter().any(|disk| disk.name == *name) {
            return Err(format!("disk '{name}' is named twice"));
        }
        disks.push(found);
    }
    Ok(disks)
}

/// A device takes one, and the person says which.
fn one_disk(host: &HostName, name: &DatastoreName, disks: &[&DiskSpec]) -> Result<(), ApiError> {
    if let [_] = disks {
        return Ok(());
    }
    let names = listed(disks.iter().map(|disk| &disk.name));
    let message = format!(
        "datastore '{name}' of host '{host}' is a block device, which holds one disk: name one of {names}"
    );
    Err(ApiError::new(ErrorCode::InvalidRequest, message).on_host(host))
}

/// Whether a disk's image is in the file system of a datastore.
fn is_beside(disk: &DiskSpec, store: &Datastore) -> bool {
    let device = |path: &str| std::fs::metadata(path).map(|found| found.dev());
    matches!((device(&disk.path), device(&store.path)), (Ok(one), Ok(other)) if one == other)
}

/// Nothing can be written there.
pub(crate) fn read_only(what: &str, path: &str) -> String {
    format!(
        "{what} is mounted for reading only: {path}: see in 'dmesg' on that host whether its storage failed, and mount it for writing ('{}')",
        remount(path)
    )
}

/// Makes the file system that has a directory writable.
pub(crate) fn remount(path: &str) -> String {
    format!("mount -o remount,rw $(findmnt -no TARGET -T {path})")
}

/// Free bytes of a datastore.
fn room_in(host: &HostName, name: &DatastoreName, store: &Datastore) -> Result<u64, String> {
    let path = &store.path;
    let what = format!("datastore '{name}' of host '{host}'");
    match std::fs::metadata(path) {
        Ok(found) if found.file_type().is_block_device() => {
            return Err(format!(
                "{what} is {path}, a block device: give it the path that it has below /dev"
            ));
        }
        Ok(found) if found.is_dir() => {}
        Ok(_) => return Err(format!("{what} is no directory: {path}")),
        Err(error) => {
            return Err(format!(
                "{what} is not there: {path}: {error}: mount it, or make that directory for the group of the host's QEMUs"
            ));
        }
    }
    let room = statvfs(Path::new(path));
    let room = room.map_err(|error| format!("{what} cannot be looked at: {path}: {error}"))?;
    if room.f_flag.contains(StatVfsMountFlags::RDONLY) {
        return Err(read_only(&what, path));
    }
    Ok(room_of(&room))
}

impl Agent {
    /// What is written of a VM's disks. Reads files.
    pub(crate) fn disk_record(&self, vm: &VmName) -> DiskRecord {
        DiskRecord::load(&self.run_dir(vm), &self.records.dir(vm))
    }

    /// Begins to move disks of a VM to a datastore of this host.
    pub(crate) async fn move_disks(
        self: &Arc<Self>,
        vm: &VmName,
        wish: MoveDisks,
    ) -> Reply<DiskMoves> {
        self.closing.refuse(self.host())?;
        let spec = self.vm(vm).await?.spec;
        let agent = Arc::clone(self);
        // The datastore may hang.
        let asked = wish.clone();
        let found = blocking(move || {
            let (host, record) = (agent.host(), agent.disk_record(&spec.name));
            let here = Here {
                host,
                stores: &agent.config.datastores,
                state_dir: &agent.config.state_dir,
                record: &record,
            };
            let mut found = places(here, &spec, &asked)?;
            let paths = found.places.iter().map(|(place, _)| place.path.as_str());
            let reserved = reserved_path(&agent.config, &spec.name, paths);
            let reserved = reserved.map(|error| error.on_host(host));
            found.refusals.extend(reserved);
            let unmade = found.places.iter().filter_map(|(place, _)| {
                let disk = DiskSpec::new(&place.disk, &place.path);
                can_be_made(&agent.config, &spec, &disk).err()
            });
            found.refusals.extend(unmade);
            Ok(found)
        });
        let Found { places, refusals } = found.await?;
        let (places, planned): (Vec<_>, Vec<_>) = places.into_iter().unzip();
        if wish.dry_run {
            return self
                .plan_disk_moves(vm, &wish, places, (planned, refusals))
                .await;
        }
        if let Some(refusal) = refusals.into_iter().next() {
            return Err(refusal);
        }
        self.ask_disk_moves(vm, VmRequest::MoveDisks { places })
            .await
    }

    async fn plan_disk_moves(
        self: &Arc<Self>,
        vm: &VmName,
        wish: &MoveDisks,
        places: Vec<DiskPlace>,
        (mut disks, mut refusals): (Vec<DiskMove>, Vec<ApiError>),
    ) -> Reply<DiskMoves> {
        let asked = self.ask_disk_moves(vm, VmRequest::PlanDiskMoves { places });
        match asked.await {
            Ok(planned) => estimate(&mut disks, &planned.past, wish),
            Err(refusal) => refusals.push(refusal),
        }
        Ok(DiskMoves {
            disks,
            past: Vec::new(),
            refusals,
        })
    }

    /// How far they are.
    pub(crate) async fn disk_moves(self: &Arc<Self>, vm: &VmName) -> Reply<DiskMoves> {
        self.ask_disk_moves(vm, VmRequest::DiskMoves).await
    }

    async fn ask_disk_moves(self: &Arc<Self>, vm: &VmName, request: VmRequest) -> Reply<DiskMoves> {
        let process = self.known(vm)?;
        process.need(NEED).await?;
        match process.ask(&request, ACT).await? {
            VmAnswer::DiskMoves(moves) => Ok(moves),
            _ => Err(unexpected(vm)),
        }
    }
}

#[cfg(test)]
#[path = "datastores_tests.rs"]
pub(crate) mod tests;
