//! What this host's QEMU shows when it is started as for a VM: CPU models, the preloaded library, a guest that runs.
//!
//! Owns a directory while it asks. Refuses: nothing; what fails is a sentence. Blocks, within the time it is given.

use crate::config::HostConfig;
use crate::users::User;
use godwit_guestmem::{Library, handout, library};
use godwit_qemu::command_line;
use godwit_qemu::launch::Handout;
use godwit_qemu::trial::{CpuFacts, Reached, Shown, Trial, TrialDir, TrialPlace};
use godwit_types::cpu::{CpuWish, SAFE_MODEL, greatest};
use godwit_types::vm::Accelerator;
use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// QEMU's time to start and answer.
const START: Duration = Duration::from_secs(10);
/// The guest's processor time, of which it needs a tenth.
const RUN: Duration = Duration::from_secs(2);

/// What is started, and how.
#[derive(Debug, Clone)]
pub struct TrialSetting {
    qemu: PathBuf,
    base: PathBuf,
    user: User,
    accelerators: Vec<Accelerator>,
}

/// What a trial of QEMU on this host has shown.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tried {
    /// What each accelerator can give a guest's CPU, or why that is not known.
    pub cpus: BTreeMap<Accelerator, Result<CpuFacts, String>>,
    /// Why QEMU hands out no userfaultfd, so that no guest of it could leave; none if it does, or never started.
    pub no_handout: Option<String>,
}

/// What came of a guest of ours under one accelerator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuestRun {
    pub accelerator: Accelerator,
    /// The CPU that it had.
    pub cpu: String,
    /// What `auto` would choose among this host's own models; none if it can give none of them.
    pub auto: Option<&'static str>,
    /// How far it came, or QEMU's words.
    pub shown: Result<Shown, String>,
}

/// The library and its descriptors, for one start of QEMU.
struct Preloaded {
    library: Library,
    device: OwnedFd,
    socket: PathBuf,
    listener: OwnedFd,
}

impl Preloaded {
    fn make(dir: &Path) -> Result<Self, godwit_guestmem::Error> {
        let socket = dir.join("handout");
        // Of the start before in the same directory.
        let _ = std::fs::remove_file(&socket);
        Ok(Self {
            library: Library::make(dir)?,
            device: handout::open_device()?,
            listener: handout::listen(&socket)?,
            socket,
        })
    }

    fn handout(&self) -> Handout<'_> {
        Handout {
            library: self.library.fd(),
            uffd_device: self.device.as_fd(),
            listener: self.listener.as_fd(),
        }
    }
}

impl TrialSetting {
    /// As the configuration has VMs run, with every accelerator that this host may use.
    pub fn new(config: &HostConfig, user: User) -> Self {
        let has_kvm = Path::new("/dev/kvm").exists();
        let accelerators = match config.accelerator {
            Accelerator::Auto if has_kvm => vec![Accelerator::Kvm, Accelerator::Tcg],
            Accelerator::Auto => vec![Accelerator::Tcg],
            given => vec![given],
        };
        let base = match config.run_dir.is_dir() {
            true => config.run_dir.clone(),
            false => PathBuf::from("/run"),
        };
        Self {
            qemu: config.qemu.clone(),
            base,
            user,
            accelerators,
        }
    }

    fn place<'a>(&'a self, dir: &'a TrialDir, accelerator: Accelerator) -> TrialPlace<'a> {
        TrialPlace {
            binary: &self.qemu,
            dir,
            uid: self.user.uid,
            gid: self.user.gid,
            accelerator: match accelerator {
                Accelerator::Kvm => command_line::Accelerator::Kvm,
                Accelerator::Auto | Accelerator::Tcg => command_line::Accelerator::Tcg,
            },
        }
    }

    /// Starts QEMU with each accelerator and asks it; no guest runs.
    pub fn ask(&self) -> Tried {
        let mut tried = Tried::default();
        for &accelerator in &self.accelerators {
            let asked = self.ask_one(accelerator).map(|(cpus, no_handout)| {
                tried.no_handout = tried.no_handout.take().or(no_handout);
                cpus
            });
            tried.cpus.insert(accelerator, asked);
        }
        tried
    }

    fn ask_one(&self, accelerator: Accelerator) -> Result<(CpuFacts, Option<String>), String> {
        let deadline = Instant::now() + START;
        let dir = TrialDir::create(&self.base).map_err(|error| self.no_dir(&error))?;
        // A host without a usable userfaultfd is told so by its own check.
        let preloaded = Preloaded::make(dir.path()).ok();
        let place = self.place(&dir, accelerator);
        let handout = preloaded.as_ref().map(Preloaded::handout);
        let trial = Trial::start(&place, (SAFE_MODEL, &[]), false, handout, deadline);
        let trial = trial.map_err(|error| error.to_string())?;
        let cpus = trial.cpus(deadline).map_err(|error| error.to_string())?;
        let no_handout = preloaded.and_then(|preloaded| {
            let pid = u32::try_from(trial.pid()).ok()?;
            if !library::is_loaded(pid).unwrap_or(true) {
                return Some("QEMU runs without the preloaded library".to_owned());
            }
            let asked = handout::request_uffd(&preloaded.socket, pid, deadline);
            asked.err().map(|error| error.to_string())
        });
        Ok((cpus, no_handout))
    }

