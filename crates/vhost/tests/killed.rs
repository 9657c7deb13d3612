//! A disk whose process is killed, or whose queues end, again and again under load: each block has what its last acknowledged write put there, every
//! read sees that, and every request is answered once.
//!
//! Sixteen requests are outstanding on 256 blocks of 4 KiB, and each block carries its own number, so that a write that is lost, torn,
//! misplaced or done again after a newer one shows.

mod common;

use common::{Chance, FrontEnd, LONG, Site, into, out, places};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const BLOCK: u32 = 4096;
const BLOCKS: usize = 256;
const OUTSTANDING: usize = 16;
const KILLS: u32 = 100;

struct Server(Child);

impl Server {
    fn start(site: &Site) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_serve-a-disk"));
        command
            .args([&site.image, &site.socket])
            .arg(site.ram.path());
        command.arg(common::RAM.to_string()).stdin(Stdio::piped());
        Self(command.spawn().unwrap())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[derive(Clone, Copy)]
struct Asked {
    block: usize,
    /// What is written; `None`: it is read.
    number: Option<u64>,
}

struct Load {
    site: Site,
    guest: FrontEnd,
    acknowledged: Vec<u64>,
    busy: Vec<bool>,
    /// By place; its descriptors are three from there on.
    asked: Vec<Option<Asked>>,
    number: u64,
    chance: Chance,
    answered: u64,
}

impl Load {
    fn ask(&mut self) {
        for place in 0..OUTSTANDING {
            while self.asked[place].is_none() {
                let block = self.chance.below(BLOCKS as u64) as usize;
                if self.busy[block] {
                    continue;
                }
                let number = (self.chance.below(2) == 0).then(|| {
                    self.number += 1;
                    self.number
                });
                self.busy[block] = true;
                self.asked[place] = Some(Asked { block, number });
                self.submit(place, Asked { block, number });
            }
        }
        self.guest.kick(0);
    }

    fn submit(&mut self, place: usize, asked: Asked) {
        let number = place as u64;
        let sector = asked.block as u64 * u64::from(BLOCK) / 512;
        let data = match asked.number {
            Some(value) => {
                let bytes = value.to_le_bytes().repeat(BLOCK as usize / 8);
                self.site.write(places(number).data, &bytes);
                out(places(number).data, BLOCK)
            }
            None => into(places(number).data, BLOCK),
        };
        let kind = u32::from(asked.number.is_some());
        let parts = self.site.request(number, kind, sector, Some(data));
        self.guest.put_at(place, &parts);
    }

    /// Looks at all answers that are there.
    fn look(&mut self) {
        while let Some((head, _)) = self.guest.answered(0) {
            let place = head as usize / 3;
            let asked = self.asked.get_mut(place).and_then(Option::take);
            let asked = asked.unwrap_or_else(|| panic!("head {head} is answered twice"));
            assert_eq!(self.site.status(place as u64), 0);
            match asked.number {
                Some(number) => self.acknowledged[asked.block] = number,
                None => {
                    let seen = self.site.data(place as u64, BLOCK as usize);
                    self.is_right(asked.block, &seen);
                }
            }
            self.busy[asked.block] = false;
            self.answered += 1;
        }
    }

    fn is_right(&self, block: usize, seen: &[u8]) {
        let expected = self.acknowledged[block]
            .to_le_bytes()
            .repeat(BLOCK as usize / 8);
        let found = seen
            .get(..8)
            .and_then(|bytes| bytes.try_into().ok())
            .map(u64::from_le_bytes);
        let acknowledged = self.acknowledged[block];
        assert!(
            seen == expected,
            "block {block} has {found:?}, not {acknowledged}"
        );
    }

    fn content_is_right(&self) {
        for (block, seen) in self.site.content().chunks(BLOCK as usize).enumerate() {
            self.is_right(block, seen);
        }
    }

    fn run_for(&mut self, time: Duration) {
        let until = Instant::now() + time;
        while Instant::now() < until {
            self.ask();
            self.look();
        }
    }

    /// Waits until all that was asked is answered.
    fn settle(&mut self) {
        let until = Instant::now() + LONG;
        while self.asked.iter().any(Option::is_some) {
            assert!(Instant::now() < until, "requests are not answered");
            self.look();
            std::thread::yield_now();
        }
    }
}

/// A disk with that load on it.
fn served() -> (Server, Load) {
    let site = Site::new((BLOCKS * BLOCK as usize) as u64);
    let server = Server::start(&site);
    let guest = site.guest();
    let load = Load {
        site,
        guest,
        acknowledged: vec![0; BLOCKS],
        busy: vec![false; BLOCKS],
        asked: vec![None; OUTSTANDING],
        number: 0,
        chance: Chance(12),
        answered: 0,
    };
    (server, load)
}

/// As QEMU does at `stop` and `cont`; for five seconds, or as long as `GODWIT_STOP_CONT_S` says.
#[test]
fn a_disk_whose_queues_end_twenty_times_a_second_under_load_loses_and_doubles_nothing() {
    let (_server, mut load) = served();
    let told = std::env::var("GODWIT_STOP_CONT_S").ok();
    let seconds = told.map_or(5, |told| told.parse().unwrap());
    let (began, mut stops) = (Instant::now(), 0);
    while began.elapsed() < Duration::from_secs(seconds) || load.answered < 1000 {
        let time = Duration::from_millis(40 + load.chance.below(20));
        load.run_for(time);
        load.ask();
        for queue in 0..2 {
            let base = load.guest.end_queue(queue);
            let used = load.guest.load(load.guest.used_ring(queue as usize) + 2);
            assert_eq!(base, u32::from(used), "what was taken is answered");
        }
        load.look();
        load.guest.start();
        load.guest.kick(0);
        stops += 1;
    }
    load.settle();
    load.content_is_right();
    println!("  {} requests answered, {stops} stops", load.answered);
    assert!(stops > 0);
}

#[test]
fn a_disk_that_is_killed_a_hundred_times_under_load_loses_and_doubles_nothing() {
    let (mut server, mut load) = served();
    let mut resubmitted = 0;
    for _ in 0..KILLS {
        let time = Duration::from_micros(2000 + load.chance.below(30_000));
        load.run_for(time);
        load.ask();
        drop(server);
        server = Server::start(&load.site);
        load.look();
        resubmitted += load.asked.iter().flatten().count();
        load.guest.connect_again(&load.site.socket);
        load.guest.negotiate(0);
        load.guest.start();
        load.guest.kick(0);
    }
    load.settle();
    load.content_is_right();
    println!(
        "  {} requests answered, {resubmitted} left at {KILLS} kills",
        load.answered
    );
    assert!(resubmitted > 0 && load.answered > 1000, "there was no load");
    drop(server);
}
