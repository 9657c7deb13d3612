//! This VM's QEMU: started, taken over, watched, ended; and what belongs to it on this host (RAM file, taps, sockets).
//!
//! Owns nothing beyond a QEMU's life: dropping a [`Hyper`] leaves QEMU running, as an upgrade of this process needs.
//! Refuses: to start a second QEMU while one is known.

use crate::console::Console;
use crate::disks::Disks;
use crate::faults::{qemu_is, reached};
use crate::files::{Paths, QemuIdentity};
use crate::guest::{Given, Guest};
use crate::input::{GuestNews, Input, Waiting};
use crate::variables::{self, Opened, Variables};
use godwit_guestmem::{HugePages, Library, Owner, RamFile, handout};
use godwit_qemu::command_line::{BackEnd, Reconnect};
use godwit_qemu::described::{Wanted, open_taps};
use godwit_qemu::group::limit_memory;
use godwit_qemu::launch::{Handout, LaunchError, LaunchSpec, adopt, launch};
use godwit_qemu::layered;
use godwit_qemu::machine::{Machine, RunState, Stopped};
use godwit_qemu::neighbours::Neighbours;
use godwit_qemu::on_ram::memory_told;
use godwit_qemu::process::QemuProcess;
use godwit_qemu::program::version_of;
use godwit_qemu::qmp::{EventKind, EventsError};
use godwit_qemu::reserved::Reserved;
use godwit_qemu::tap::Tap;
use godwit_qemu::user::{self, Common, User};
use godwit_qemu::voice::{Voice, announce};
use godwit_store::{load_json, remove_document, save_json};
use godwit_types::host_api::VmProcessConfig;
use godwit_types::migration::MigrationSpec;
use godwit_types::vm::{Accelerator, DISKS_MAX, VmSpec};
use godwit_types::{ApiError, ErrorCode, Generation, PortGroup};
use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

/// QEMU's time to come up.
const START_WAIT: Duration = Duration::from_secs(20);
/// QEMU's time to be gone after it was killed.
pub(crate) const KILL_WAIT: Duration = Duration::from_secs(10);
/// QEMU's time for an ordinary command.
pub(crate) const QMP_WAIT: Duration = Duration::from_secs(5);
/// Older ones may forget a disk whose back end was away when the guest was let run.
const FORGETS_NO_DISK: (u64, u64, u64) = (9, 0, 0);
const PANICKED: &str = "the guest panicked";
const DISK_FAILED: &str = "a disk request failed";

/// A QEMU of this VM.
#[derive(Debug)]
pub(crate) struct Hyper {
    pub identity: QemuIdentity,
    process: QemuProcess,
    pub machine: Arc<Machine>,
    pub console: Arc<Console>,
    pub ram: Arc<RamFile>,
    /// Tracking splits them; they are put back afterwards.
    pub huge_pages: Arc<HugePages>,
    /// The guest's addresses on the network.
    pub neighbours: Neighbours,
    /// Speaks in the guest's name once it runs here.
    pub voice: Voice,
    /// Those that this process serves.
    pub disks: Disks,
    /// Of a guest with UEFI.
    pub variables: Option<Variables>,
    /// Of a machine with a port for its guest's agent.
    pub guest: Option<Arc<Guest>>,
}

/// What [`launch_qemu`] makes.
struct Launched {
    hypervisor: godwit_qemu::launch::Hypervisor,
    taps: Vec<Tap>,
    disks: Disks,
    variables: Option<Variables>,
}

/// Taps must be free for the next QEMU, whatever still runs here.
impl Drop for Hyper {
    fn drop(&mut self) {
        self.voice.silence();
    }
}

/// A QEMU that is to be started, for which VM and where.
pub(crate) struct Start<'a> {
    pub config: &'a VmProcessConfig,
    pub paths: &'a Paths,
    pub spec: &'a VmSpec,
    pub accelerator: Accelerator,
    pub launch: u64,
    /// The generation under which the guest may run here.
    pub held: Option<Generation>,
    /// The migration with which the VM comes, if it does not boot here.
    pub coming: Option<&'a MigrationSpec>,
}

