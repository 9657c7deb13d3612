//! What every part of a running controller shares.
//!
//! Owns inventory, database, CA and the live reports. The inventory's mutex is held for short pure steps only, never
//! across an await. One lock per VM orders the operations on it.

use crate::config::ControllerConfig;
use crate::drains::Drains;
use crate::error::{
    ControllerError, Outcome, being_taken_over, damaged, held_twice, in_doubt, refuse, unknown_vm,
    unreachable_host,
};
use crate::hosts;
use crate::measured::Measured;
use crate::metrics::Ended;
use crate::moving::{Mark, Marks, Why};
use crate::operators::Operators;
use crate::state::{HostEntry, Place, State};
use crate::store::Store;
use crate::turns::Turns;
use crate::unread::Lack;
use crate::vms::{Clones, Makings};
use godwit_rpc::pki::Holder;
use godwit_rpc::pki::now_unix_s;
use godwit_rpc::rate::Rate;
use godwit_rpc::{Admission, AgentClient, Authority, Client, Current, Revocations, Role, Unwanted};
use godwit_site::{Batch, Book, HostRow, Row};
use godwit_types::control_api::{HostState, InventoryEvent};
use godwit_types::migration::MigrationReport;
use godwit_types::site::{SiteHost, SiteUpdate, Stamp};
use godwit_types::vm::VmState;
use godwit_types::{ApiError, ErrorCode, HostName, MigrationId, VmName};
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::{broadcast, watch};

/// Events that a slow reader may fall behind by.
const EVENTS_KEPT: usize = 256;

type Clients = BTreeMap<HostName, (SocketAddr, AgentClient)>;

/// How long a command waits for a VM process that is being started again: as long as an agent lets one take.
const TAKE_OVER_WAIT: Duration = Duration::from_secs(15);

/// How long a command waits for a controller that was started just now to have asked every host.
const STARTING_WAIT: Duration = Duration::from_secs(20);
/// Between two looks at that.
const STARTING_EACH: Duration = Duration::from_millis(20);

/// Shared by handlers, pollers and watchers.
pub struct App {
    /// How it was started.
    pub config: ControllerConfig,
    pub store: Store,
    pub authority: Authority,
    pub identity: Arc<Current>,
    /// Revoked certificates, shared with the server.
    pub revocations: Arc<Revocations>,
    /// Hosts that are being emptied.
    pub drains: Drains,
    /// Measurements of guests and links.
    pub measured: Measured,
    /// Sums of the migrations that ended since this start.
    pub ended: Ended,
    /// Addresses for join tokens.
    pub advertise: Vec<SocketAddr>,
    state: Mutex<State>,
    /// The turn to write what the site's rules have changed.
    writer: tokio::sync::Mutex<()>,
    /// The turns to do something about a VM.
    pub vm_turns: Turns<VmName>,
    /// The turns to ask a host.
    pub host_turns: Turns<HostName>,
    macs: tokio::sync::Mutex<()>,
    clients: Mutex<Clients>,
    /// Where disks are made of VMs that are to start.
    pub makings: Makings,
    /// Clones that are under way.
    pub clones: Clones,
    /// VMs that nobody begins to move now.
    pub moving: Marks,
    /// People and scripts on other machines.
    pub operators: Operators,
    /// How often each address may try to join.
    joins: Mutex<Rate>,
    live: Mutex<BTreeMap<MigrationId, watch::Sender<MigrationReport>>>,
    /// The last word that is in the database: the newest one that a host may hear.
    said: Arc<Mutex<Stamp>>,
    /// Migrations that are beginning, and whether somebody has cancelled them since.
    beginning: Mutex<BTreeMap<MigrationId, bool>>,
    events: broadcast::Sender<InventoryEvent>,
    stop: watch::Receiver<bool>,
}

/// What is to be written; due again if it is dropped before it was.
pub struct Due<'a> {
    app: &'a App,
    batch: Option<Batch>,
    _turn: tokio::sync::MutexGuard<'a, ()>,
}

