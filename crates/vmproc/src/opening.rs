//! How a process comes to its VM: it takes the VM's seat, serves, looks at QEMU, and has the VM.
//!
//! Each step is a type that the next one consumes, so that no other order compiles. The lock comes before anything is
//! read. This process serves before it looks at QEMU: that may take long, people ask meanwhile, and what QEMU needs of
//! this process must be there before QEMU is asked anything. QEMU comes before the ownership core, which has to know
//! whether a guest runs. Owns what was made until the [`Vm`] does. Refuses: a VM whose lock another process has.

use crate::actions::CONT_WAIT;
use crate::adoption::{self, Known, Looked};
use crate::came::Came;
use crate::console::Desk;
use crate::disk_work::DiskWork;
use crate::disks;
use crate::files::Paths;
use crate::hypervisor::{Hyper, QMP_WAIT, news_of};
use crate::input::{GuestNews, Input};
use crate::left_over::LeftOver;
use crate::renewal::Handed;
use crate::room::Room;
use crate::server::{self, AtHand};
use crate::snapshotting::Lists;
use crate::timers::Timers;
use crate::unsaved::Unsaved;
use crate::vm::{Outcome, Vm};
use anyhow::Context as _;
use godwit_ownership::{Action, HostRecord, Qemu, RecordError, VmCore};
use godwit_qemu::group;
use godwit_qemu::machine::RunState;
use godwit_qemu::rate::Rate;
use godwit_store::{StoreError, VmStore, load_json};
use godwit_types::host_api::{MigrationNote, NOTE_FILE, VmProcessConfig};
use godwit_types::vm::VmSpec;
use godwit_types::{Generation, VmName};
use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Instant;

/// This process has the VM's lock, and knows what the VM's files say.
pub(crate) struct Seat {
    config: VmProcessConfig,
    paths: Paths,
    store: VmStore,
    record: HostRecord,
    spec: Option<VmSpec>,
    note: Option<MigrationNote>,
    handed: Handed,
}

/// The socket is up: whoever asks gets an answer.
pub(crate) struct Serving {
    seat: Seat,
    inputs: Sender<Input>,
    received: Receiver<Input>,
    at_hand: AtHand,
}

/// It is known whether the VM has a QEMU; one that lives is this process's, and watched.
pub(crate) struct Adopted {
    serving: Serving,
    hyper: Option<Hyper>,
    qemu: Qemu,
    /// What the guest did while nobody listened.
    found: Option<GuestNews>,
}

impl Seat {
    /// Takes the VM's lock and reads its journal.
    pub(crate) fn take(config: VmProcessConfig, handed: Handed) -> anyhow::Result<Self> {
        let dir = &config.state_dir;
        let state = VmStore::state_of(Path::new(dir))
            .with_context(|| format!("state_dir {dir} is not of the form STATE/vms/NAME"))?;
        let store = VmStore::open(state, &config.vm)?;
        let paths = Paths::settle(&config)?;
        std::fs::create_dir_all(&paths.run)?;
        std::fs::create_dir_all(&config.run_dir)?;
        let record = store
            .load()?
            .unwrap_or_else(|| HostRecord::absent(config.vm.clone()));
        Ok(Self {
            spec: if_whole(load_json(&paths.spec()))?.filter(|spec| is_of(spec, &config.vm)),
            note: if_whole(load_json(&paths.state.join(NOTE_FILE)))?,
            config,
            paths,
            store,
            record,
            handed,
        })
    }

    /// Binds the socket and answers on it.
    pub(crate) fn serve(self) -> anyhow::Result<Serving> {
        let (inputs, received) = channel();
        let at_hand = AtHand {
            outbox: Arc::default(),
            desk: Arc::new(Desk::of(&self.config)),
        };
        server::serve(&self.paths.socket(), inputs.clone(), at_hand.clone())?;
        Ok(Serving {
            seat: self,
            inputs,
            received,
            at_hand,
        })
    }
}