impl Start<'_> {
    /// Whom the host's QEMUs may all be.
    fn common<'a>(&'a self, reserved: &'a Reserved) -> Common<'a> {
        common_user(self.config, reserved)
    }
}

pub(crate) fn common_user<'a>(config: &'a VmProcessConfig, reserved: &'a Reserved) -> Common<'a> {
    let (uid, gid) = (config.qemu_uid, config.qemu_gid);
    Common {
        host: &config.host,
        user: User { uid, gid },
        reserved,
    }
}

impl Hyper {
    /// Starts QEMU; the guest does not run. A refusal says so: only who has the started QEMU can let it run.
    pub(crate) fn start(start: &Start<'_>) -> Result<Self, ApiError> {
        Self::start_paused(start).map_err(ApiError::not_begun)
    }

    fn start_paused(start: &Start<'_>) -> Result<Self, ApiError> {
        let user = user::of(start.common(&reserved(start.config)), start.spec)?;
        let ram_path = start.paths.ram_file(start.launch);
        limit_memory(start.spec.memory_bytes());
        let ram = RamFile::create(&ram_path, start.spec.memory_bytes(), Some(owner_of(user)))
            .map_err(memory)?;
        let ram = Arc::new(ram);
        let started = launch_qemu(start, user, &ram).and_then(|launched| {
            let process = &launched.hypervisor.process;
            qemu_is(process.pid());
            reached("qemu.started");
            let identity = QemuIdentity {
                pid: process.pid(),
                start_time_ticks: process.start_time_ticks(),
                accelerator: start.accelerator,
                launch: start.launch,
            };
            // Written before anything can run: a successor must know this QEMU.
            if let Err(error) = save_json(&start.paths.identity(), &identity) {
                let _ = process.kill_verified(Instant::now() + KILL_WAIT);
                return Err(internal(error));
            }
            Ok((identity, launched))
        });
        match started {
            Ok((identity, launched)) => Ok(Self::started(start, identity, launched, ram)),
            Err(error) => {
                remove(&ram_path);
                remove_sockets(start.paths, start.launch);
                Err(error)
            }
        }
    }

    fn started(
        start: &Start<'_>,
        identity: QemuIdentity,
        launched: Launched,
        ram: Arc<RamFile>,
    ) -> Self {
        let machine = Arc::new(launched.hypervisor.machine);
        let kept = start.paths.console(start.launch);
        Self {
            guest: Guest::follow(&machine, start.paths, start.launch),
            neighbours: Neighbours::load(start.paths.addresses(start.launch)),
            voice: Voice::new(launched.taps),
            huge_pages: HugePages::of(identity.pid, &ram),
            identity,
            process: launched.hypervisor.process,
            console: Console::new(Arc::clone(&machine), kept),
            machine,
            ram,
            disks: launched.disks,
            variables: launched.variables,
        }
    }

    /// Takes over a QEMU that a predecessor left, whose disks are served: once it answers on one of its control sockets,
    /// each with a time of its own, and says what it does.
    pub(crate) fn take_over(
        paths: &Paths,
        identity: &QemuIdentity,
        (ram, disks, variables): (Arc<RamFile>, Disks, Option<Variables>),
    ) -> Result<(Self, RunState), ApiError> {
        let connect = |index| {
            adopt(
                identity.pid,
                identity.start_time_ticks,
                &paths.monitor(identity.launch, index),
                Instant::now() + QMP_WAIT,
            )
        };
        let taken = connect(0).or_else(|_| connect(1)).map_err(hypervisor)?;
        let state = taken.machine.query_status(Instant::now() + QMP_WAIT);
        let state = state.map_err(internal)?;
        let machine = Arc::new(taken.machine);
        let kept = paths.console(identity.launch);
        let hyper = Self {
            guest: Guest::follow(&machine, paths, identity.launch),
            huge_pages: HugePages::of(identity.pid, &ram),
            identity: identity.clone(),
            process: taken.process,
            console: Console::take_over(Arc::clone(&machine), kept),
            machine,
            ram,
            neighbours: Neighbours::load(paths.addresses(identity.launch)),
            voice: Voice::default(),
            disks,
            variables,
        };
        Ok((hyper, state))
    }