    /// Runs a guest with each accelerator that was asked.
    pub fn run_guests(&self, tried: &Tried) -> Vec<GuestRun> {
        let each = tried.cpus.iter().map(|(accelerator, cpus)| match cpus {
            Ok(cpus) => self.run_guest(*accelerator, cpus),
            Err(why) => GuestRun {
                accelerator: *accelerator,
                cpu: SAFE_MODEL.to_owned(),
                auto: None,
                shown: Err(why.clone()),
            },
        });
        each.collect()
    }

    /// With the model that `auto` would choose, else with what runs at all: on some machines KVM offers a feature and
    /// then refuses its register, so that QEMU gives up with the CPU's own model but not without that feature.
    fn run_guest(&self, accelerator: Accelerator, cpus: &CpuFacts) -> GuestRun {
        let auto = auto_model(accelerator, cpus);
        let wishes: &[&str] = match auto {
            Some(model) => &[model],
            None => &["host", "host,-arch-capabilities", "max"],
        };
        let (cpu, shown) = first_that_runs(wishes, |cpu| self.run_one(accelerator, cpu));
        GuestRun {
            accelerator,
            cpu: cpu.to_owned(),
            auto,
            shown,
        }
    }

    fn run_one(&self, accelerator: Accelerator, cpu: &str) -> Result<Shown, String> {
        let wish = CpuWish::parse(cpu);
        let dir = TrialDir::create(&self.base).map_err(|error| self.no_dir(&error))?;
        let preloaded = Preloaded::make(dir.path()).ok();
        let trial = Trial::start(
            &self.place(&dir, accelerator),
            (&wish.model, &wish.features),
            accelerator == Accelerator::Kvm && !wish.is_of_one_host(),
            preloaded.as_ref().map(Preloaded::handout),
            Instant::now() + START,
        );
        let trial = trial.map_err(|error| error.to_string())?;
        let shown = trial.run(RUN);
        let shown = shown.map_err(|error| error.to_string())?;
        match shown.reached {
            Reached::Nothing => Err(shown.stopped_by),
            _ => Ok(shown),
        }
    }

    fn no_dir(&self, error: &std::io::Error) -> String {
        format!(
            "cannot make a directory in {}: {error}",
            self.base.display()
        )
    }
}

/// The first of these CPUs with which a guest runs, and how far it came; else why it does with none of them, one by one.
fn first_that_runs<'a>(
    wishes: &[&'a str],
    run: impl Fn(&str) -> Result<Shown, String>,
) -> (&'a str, Result<Shown, String>) {
    let mut refused = Vec::new();
    for &cpu in wishes {
        match run(cpu) {
            Ok(shown) => return (cpu, Ok(shown)),
            Err(why) => refused.push(format!("with CPU {cpu}: {why}")),
        }
    }
    let first = wishes.first().copied().unwrap_or(SAFE_MODEL);
    (first, Err(refused.join("; ")))
}

/// What `auto` chooses where no other host has a say.
fn auto_model(accelerator: Accelerator, cpus: &CpuFacts) -> Option<&'static str> {
    let is_whole = |model: &str| cpus.lacking(model).is_some_and(<[String]>::is_empty);
    if accelerator != Accelerator::Kvm && is_whole(SAFE_MODEL) {
        return Some(SAFE_MODEL);
    }
    greatest(is_whole)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_qemu_behind_a_script_that_drops_the_preloaded_library_is_found_before_any_guest_starts() {
        let base = tempfile::tempdir_in("/dev/shm").unwrap();
        std::fs::set_permissions(base.path(), PermissionsExt::from_mode(0o711)).unwrap();
        let script = base.path().join("qemu-wrapper");
        let text = "#!/bin/sh\nunset LD_PRELOAD\nexec /usr/bin/qemu-system-x86_64 \"$@\"\n";
        std::fs::write(&script, text).unwrap();
        std::fs::set_permissions(&script, PermissionsExt::from_mode(0o755)).unwrap();
        let ask = |qemu: &Path| {
            let setting = TrialSetting {
                qemu: qemu.to_owned(),
                base: base.path().to_owned(),
                user: User {
                    uid: 61_235,
                    gid: 61_235,
                },
                accelerators: vec![Accelerator::Tcg],
            };
            let tried = setting.ask();
            let asked = &tried.cpus[&Accelerator::Tcg];
            assert!(asked.is_ok(), "{asked:?}");
            tried.no_handout
        };
        assert_eq!(ask(Path::new("/usr/bin/qemu-system-x86_64")), None);
        let why = ask(&script).expect("its guests could never leave");
        assert!(why.contains("without the preloaded library"), "{why}");
    }

    #[test]
    fn each_cpu_that_was_tried_in_vain_is_told_with_its_reason() {
        let run = |cpu: &str| match cpu {
            "max" => Ok(Shown {
                reached: Reached::LongMode,
                stopped_by: String::new(),
            }),
            _ => Err(format!("{cpu} lacks something")),
        };
        let (cpu, shown) = first_that_runs(&["host", "max"], run);
        assert_eq!((cpu, shown.is_ok()), ("max", true));
        let (_, shown) = first_that_runs(&["host", "host,-arch-capabilities"], run);
        let why = "with CPU host: host lacks something; with CPU host,-arch-capabilities: host,-arch-capabilities lacks something";
        assert_eq!(shown.unwrap_err(), why);
    }
}