/// A damaged description or note is as good as none: the record alone says who may run the VM, and without a process nobody
/// could stop its guest.
fn if_whole<T>(read: Result<Option<T>, StoreError>) -> Result<Option<T>, StoreError> {
    match read {
        Err(error @ StoreError::Damaged { .. }) => {
            tracing::error!(%error, "the VM goes on without it");
            Ok(None)
        }
        other => other,
    }
}

/// Another VM's description is as good as none, too: somebody put it there.
fn is_of(spec: &VmSpec, vm: &VmName) -> bool {
    let is_own = spec.name == *vm;
    if !is_own {
        tracing::error!(of = %spec.name, "the VM goes on without its description, which is another VM's");
    }
    is_own
}

impl Serving {
    /// Takes over the QEMU that is there. Nothing when this process was told to leave before QEMU answered.
    pub(crate) fn adopt(mut self) -> anyhow::Result<Option<Adopted>> {
        let Seat {
            config,
            paths,
            spec,
            ..
        } = &mut self.seat;
        let uid = config.qemu_uid;
        let followed = disks::put_back_living(paths, uid, spec.as_mut())
            .map_err(|error| error.to_string())
            .and_then(|()| disks::follow_moves(paths, spec.as_mut()));
        if let Err(why) = followed {
            tracing::error!(why, "the VM's description may not say where its disks are");
        }
        let seat = &self.seat;
        let known = Known {
            config: &seat.config,
            paths: &seat.paths,
            record: &seat.record,
            spec: seat.spec.as_ref(),
            handed: seat.handed.clone(),
        };
        let (hyper, qemu, found) = match adoption::adopt(&known, &self.inputs, &self.received)? {
            Looked::None => (None, Qemu::Dead, None),
            Looked::Detached => return Ok(None),
            Looked::Taken(hyper, state) => {
                let qemu = match state {
                    RunState::Running => Qemu::Running,
                    _ => Qemu::Paused,
                };
                let found = self.take_in(&hyper, &state)?;
                (Some(*hyper), qemu, found)
            }
        };
        // What nobody took is nobody's: QEMU connects again.
        drop(self.seat.handed.take());
        Ok(Some(Adopted {
            serving: self,
            hyper,
            qemu,
            found,
        }))
    }

    /// Watches a QEMU that was taken over and lifts what a predecessor put on it; says what its guest did meanwhile.
    fn take_in(&self, hyper: &Hyper, state: &RunState) -> anyhow::Result<Option<GuestNews>> {
        tracing::info!(pid = hyper.pid(), "QEMU is taken over");
        hyper.watch(self.inputs.clone())?;
        // What happened between the first look and the subscription to events is seen here.
        let found = match hyper.machine.query_status(Instant::now() + QMP_WAIT) {
            Ok(state) => news_of(&state),
            Err(error) => {
                tracing::warn!(%error, "QEMU was not looked at a second time");
                news_of(state)
            }
        };
        if let Some(spec) = &self.seat.spec {
            hyper.neighbours.listen(spec);
            hyper.disks.limit(&spec.disks);
        }
        // Without asking QEMU, which a limit that was left may keep from answering.
        if let Err(error) = godwit_qemu::throttle::release_leftovers_of(hyper.pid()) {
            tracing::warn!(%error, "a predecessor's throttle may be left");
        }
        group::take_in(hyper.pid());
        // Of the guest that runs: its description may be of another size by now.
        let mapped = hyper.ram.page_count();
        group::limit_memory(mapped.saturating_mul(godwit_guestmem::PAGE_SIZE as u64));
        Ok(found)
    }
}

