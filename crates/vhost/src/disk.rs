//! A disk's thread: hears QEMU and the VM process, takes requests, gives answers.
//!
//! Who owns the state: the thread owns everything here. It waits for all that may happen at once; so QEMU gets its answer to
//! 'end this queue' when the last request is done, and what else happens goes on meanwhile. It waits for one thing alone where its
//! image changes hands, while none of its requests is under way: for the lock of an image that it takes, with the patience that it is
//! given, and for what it makes durable before it gives one back. QEMU and whoever asks it are heard after that.
//!
//! What it refuses: a second front end while one is connected or requests of the last one are under way.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};
use std::time::{Duration, Instant};

use godwit_blockio::delta::Delta;
use godwit_blockio::{Access, Engine, Event, Filter, Image, Stack, Waits};
use godwit_guestmem::RamFile;

use crate::Error;
use crate::block::Geometry;
use crate::connection::Connection;
use crate::handle::{Command, Status};
use crate::handover::Handover;
use crate::layers::OWN;
use crate::listener::Listener;
use crate::message::{Vring, request};
use crate::queue::{Guest, Queue, must_be_eventfd};
use crate::session::Session;

pub(crate) const LISTENER: u64 = 0;
const WAKE: u64 = 1;
/// Plus the life in the upper half.
const SOCKET: u64 = 2;
/// Plus the queue, and the life in the upper half.
const KICK: u64 = 0x100;
/// Most messages that are heard before requests are looked at again.
const MESSAGES: usize = 64;
/// When a socket that could not be made is tried again.
pub(crate) const AGAIN: Duration = Duration::from_secs(1);
/// How long a disk that is to end waits for what the kernel has.
const LAST: Duration = Duration::from_secs(2);
/// When a QEMU that said what none says is heard again.
const REFUSED: Duration = Duration::from_millis(50);
/// So many lines about guest and QEMU are written in so long.
const TELL_EVERY: Duration = Duration::from_secs(60);
const TELL_MOST: u32 = 20;

/// What a disk is made of.
pub struct Settings {
    /// As logs have it.
    pub name: String,
    /// Where QEMU connects to; whatever is there is replaced.
    pub socket: PathBuf,
    /// User of QEMU, who may connect beside root, and group.
    pub owner: Option<(u32, u32)>,
    pub image: Image,
    pub geometry: Geometry,
    /// The first is nearest to the guest.
    pub filters: Vec<Box<dyn Filter>>,
    /// The guest's memory: no other is served.
    pub ram: Arc<RamFile>,
    /// Whether the image is locked; else no request is taken before [`crate::Disk::take_image`].
    pub has_image: bool,
    /// For what requests wait that failed; else the guest gets an error.
    pub waits: Waits,
    /// QEMU's connection, where another program had the disk until now.
    pub handed: Option<Handover>,
    /// What lies above the image, from the lowest to the top, which alone is written; most disks have none.
    pub deltas: Vec<Delta>,
}

impl Settings {
    fn check(&self) -> Result<(), Error> {
        let refused = |reason| Err(Error::Settings { reason });
        if let Err(reason) = self.geometry.check(self.image.bytes()) {
            return refused(reason);
        }
        if self.image.access() == Access::ReadOnly && !self.geometry.read_only {
            return refused("its image was opened for reading only".to_owned());
        }
        Ok(())
    }
}

/// What the thread has. What QEMU says over a connection belongs to `guest`, `queues` or `session`, which are made anew when it
/// ends; all else outlives it.
pub(crate) struct Device {
    pub(crate) name: String,
    /// Ends before the image does: its path belongs to whoever has that.
    pub(crate) listener: Listener,
    pub(crate) stack: Stack<Engine>,
    pub(crate) guest: Guest,
    pub(crate) queues: Vec<Queue>,
    pub(crate) session: Session,
    /// When the socket is tried again.
    pub(crate) listen_again: Option<Instant>,
    /// The queue that is looked at first.
    first: usize,
    /// When filters take requests again.
    opens_at: Option<Instant>,
    pub(crate) waits: Waits,
    /// Whether a sync has failed of which the guest has not heard.
    pub(crate) lost_sync: bool,
    pub(crate) held: bool,
    /// How many want that nothing goes to the image, to change what is below the guest's requests.
    pub(crate) stands: usize,
    /// Whether the image is this disk's.
    pub(crate) has_image: bool,
    /// Whoever waits until nothing is under way.
    waiting: Vec<Sender<()>>,
    /// Whoever waits until nothing goes to the image.
    standing: Vec<Sender<()>>,
    resubmitted: u64,
    /// Whoever waits until what was answered is durable, by the flush that makes it so,
    pub(crate) settling: Vec<(u64, Sender<Result<(), Error>>)>,
    /// and how many of those there were.
    pub(crate) settled: u64,
    /// When lines about guest and QEMU are counted anew.
    tell_at: Option<Instant>,
    /// Lines since then.
    told: u32,
}