    /// Stops the guest once its disks rest. To `leave`, all that they were asked for must be answered: what is only noted as
    /// under way stays on this host. A guest that was not stopped has its disks back; of one that was, they rest on.
    pub(crate) fn stop(&self, leave: bool) -> Result<Stopped, ApiError> {
        let refused = |error: String| ApiError::new(ErrorCode::Hypervisor, error);
        let stopped = self.disks.rest().and_then(|lives| {
            if leave {
                self.disks.must_have_room()?;
            }
            if leave && lives.contains(&None) {
                return Err("QEMU is not connected to all of the guest's disks".to_owned());
            }
            let stopped = self.machine.stop(Instant::now() + QMP_WAIT);
            let stopped = stopped.map_err(|error| error.to_string())?;
            Ok((stopped, lives))
        });
        let stopped = stopped.inspect_err(|_| self.disks.go());
        let (stopped, lives) = stopped.map_err(refused)?;
        if leave {
            self.disks.are_at_rest(&lives).map_err(refused)?;
            self.disks.give_back().map_err(refused)?;
        }
        Ok(stopped)
    }

    /// Resets the guest while its disks rest: QEMU asks for their queues, and answers nobody before it has them. Disks that rested
    /// before, since the guest stands still, rest on.
    pub(crate) fn reset(&self) -> Result<(), ApiError> {
        let rested = self.disks.do_rest();
        let reset = self.disks.rest().and_then(|_| {
            let reset = self.machine.system_reset(Instant::now() + QMP_WAIT);
            reset.map_err(|error| error.to_string())
        });
        if !rested {
            self.disks.go();
        }
        reset.map_err(|error| ApiError::new(ErrorCode::Hypervisor, error))
    }

    /// Serves again what was not. Returns whether QEMU has forgotten a disk of the guest that runs, as version 7.2 does where
    /// the guest was let run while the disk was away: it starts it only when the guest is let run once more.
    pub(crate) fn has_forgotten_a_disk(&self) -> bool {
        if !self.disks.mend() || self.machine.version() >= FORGETS_NO_DISK {
            return false;
        }
        let deadline = Instant::now() + QMP_WAIT;
        let forgotten =
            |disk: &usize| matches!(self.machine.has_forgotten_disk(*disk, deadline), Ok(true));
        self.disks.mute().iter().any(forgotten) && self.disks.may_repair()
    }

    /// Waits until QEMU is connected to the disks of a guest that stands still.
    pub(crate) fn wait_for_disks(&self, deadline: Instant) -> Result<(), String> {
        let runs = || {
            matches!(
                self.machine.query_status(Instant::now() + QMP_WAIT),
                Ok(RunState::Running)
            )
        };
        match self.disks.is_empty() || runs() {
            true => Ok(()),
            false => self.disks.wait_for_qemu(deadline, || self.is_alive()),
        }
    }

    /// Writes who it is, for a successor.
    pub(crate) fn keep_identity(&self, paths: &Paths) -> Result<(), ApiError> {
        std::fs::create_dir_all(paths.run.join("qemu")).map_err(internal)?;
        save_json(&paths.identity(), &self.identity).map_err(internal)
    }

    /// Tells the network that the guest runs here since just now.
    pub(crate) fn announce(&self, spec: &VmSpec, bridges: &BTreeMap<PortGroup, String>) {
        let known = self.neighbours.read();
        announce(&self.voice, &self.machine, spec, &known, bridges);
    }

    /// The process that is watched and killed.
    pub(crate) fn pid(&self) -> i32 {
        self.identity.pid
    }