impl Adopted {
    /// Wakes the ownership core and settles what a predecessor left.
    pub(crate) fn open(self) -> anyhow::Result<Vm> {
        let Serving {
            seat,
            inputs,
            received,
            at_hand,
        } = self.serving;
        at_hand
            .desk
            .put(self.hyper.as_ref().map(|hyper| &hyper.console));
        let (core, actions) = recover(seat.record, &seat.config, self.qemu)?;
        let launch = |hyper: &Hyper| hyper.identity.launch;
        let mut vm = Vm {
            status: core.status(),
            launches: self.hyper.as_ref().map_or(0, launch),
            config: seat.config,
            paths: seat.paths,
            store: seat.store,
            core,
            spec: seat.spec,
            hyper: self.hyper,
            timers: Timers::default(),
            at_hand,
            inputs,
            received,
            migration: None,
            measuring: None,
            disk_work: DiskWork::default(),
            disk_order: None,
            lists: Lists::default(),
            cloning: None,
            note: seat.note,
            reports: VecDeque::new(),
            unsaved: Unsaved::default(),
            orphan: None,
            refused: VecDeque::new(),
            runs: 0,
            halted: None,
            found: self.found,
            cont_wait: CONT_WAIT,
            unsure: None,
            outcome: Outcome::default(),
            said: Rate::new(Instant::now()),
            detach: false,
            renewal: None,
            room: Room::default(),
            off_wanted: None,
            obeyed_looked: None,
            came: Came::default(),
            left_over: LeftOver::default(),
            busy_at: Instant::now(),
        };
        vm.settle(actions);
        Ok(vm)
    }
}

impl Vm {
    /// Takes all steps. Nothing when this process was told to leave meanwhile.
    pub(crate) fn open(config: VmProcessConfig, handed: Handed) -> anyhow::Result<Option<Self>> {
        let adopted = Seat::take(config, handed)?.serve()?.adopt()?;
        adopted.map(Adopted::open).transpose()
    }

    /// Before anybody can ask for another generation: disks that came with the VM are this host's where it holds the VM under
    /// the generation for which they were whole. What a predecessor did not clean up is cleaned up.
    fn settle_disks(&mut self) {
        let held = self.core.record().may_run();
        let settled = match (&self.hyper, held) {
            (Some(hyper), Some(generation)) => {
                let until = Instant::now() + self.cont_wait;
                let arrived = hyper.disks.arrive(generation, until);
                hyper.disks.keep_what_came();
                arrived
            }
            (None, Some(generation)) => self.settle_images(generation),
            (Some(_), None) => Ok(()),
            (None, None) => {
                self.clean_disks();
                Ok(())
            }
        };
        if let Err(why) = settled {
            tracing::error!(why, "the disks that came with the VM are not settled");
        }
    }

    /// The VM is held under this generation and has no QEMU: what moves of its disks left is settled, and what came with it.
    pub(crate) fn settle_images(&mut self, generation: Generation) -> Result<(), String> {
        self.disk_work
            .must_be_over()
            .map_err(|error| error.message)?;
        disks::settle_moves(&self.paths, self.spec.as_mut())?;
        disks::settle(&self.paths, generation)
    }

    /// What a successor does first: what the core wants, the end of its predecessor's migration, what the guest did.
    fn settle(&mut self, actions: Vec<Action>) {
        self.settle_disks();
        let orphan = self.find_orphan();
        let was_off = self.found == Some(GuestNews::Shutdown) && !self.goes_with_its_host();
        self.perform(actions);
        self.close_orphan(orphan);
        self.close_old_reports();
        // Unless the core wanted the guest to go on and found it so.
        if let Some(news) = self.found.take() {
            self.happened(news);
        }
        if was_off {
            self.stay_off();
        }
        self.keep_off_what_was_asked_off();
        self.look_for_room();
    }
}

/// The core for a process that has just taken the VM's lock.
fn recover(
    record: HostRecord,
    config: &VmProcessConfig,
    qemu: Qemu,
) -> Result<(VmCore, Vec<Action>), RecordError> {
    #[cfg(feature = "faults")]
    if let Ok(name) = std::env::var("GODWIT_PLANT") {
        let plant = godwit_ownership::plant::Plant::from_name(&name);
        return VmCore::recover_planted(record, config.host.clone(), qemu, plant);
    }
    VmCore::recover(record, config.host.clone(), qemu)
}