impl Device {
    /// On the thread that will run it. QEMU can connect once this has returned.
    pub(crate) fn new(settings: Settings) -> Result<Self, Error> {
        settings.check()?;
        let engine = Engine::new(settings.image)?;
        let mut stack = Stack::new(settings.filters, engine);
        if !settings.deltas.is_empty() {
            let put = stack.put_deltas(settings.deltas);
            put.map_err(|_| Error::Settings {
                reason: "what lies above its image is of another length".to_owned(),
            })?;
        }
        let mut device = Self {
            name: settings.name,
            listener: Listener::new(settings.socket, settings.owner),
            stack,
            queues: Queue::all(&settings.geometry),
            guest: Guest::new(settings.ram, settings.geometry, 0),
            session: Session::default(),
            listen_again: None,
            first: 0,
            opens_at: None,
            waits: settings.waits,
            lost_sync: false,
            held: false,
            stands: 0,
            has_image: settings.has_image,
            waiting: Vec::new(),
            standing: Vec::new(),
            resubmitted: 0,
            settling: Vec::new(),
            settled: 0,
            tell_at: None,
            told: 0,
        };
        match settings.handed.map(|handed| device.take_over(handed)) {
            Some(Ok(())) => {
                tracing::info!(
                    disk = device.name,
                    "the disk goes on over QEMU's connection"
                );
            }
            Some(Err(error)) => device.hang_up(&error),
            None => {}
        }
        device.listen()?;
        Ok(device)
    }

    /// Runs until it is told to stop, or the kernel fails it.
    pub(crate) fn run(mut self, commands: &Receiver<Command>, wake: &OwnedFd) -> Result<(), Error> {
        self.stack.bottom.watch(wake.as_fd(), WAKE)?;
        let mut events = Vec::new();
        let mut more = false;
        loop {
            self.listen_or_try_again();
            let until = match more || self.session.has_more_to_hear {
                true => Some(Instant::now()),
                false => {
                    let times = [self.opens_at, self.listen_again, self.tries_parked_at()];
                    times.into_iter().flatten().min()
                }
            };
            self.stack.turn(until, &mut events)?;
            for event in events.drain(..) {
                if event.token == WAKE {
                    let mut count = [0; 8];
                    let _ = rustix::io::read(wake, &mut count);
                } else {
                    self.happened(event);
                }
            }
            if self.session.has_more_to_hear {
                self.hear();
            }
            while let Ok(command) = commands.try_recv() {
                if self.obey(command) {
                    return self.wind_up();
                }
            }
            self.finish_all();
            self.try_parked();
            more = self.take_all();
            more |= self.after();
        }
    }

    /// Answers what the kernel has, if that does not take long, and ends. What is left is for the successor.
    fn wind_up(&mut self) -> Result<(), Error> {
        let until = Instant::now() + LAST;
        let mut events = Vec::new();
        self.after();
        while self.stack.bottom.under_way() > 0 && Instant::now() < until {
            self.stack.turn(Some(until), &mut events)?;
            events.clear();
            self.after();
        }
        self.close_deltas();
        Ok(())
    }

    fn happened(&mut self, event: Event) {
        let (life, what) = ((event.token >> 32) as u16, event.token & 0xffff_ffff);
        match what {
            LISTENER => self.accept(),
            SOCKET if life == self.guest.life => self.hear(),
            // A kick: queues are looked at in every turn.
            _ => {}
        }
    }

    pub(crate) fn connect(&mut self, socket: UnixStream) {
        let connection = match Connection::new(socket) {
            Ok(connection) => connection,
            Err(error) => {
                tracing::warn!(disk = self.name, %error, "a front end was not taken");
                return;
            }
        };
        let token = SOCKET | u64::from(self.guest.life) << 32;
        match self.stack.bottom.watch(connection.as_fd(), token) {
            Ok(()) => {
                self.session.connection = Some(connection);
                self.session.mute_since = Some(Instant::now());
            }
            Err(error) => tracing::warn!(disk = self.name, %error, "a front end was not taken"),
        }
    }

    /// Hears what QEMU has said, up to a number of messages: the rest after the next look at the queues.
    fn hear(&mut self) {
        self.session.has_more_to_hear = false;
        if self.session.is_handed_over {
            return;
        }
        for _ in 0..MESSAGES {
            let Some(connection) = &mut self.session.connection else {
                return;
            };
            let heard = match connection.receive() {
                Ok(None) => return,
                Ok(Some(received)) => {
                    self.session.mute_since = None;
                    self.carry_out(received)
                }
                Err(error) => Err(error),
            };
            if let Err(error) = heard {
                self.hang_up(&error);
                return;
            }
        }
        self.session.has_more_to_hear = true;
    }