    /// Whether it lives, as the system says, which is sooner than its events.
    pub(crate) fn is_alive(&self) -> bool {
        self.process.is_alive()
    }

    /// Ends QEMU and waits until it is gone.
    pub(crate) fn kill(&self) -> Result<(), ApiError> {
        self.huge_pages.leave();
        self.process
            .kill_verified(Instant::now() + KILL_WAIT)
            .map_err(internal)
    }

    /// Passes QEMU's events on until it ends.
    pub(crate) fn watch(&self, inputs: Sender<Input>) -> std::io::Result<()> {
        let events = self.machine.events();
        let launch = self.identity.launch;
        let exit = self.process.exit()?;
        std::thread::Builder::new()
            .name("qemu-events".into())
            .spawn(move || {
                let waiting = Arc::new(Waiting::default());
                let tell = |news| {
                    let Some(place) = waiting.place(&news) else {
                        return true;
                    };
                    let told = inputs.send(Input::Guest {
                        launch,
                        news,
                        place,
                    });
                    told.is_ok()
                };
                loop {
                    match events.next(Instant::now() + Duration::from_secs(3600)) {
                        Ok(event) => {
                            if guest_news(&event.kind).is_some_and(|news| !tell(news)) {
                                return;
                            }
                        }
                        Err(EventsError::Deadline) => {}
                        Err(_) => break,
                    }
                }
                // The control socket closes an instant before the process is gone. A QEMU that lives on without one is of no
                // use to anybody but its guest: it is waited for.
                exit.wait();
                tell(GuestNews::Died);
            })?;
        Ok(())
    }
}

/// The memory of a QEMU that a predecessor left. It has to be as long as the VM's description says that its memory is; where
/// there is none, as QEMU was told.
pub(crate) fn open_ram(
    paths: &Paths,
    identity: &QemuIdentity,
    described: Option<u64>,
) -> Result<RamFile, ApiError> {
    let told = || memory_told(identity.pid).map_err(internal);
    let bytes = match described {
        Some(bytes) => bytes,
        None => told()?.ok_or_else(|| {
            let pid = identity.pid;
            internal(format!("neither a description nor QEMU's command line (process {pid}) says how much memory the VM has"))
        })?,
    };
    RamFile::open(&paths.ram_file(identity.launch), bytes).map_err(memory)
}

/// Where no file of a VM may be: this host's records, sockets and guests' memory, and what its agent names beside these.
pub(crate) fn reserved(config: &VmProcessConfig) -> Reserved {
    // `STATE/vms/NAME` and `RUN/vms/NAME`.
    let own = [&config.state_dir, &config.run_dir];
    let own = own.map(|dir| Path::new(dir).ancestors().nth(2).map(Path::to_owned));
    let named = config.reserved_dirs.iter().map(PathBuf::from);
    let dirs = own.into_iter().flatten().chain(named).collect();
    Reserved::new(dirs, PathBuf::from(&config.ram_dir))
}

fn guest_news(kind: &EventKind) -> Option<GuestNews> {
    match kind {
        EventKind::Shutdown { guest, reason } => shutdown_news(*guest, reason),
        EventKind::GuestPanicked => Some(GuestNews::Halted(PANICKED.into())),
        EventKind::BlockIoError => Some(GuestNews::Halted(DISK_FAILED.into())),
        EventKind::Reset { .. } => Some(GuestNews::Reset),
        _ => None,
    }
}

/// Only the guest's own wish is one. Whoever ends QEMU (a signal, a `quit`) makes it die, which is seen when it is gone.
fn shutdown_news(guest: bool, reason: &str) -> Option<GuestNews> {
    match reason {
        _ if crate::faults::planted("any-shutdown-is-a-wish") => Some(GuestNews::Shutdown),
        "" | "guest-shutdown" if guest => Some(GuestNews::Shutdown),
        "guest-panic" => Some(GuestNews::Halted(PANICKED.into())),
        _ => None,
    }
}