/// The turn to write what the site's rules change.
pub struct Turn<'a> {
    app: &'a App,
    turn: tokio::sync::MutexGuard<'a, ()>,
}

impl<'a> Turn<'a> {
    /// What is to be written now.
    pub fn due(self) -> Due<'a> {
        Due {
            app: self.app,
            batch: Some(self.app.state().book.take_unwritten()),
            _turn: self.turn,
        }
    }
}

impl Due<'_> {
    pub fn rows(&self) -> &[Row] {
        self.batch.as_ref().map(Batch::rows).unwrap_or_default()
    }

    /// They are in the database: their words may be said.
    pub fn written(mut self) {
        let mut said = lock(&self.app.said);
        for row in self.batch.take().iter().flat_map(Batch::rows) {
            if let Row::Stamp(stamp) = row {
                *said = (*said).max(*stamp);
            }
        }
    }
}

impl Drop for Due<'_> {
    fn drop(&mut self) {
        if let Some(batch) = self.batch.take() {
            self.app.state().book.not_written(batch);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl App {
    /// Reads everything from the database.
    pub async fn load(
        config: ControllerConfig,
        store: Store,
        authority: Authority,
        identity: Arc<Current>,
        advertise: Vec<SocketAddr>,
        stop: watch::Receiver<bool>,
    ) -> Result<Self, ControllerError> {
        let said = store.stamp().await?;
        let mut state = State {
            hosts: store.hosts().await?.into_iter().collect(),
            book: Book::new(said),
            ..State::default()
        };
        load_book(&store, &mut state).await?;
        load_vms(&store, &mut state).await?;
        let revocations = Arc::new(Revocations::default());
        revocations.extend(store.revoked().await?);
        for host in store.removed_hosts().await? {
            state.book.add_removed(host);
        }
        Ok(Self {
            config,
            store,
            authority,
            identity,
            revocations,
            drains: Drains::default(),
            measured: Measured::default(),
            ended: Ended::default(),
            advertise,
            state: Mutex::new(state),
            writer: tokio::sync::Mutex::default(),
            vm_turns: Turns::default(),
            makings: Makings::default(),
            clones: Clones::default(),
            host_turns: Turns::default(),
            macs: tokio::sync::Mutex::default(),
            clients: Mutex::default(),
            moving: Marks::default(),
            operators: Operators::default(),
            joins: Mutex::new(Rate::new(hosts::JOINS_AT_ONCE, hosts::JOIN_EACH)),
            live: Mutex::default(),
            said: Arc::new(Mutex::new(said)),
            beginning: Mutex::default(),
            events: broadcast::channel(EVENTS_KEPT).0,
            stop,
        })
    }

    /// The inventory, for a short step.
    pub fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Whether somebody at this address may try to join now.
    pub fn admits_join(&self, from: IpAddr) -> bool {
        lock(&self.joins).admits(from, Instant::now())
    }

    /// Writes what the site's rules have changed, before anything is said that follows from it.
    pub async fn write(&self) -> Result<(), ControllerError> {
        let due = self.due().await;
        self.store.write(due.rows()).await?;
        due.written();
        Ok(())
    }

    /// What the site's rules have changed, for the one who writes it, perhaps with more in one transaction. One at a time,
    /// in the order of the book.
    pub async fn due(&self) -> Due<'_> {
        self.turn_to_write().await.due()
    }

    /// The turn to write, for a change of the book that nobody else is to write.
    pub async fn turn_to_write(&self) -> Turn<'_> {
        Turn {
            app: self,
            turn: self.writer.lock().await,
        }
    }

    /// What a host lacks of the site's table, unless some of that is not written yet.
    pub fn written_update(&self, host: &HostName) -> Option<SiteUpdate> {
        let state = self.state();
        match state.book.has_unwritten() {
            true => None,
            false => state.book.update_for(host),
        }
    }

    /// Waits until every host has answered since this controller was started, or failed to.
    pub async fn until_started(&self) {
        let asked = async {
            while self.state().book.has_unasked() {
                tokio::time::sleep(STARTING_EACH).await;
            }
        };
        // Who is not through by then is told so by what he does next.
        let _ = tokio::time::timeout(STARTING_WAIT, asked).await;
    }

    /// The newest word that a host may hear: the last one that is in the database.
    pub fn said(&self) -> Stamp {
        *lock(&self.said)
    }

    /// Notes that a migration begins: it can be cancelled from now on, whether or not a host knows of it yet.
    pub fn begins(&self, id: &MigrationId) {
        lock(&self.beginning).insert(id.clone(), false);
    }

    /// Notes that both hosts know of a migration, or that it did not begin; true when it was cancelled meanwhile.
    pub fn has_begun(&self, id: &MigrationId) -> bool {
        lock(&self.beginning).remove(id).unwrap_or(false)
    }

    /// Whether a migration that is just beginning was cancelled.
    pub fn is_cancelled(&self, id: &MigrationId) -> bool {
        lock(&self.beginning).get(id).copied().unwrap_or(false)
    }

    /// Cancels a migration that is just beginning; false when it is not.
    pub fn cancel_beginning(&self, id: &MigrationId) -> bool {
        match lock(&self.beginning).get_mut(id) {
            Some(cancelled) => {
                *cancelled = true;
                true
            }
            None => false,
        }
    }

    /// Waits for the turn to allot MAC addresses and user ids; held until the VM that has them is in the inventory.
    pub async fn macs_turn(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.macs.lock().await
    }

    /// Marks a VM as about to move; none when it is already. What the controller asks by itself is waited for: it is over
    /// with the VM's turn.
    pub async fn begin_moving(&self, vm: &VmName) -> Option<Mark<'_>> {
        match self.moving.mark(vm, Why::Moves) {
            Err(Why::IsAsked) => {
                let _turn = self.vm_turns.take(vm).await;
                self.moving.mark(vm, Why::Moves).ok()
            }
            marked => marked.ok(),
        }
    }

    /// Hosts that were removed and have not joined again.
    pub fn removed(&self) -> BTreeSet<HostName> {
        self.state().book.removed().clone()
    }

    /// Turns true when the controller stops.
    pub fn stopped(&self) -> watch::Receiver<bool> {
        self.stop.clone()
    }

    /// Tells readers of the event stream.
    pub fn tell(&self, event: InventoryEvent) {
        // Nobody listening is fine.
        let _ = self.events.send(event);
    }

    /// Tells that a VM has changed.
    pub fn tell_vm(&self, vm: &VmName) {
        self.tell(InventoryEvent::Vm {
            name: vm.to_string(),
        });
    }

    /// Tells that a host has changed.
    pub fn tell_host(&self, host: &HostName) {
        self.tell(InventoryEvent::Host {
            name: host.to_string(),
        });
    }

    /// Tells that the emptying of a host has begun, gone on or ended.
    pub fn tell_drain(&self, host: &HostName) {
        self.tell(InventoryEvent::Drain {
            host: host.to_string(),
        });
        self.tell_host(host);
    }

    /// Changes from now on.
    pub fn listen(&self) -> broadcast::Receiver<InventoryEvent> {
        self.events.subscribe()
    }

    /// Publishes a live report; the first one makes the migration live.
    pub fn publish(&self, report: MigrationReport) {
        let mut live = lock(&self.live);
        match live.get(&report.id) {
            Some(sender) => {
                sender.send_replace(report);
            }
            None => {
                live.insert(report.id.clone(), watch::channel(report).0);
            }
        }
    }

    /// The live report of a migration under way.
    pub fn live(&self, id: &MigrationId) -> Option<watch::Receiver<MigrationReport>> {
        lock(&self.live).get(id).map(watch::Sender::subscribe)
    }

    /// The live reports of all migrations under way.
    pub fn all_live(&self) -> Vec<MigrationReport> {
        let live = lock(&self.live);
        live.values()
            .map(|sender| sender.borrow().clone())
            .collect()
    }

    /// Ends the live report.
    pub fn end_live(&self, id: &MigrationId) {
        lock(&self.live).remove(id);
    }

    /// Nobody is granted a VM while what is known of it cannot be read.
    pub fn must_be_read(&self, vm: &VmName) -> Outcome<()> {
        match self.state().lacking.get(vm) {
            Some(lack @ Lack::Right(_)) => Err(lack.refusal(vm)),
            _ => Ok(()),
        }
    }

    /// The same, and it must be described, too.
    pub fn must_be_described(&self, vm: &VmName) -> Outcome<()> {
        match self.state().lacking.get(vm) {
            Some(lack) => Err(lack.refusal(vm)),
            None => Ok(()),
        }
    }

    /// The client of a host's agent, and its address.
    pub fn agent(&self, host: &HostName) -> Outcome<(SocketAddr, AgentClient)> {
        let address = self.of_host(host, |entry| entry.address)?;
        if let Some((known, client)) = lock(&self.clients).get(host)
            && *known == address
        {
            return Ok((address, client.clone()));
        }
        let client = Client::tls_admitted(
            address,
            &self.identity.identity(),
            Role::Host(host.clone()),
            Some(self.revocations.clone()),
        )
        .map_err(ControllerError::from)?;
        let said = self.said.clone();
        let client = client.with_stamps(Arc::new(move || *lock(&said)));
        let agent = AgentClient::new(client).with_deadlines(self.config.deadlines);
        lock(&self.clients).insert(host.clone(), (address, agent.clone()));
        Ok((address, agent))
    }

    /// Makes every host's client anew when it is wanted next: the controller has another certificate.
    pub fn forget_clients(&self) {
        lock(&self.clients).clear();
    }

    /// The client of a host that answers.
    pub fn connected_agent(&self, host: &HostName) -> Outcome<AgentClient> {
        match self.of_host(host, |entry| entry.state)? {
            HostState::Connected => self.agent(host).map(|(_, agent)| agent),
            HostState::Unreachable => Err(unreachable_host(host)),
        }
    }

    /// A host of the inventory.
    pub fn host(&self, host: &HostName) -> Outcome<HostEntry> {
        self.of_host(host, HostEntry::clone)
    }

    /// What is asked of a host's entry, without a copy of all that the host said.
    pub fn of_host<T>(&self, host: &HostName, ask: impl FnOnce(&HostEntry) -> T) -> Outcome<T> {
        match self.state().hosts.get(host) {
            Some(entry) => Ok(ask(entry)),
            None => refuse(
                ErrorCode::UnknownHost,
                format!("there is no host {host}: see 'godwit host list'"),
            ),
        }
    }

    /// Waits while a VM's process is being started again: nobody needs to ask twice for what passes by itself.
    pub async fn until_taken_over(&self, vm: &VmName) {
        let mut changes = self.listen();
        let deadline = tokio::time::Instant::now() + TAKE_OVER_WAIT;
        while self.is_being_taken_over(vm) {
            // To lag behind is a change too, and the channel closes only with this value.
            let changed = tokio::time::timeout_at(deadline, changes.recv());
            if changed.await.is_err() {
                return;
            }
        }
    }

    /// Waits until a host does not answer.
    pub async fn until_lost(&self, host: &HostName) {
        let mut changes = self.listen();
        let is_connected = || {
            let state = self.of_host(host, |entry| entry.state);
            matches!(state, Ok(HostState::Connected))
        };
        while is_connected() {
            // To lag behind is a change too, and the channel closes only with this value.
            let _ = changes.recv().await;
        }
    }

    fn is_being_taken_over(&self, vm: &VmName) -> bool {
        self.silent_place(vm).is_some()
    }

    /// The host whose VM process lives and cannot command the VM's QEMU: that may pass, and a person who forces a stop waits for
    /// nothing.
    pub fn without_its_qemu_at(&self, vm: &VmName) -> Option<HostName> {
        let place = self.silent_place(vm).filter(has_process);
        place.map(|place| place.host)
    }

    /// Where a VM is that takes no commands although its host answers.
    fn silent_place(&self, vm: &VmName) -> Option<Place> {
        let state = self.state();
        let view = state.vm_view(vm, now_unix_s())?;
        let place = state.place(vm).filter(|place| place.connected);
        place.filter(|_| view.state == VmState::Unreachable)
    }

    /// Where a VM is; an error when it is nowhere, in doubt, or on a host that does not answer.
    pub fn place_of(&self, vm: &VmName) -> Outcome<Place> {
        let state = self.state();
        let view = state
            .vm_view(vm, now_unix_s())
            .ok_or_else(|| unknown_vm(vm))?;
        match (view.state, state.place(vm)) {
            (VmState::InDoubt, _) => Err(in_doubt(vm, view.note)),
            (VmState::RunningTwice, _) => Err(held_twice(vm, view.note)),
            (VmState::DamagedRecord, Some(place)) if place.vm.is_none() => {
                Err(damaged(vm, view.note).on_host(&place.host))
            }
            (VmState::Unreachable, Some(place)) if place.connected => {
                Err(being_taken_over(vm, &place.host, view.note))
            }
            (VmState::Unreachable, Some(place)) => Err(unreachable_host(&place.host)),
            (_, Some(place)) => Ok(place),
            (_, None) => refuse(
                ErrorCode::WrongState,
                format!("VM {vm} is not started: run 'godwit vm start {vm}'"),
            ),
        }
    }
}