    /// QEMU is gone, or not to be listened to any longer. What is under way ends, and is answered by nobody; the in-flight
    /// area, which QEMU has, says what it was.
    pub(crate) fn hang_up(&mut self, why: &Error) {
        // A QEMU that says what none says is not heard again at once, nor told of each time.
        let is_told = self.is_time_to_tell();
        match why {
            Error::Closed if !is_told => {}
            _ if !is_told => self.listen_again = Some(Instant::now() + REFUSED),
            Error::Closed => tracing::info!(disk = self.name, "QEMU has disconnected"),
            error => {
                tracing::warn!(disk = self.name, %error, "the connection to QEMU was ended");
                self.listen_again = Some(Instant::now() + REFUSED);
            }
        }
        let token = SOCKET | u64::from(self.guest.life) << 32;
        self.stack.bottom.unwatch(token);
        for number in 0..self.queues.len() {
            self.end(number);
        }
        self.end_session();
    }

    /// Takes a queue's ring and descriptors away.
    pub(crate) fn end(&mut self, number: usize) {
        let Some(queue) = self.queues.get_mut(number) else {
            return;
        };
        if queue.kick.take().is_some() {
            let token = kick_token(number, self.guest.life);
            self.stack.bottom.unwatch(token);
        }
        queue.base = queue.next();
        queue.call = None;
        queue.stop();
    }

    /// Begins a queue that was described, with the descriptor that tells of its requests.
    pub(crate) fn begin(&mut self, number: usize, kick: Option<OwnedFd>) -> Result<(), Error> {
        let life = self.guest.life;
        let Some(queue) = self.queues.get_mut(number) else {
            return Ok(());
        };
        if queue.kick.take().is_some() {
            self.stack.bottom.unwatch(kick_token(number, life));
        }
        if let Some(kick) = &kick {
            must_be_eventfd(kick)?;
            self.stack
                .bottom
                .watch(kick.as_fd(), kick_token(number, life))?;
        }
        queue.kick = kick;
        match queue.begin(&self.guest) {
            Ok(again) => self.resubmitted += again as u64,
            Err(error) => self.broke(number, &error),
        }
        // Whatever it waits for may have come while nobody listened.
        if let Some(queue) = self.queues.get_mut(number) {
            queue.interrupt();
        }
        match std::mem::replace(&mut self.session.told_size, true) {
            true => Ok(()),
            false => self.tell_size(),
        }
    }

    pub(crate) fn broke(&mut self, number: usize, error: &Error) {
        let is_news = self.queues.get_mut(number).is_some_and(Queue::broke);
        if is_news && self.is_time_to_tell() {
            tracing::warn!(disk = self.name, queue = number, %error, "a queue stands still until the guest resets its disk");
        }
    }

    /// Up to so many lines in so long: a guest may break its queues, and a QEMU its connection, as often as it likes.
    pub(crate) fn is_time_to_tell(&mut self) -> bool {
        let now = Instant::now();
        if self.tell_at.is_none_or(|at| at <= now) {
            (self.tell_at, self.told) = (Some(now + TELL_EVERY), 0);
        }
        self.told += 1;
        self.told <= TELL_MOST
    }

    /// The queue that is looked at first is another one each time, so that none with many requests keeps the others out.
    fn take_all(&mut self) -> bool {
        let now = Instant::now();
        if !self.has_image || self.stands > 0 {
            // Another may have the image, or what is below may be another thing soon: also what was under way before waits.
            self.opens_at = None;
            return false;
        }
        let takes = !self.held && !self.session.full.is_full();
        let count = self.queues.len();
        let mut more = false;
        for turn in 0..count {
            let number = (self.first + turn) % count.max(1);
            let Some(queue) = self.queues.get_mut(number) else {
                continue;
            };
            match queue.take_all(&self.guest, &mut self.stack, takes, now) {
                Ok(left) => more |= left,
                Err(error) => self.broke(number, &error),
            }
        }
        self.first = (self.first + 1) % count.max(1);
        self.opens_at = self.stack.opens_at(now);
        more
    }

    /// Puts what is finished into the used rings. Returns whether there was anything.
    fn finish_all(&mut self) -> bool {
        let mut did = false;
        while let Some((request, outcome)) = self.stack.finished() {
            did = true;
            let token = request.token;
            if token & OWN != 0 {
                self.has_settled(&request, outcome);
                continue;
            }
            if (token >> 32) as u16 != self.guest.life {
                self.note_unheard(&request, outcome);
                continue;
            }
            if self.parks(&request, outcome) {
                self.park(request, outcome);
                continue;
            }
            self.let_parked_go(token);
            let outcome = self.outcome_for_guest(&request, outcome);
            self.answer_request(&request, outcome);
        }
        did
    }