/// What a machine that stands in this state did while nobody listened; nothing where it may go on.
pub(crate) fn news_of(state: &RunState) -> Option<GuestNews> {
    let why = match state {
        RunState::Shutdown => return Some(GuestNews::Shutdown),
        RunState::GuestPanicked => PANICKED,
        RunState::IoError => DISK_FAILED,
        RunState::InternalError => "an internal error of the hypervisor stopped the guest",
        RunState::Watchdog => "the guest's watchdog fired",
        _ => return None,
    };
    Some(GuestNews::Halted(why.into()))
}

fn owner_of(user: User) -> Owner {
    let User { uid, gid } = user;
    Owner { uid, gid }
}

fn launch_qemu(start: &Start<'_>, user: User, ram: &Arc<RamFile>) -> Result<Launched, ApiError> {
    let (host, groups) = (&start.config.host, &start.config.port_groups);
    let taps = open_taps(start.spec, host, groups)?;
    // Those that QEMU opens itself.
    let images = match start.spec.serves_disks() {
        true => Vec::new(),
        false => {
            let (vm, disks) = (&start.spec.name, &start.spec.disks);
            let opened = user::open_disks(start.common(&reserved(start.config)), vm, disks, user)?;
            must_be_whole(opened, start)?
        }
    };
    let uefi = variables::open(start)?;
    // Of a start that was cut short before anybody could know it.
    remove_sockets(start.paths, start.launch);
    let deadline = Instant::now() + START_WAIT;
    let (back_ends, reconnect, disks) = served(start, user, ram, &images, deadline)?;
    let library = Library::make(&start.paths.state).map_err(memory)?;
    let device = handout::open_device().map_err(memory)?;
    let socket = start.paths.handout(start.launch);
    std::fs::create_dir_all(start.paths.run.join("qemu")).map_err(internal)?;
    let given = Given::make(start.spec, &start.paths.agent(start.launch)).map_err(internal)?;
    let listener = handout::listen(&socket).map_err(memory)?;
    let monitors: Vec<PathBuf> = (0..2)
        .map(|index| start.paths.monitor(start.launch, index))
        .collect();
    let wanted = Wanted {
        spec: start.spec,
        accelerator: start.accelerator,
        ram_file: ram.path(),
        flash: uefi.as_ref().map(Opened::flash),
        agent_fd: given.agent_fd(),
        seed_fd: given.seed_fd(),
        incoming: start.coming.is_some(),
    };
    let spec = LaunchSpec {
        binary: PathBuf::from(&start.config.qemu),
        machine: wanted.machine(&taps, back_ends, reconnect),
        monitors,
        uid: user.uid,
        gid: user.gid,
        handout: Some(Handout {
            library: library.fd(),
            uffd_device: device.as_fd(),
            listener: listener.as_fd(),
        }),
        inherited: taps
            .iter()
            .map(AsFd::as_fd)
            .chain(images.iter().map(AsFd::as_fd))
            .chain(uefi.iter().flat_map(Opened::fds))
            .chain(given.fds())
            .collect(),
    };
    let launched = launch(&spec, deadline).map_err(hypervisor)?;
    let pid = launched.process.pid().unsigned_abs();
    if let Err(error) = handout::check(&socket, pid, deadline, || launched.machine.stderr_tail()) {
        let _ = launched.process.kill_verified(Instant::now() + KILL_WAIT);
        return Err(memory(error));
    }
    Ok(Launched {
        hypervisor: launched,
        taps,
        disks,
        variables: Variables::begin(uefi)?,
    })
}

/// What QEMU finds behind each disk: an image that it gets, or a socket at which this process serves one from now on.
/// QEMU itself would serve a part of a disk as the whole.
fn must_be_whole(images: Vec<OwnedFd>, start: &Start<'_>) -> Result<Vec<OwnedFd>, ApiError> {
    let images: Vec<File> = images.into_iter().map(File::from).collect();
    for (image, disk) in images.iter().zip(&start.spec.disks) {
        layered::must_be_whole(image, &disk.path)
            .map_err(|why| ApiError::new(ErrorCode::Hypervisor, why).on_host(&start.config.host))?;
    }
    Ok(images.into_iter().map(OwnedFd::from).collect())
}