/// Whether its host told of a VM process that lives.
fn has_process(place: &Place) -> bool {
    place
        .vm
        .as_ref()
        .is_some_and(|vm| vm.vm_process_pid.is_some())
}

impl Admission for App {
    fn admits(&self, holder: &Holder) -> bool {
        self.revocations.admits(holder)
    }

    fn admits_on(&self, holder: &Holder, open_since: Instant) -> bool {
        let admitted = self.revocations.admits_on(holder, open_since);
        if admitted {
            self.operators.see(holder);
        }
        admitted
    }

    fn why_unwanted(&self, holder: &Holder) -> Unwanted {
        self.revocations.why_unwanted(holder)
    }

    fn changes(&self) -> Option<watch::Receiver<u64>> {
        self.revocations.changes()
    }

    fn may_try(&self, from: IpAddr) -> Result<(), ApiError> {
        hosts::may_try_to_join(self, from)
    }
}

/// What the database knows of hosts and of who may hold which VM.
async fn load_book(store: &Store, state: &mut State) -> Result<(), ControllerError> {
    let rows: BTreeMap<HostName, _> = store.host_rows().await?.into_iter().collect();
    for (name, entry) in &state.hosts {
        let row = rows.get(name).cloned().unwrap_or_default();
        let site = site_host(name, entry, &row);
        state.book.load_host(site, row);
    }
    let (entries, unread) = store.entries().await?;
    for (vm, entry) in entries {
        state.book.add_entry(vm, entry);
    }
    for row in unread {
        let name = VmName::new(row.row.clone());
        let vm = name.map_err(|_| ControllerError::Row(row.clone()))?;
        state.lacks(vm, Lack::Right(row));
    }
    for host in store.fenced_strangers().await? {
        state.book.add_fenced_stranger(host);
    }
    Ok(())
}

/// How VMs are described. One whose description cannot be read is shown all the same.
async fn load_vms(store: &Store, state: &mut State) -> Result<(), ControllerError> {
    let (vms, unread) = store.vms().await?;
    for vm in vms {
        state.vms.insert(vm.spec.name.clone(), vm);
    }
    for row in unread {
        let unread = |_| ControllerError::Row(row.clone());
        let vm = VmName::new(row.row.clone()).map_err(unread)?;
        state.lacks(vm, Lack::Description(row));
    }
    Ok(())
}

/// A host as the site's table has it.
pub fn site_host(name: &HostName, entry: &HostEntry, row: &HostRow) -> SiteHost {
    SiteHost {
        name: name.clone(),
        address: entry.address,
        serial: entry.serial.clone(),
        counter: row.instance.counter,
        machine_id: row.instance.machine_id.clone(),
    }
}

/// Seconds since 1970 as reports have them.
pub fn now() -> u64 {
    u64::try_from(now_unix_s()).unwrap_or(0)
}