    /// What follows from what was finished: interrupts, and whoever waits. Returns whether there may be more to take now.
    fn after(&mut self) -> bool {
        let did = self.finish_all();
        for number in 0..self.queues.len() {
            let Some(queue) = self.queues.get_mut(number) else {
                continue;
            };
            if let Err(error) = queue.notify(&self.guest) {
                self.broke(number, &error);
            }
        }
        self.answer_end();
        if self.is_idle() {
            for waiter in self.waiting.drain(..) {
                let _ = waiter.send(());
            }
        }
        if self.stack.is_idle() {
            for waiter in self.standing.drain(..) {
                let _ = waiter.send(());
            }
        }
        did
    }

    /// Tells QEMU that a queue has ended, once nothing of it is under way.
    fn answer_end(&mut self) {
        let Some(number) = self.session.ending else {
            return;
        };
        let index = number as usize;
        let is_done = self.queues.get(index).is_none_or(Queue::is_done);
        if !is_done && !self.only_waits(index) {
            return;
        }
        self.session.ending = None;
        self.leave_parked(index);
        self.end(index);
        let value = self.queues.get(index).map_or(0, |queue| queue.base.into());
        let vring = Vring {
            queue: number,
            value,
        };
        let body = [vring.queue, vring.value].map(u32::to_le_bytes).concat();
        let Some(connection) = &self.session.connection else {
            return;
        };
        if let Err(error) = connection.answer(request::GET_VRING_BASE, &body, None) {
            self.hang_up(&error);
        }
    }

    /// Whether nothing of the guest's is under way, and nothing left to be carried out again but what waits for room, or
    /// for the image.
    fn is_idle(&self) -> bool {
        let mut all = self.queues.iter().enumerate();
        let is_done = |(number, queue): (usize, &Queue)| queue.is_done() || self.only_waits(number);
        self.stack.under_way() == 0 && all.all(is_done)
    }

    /// Returns whether the thread is to end.
    fn obey(&mut self, command: Command) -> bool {
        match command {
            Command::Hold(idle) => {
                self.held = true;
                self.waiting.push(idle);
            }
            Command::Release => self.held = false,
            Command::Stand(idle) => {
                self.stands += 1;
                self.stack.rest(true);
                self.standing.push(idle);
            }
            Command::GoOn => {
                self.stands = self.stands.saturating_sub(1);
                if self.stands == 0 {
                    self.stack.rest(false);
                    self.take_back();
                    self.standing.clear();
                }
            }
            Command::Measure(answer) => {
                let _ = answer.send(self.measure());
            }
            Command::Take(name, patience, answer) => {
                let _ = answer.send(self.take_image(&name, patience));
            }
            Command::GiveBack(name, answer) => {
                let _ = answer.send(self.give_image_back(&name));
            }
            Command::Lend(answer) => {
                let _ = answer.send(self.stack.bottom.lend());
            }
            Command::PutLowest(filter, answer) => {
                let put = self.stack.put_lowest(filter);
                let _ = answer.send(put.map_err(|_| self.busy()));
            }
            Command::TakeLowest(answer) => {
                let taken = self.stack.take_lowest().then_some(());
                let _ = answer.send(taken.ok_or_else(|| self.busy()));
            }
            Command::Switch(image, answer) => {
                let _ = answer.send(self.switch(image));
            }
            Command::SwitchOver(image, deltas, answer) => {
                let _ = answer.send(self.switch_over(image, deltas));
            }
            Command::Flatten(image, answer) => {
                let _ = answer.send(self.flatten(image));
            }
            Command::HandOver(answer) => {
                let _ = answer.send(self.hand_over());
            }
            Command::Settle(answer) => self.settle(answer),
            Command::KeepMaps(answer) => {
                let _ = answer.send(self.keep_maps());
            }
            Command::Layers(change, answer) => {
                let _ = answer.send(self.change_layers(change));
            }
            Command::Status(answer) => {
                let _ = answer.send(self.status());
            }
            Command::Stop => return true,
        }
        false
    }

    fn status(&self) -> Status {
        Status {
            connected: self.session.connection.is_some(),
            life: self.guest.life,
            full_for: self.session.full.longest(),
            fails: self.session.full.fails(),
            mute_for: self.session.mute_since.map(|since| since.elapsed()),
            running: self.queues.iter().filter(|queue| queue.runs()).count(),
            under_way: self.stack.under_way(),
            unanswered: self.left_in_area()
                + self.queues.iter().map(Queue::unanswered).sum::<usize>(),
            held: self.held,
            has_image: self.has_image,
            bytes: self.guest.geometry.bytes,
            resubmitted: self.resubmitted,
        }
    }
}

fn kick_token(queue: usize, life: u16) -> u64 {
    (KICK + queue as u64) | u64::from(life) << 32
}