fn served(
    start: &Start<'_>,
    user: User,
    ram: &Arc<RamFile>,
    images: &[OwnedFd],
    deadline: Instant,
) -> Result<(Vec<BackEnd>, Reconnect, Disks), ApiError> {
    let (config, paths, spec) = (start.config, start.paths, start.spec);
    let qemu = (user, start.launch);
    let right = (start.held, start.coming);
    let disks = Disks::begin(config, paths, spec, qemu, ram, right)?;
    let served = disks.back_ends();
    if served.is_empty() {
        let own = |image: &OwnedFd| BackEnd::Qemu {
            fd: image.as_raw_fd(),
        };
        return Ok((images.iter().map(own).collect(), Reconnect::Second, disks));
    }
    let program = Path::new(&config.qemu);
    let version = version_of(program, (user.uid, user.gid), deadline);
    let version = version.map_err(|error| {
        let host = &config.host;
        let message = format!(
            "host '{host}' cannot ask {} for its version: {error}",
            program.display()
        );
        ApiError::new(ErrorCode::Hypervisor, message).on_host(host)
    })?;
    Ok((served, Reconnect::of(version), disks))
}

/// Removes everything that a QEMU of this VM left on this host.
pub(crate) fn remove_leftovers(paths: &Paths) {
    if let Ok(Some(identity)) = load_json::<QemuIdentity>(&paths.identity()) {
        remove(&paths.ram_file(identity.launch));
        remove_sockets(paths, identity.launch);
        remove(&paths.pressed());
        remove(&paths.waits_for_room());
    }
    let _ = remove_document(&paths.identity());
}

fn remove_sockets(paths: &Paths, launch: u64) {
    remove(&paths.monitor(launch, 0));
    remove(&paths.monitor(launch, 1));
    remove(&paths.handout(launch));
    remove(&paths.agent(launch));
    remove(&paths.frozen(launch));
    (0..DISKS_MAX).for_each(|disk| remove(&paths.ram_files.disk_socket(launch, disk)));
    remove(&paths.addresses(launch));
    remove(&paths.console(launch));
}

fn remove(path: &Path) {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            tracing::warn!(path = %path.display(), %error, "a file is left behind");
        }
        _ => {}
    }
}

pub(crate) fn internal(error: impl std::fmt::Display) -> ApiError {
    ApiError::new(ErrorCode::Internal, error.to_string())
}

pub(crate) fn memory(error: godwit_guestmem::Error) -> ApiError {
    let code = match error {
        godwit_guestmem::Error::OutOfMemory { .. } => ErrorCode::OutOfMemory,
        godwit_guestmem::Error::KernelTooOld { .. } => ErrorCode::Incompatible,
        godwit_guestmem::Error::Length { .. } => ErrorCode::NotMigratable,
        _ => ErrorCode::Internal,
    };
    ApiError::new(code, error.to_string())
}

fn hypervisor(error: LaunchError) -> ApiError {
    ApiError::new(ErrorCode::Hypervisor, error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_guest_s_own_shutdown_is_its_wish() {
        let kind = |guest, reason: &str| EventKind::Shutdown {
            guest,
            reason: reason.into(),
        };
        let wish = Some(GuestNews::Shutdown);
        assert_eq!(guest_news(&kind(true, "guest-shutdown")), wish);
        for reason in ["host-signal", "host-qmp-quit", "host-ui", "host-error", ""] {
            assert_eq!(guest_news(&kind(false, reason)), None, "{reason}");
        }
        let panicked = Some(GuestNews::Halted(PANICKED.into()));
        assert_eq!(guest_news(&kind(true, "guest-panic")), panicked);
    }
}
