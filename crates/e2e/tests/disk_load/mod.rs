//! A guest that keeps a disk busy with numbered blocks, and knows which of them are durable.
#![allow(dead_code)]

#[path = "../../../vhost/tests/common/mod.rs"]
mod common;

use anyhow::{Context as _, Result, ensure};
pub use common::{Chance, FrontEnd, LONG, Site};
use common::{out, places};
use godwit_testkit::lab::Machine;
use godwit_testkit::lab::namespace::Plan;
use godwit_testkit::testvol;
use godwit_testkit::testvol::Volume;
use std::path::Path;
use std::time::Instant;

/// Where a machine has a volume whose power can be cut.
pub const AT: &str = "/var/lib/volume";

pub const BLOCK: usize = 4096;
pub const BLOCKS: usize = 64;
const OUTSTANDING: usize = 12;

enum Asked {
    Write {
        block: usize,
        number: u64,
    },
    /// What each block had when it was asked for.
    Flush(Vec<u64>),
}

/// A guest that writes numbers that grow, and flushes now and then.
pub struct Load {
    pub site: Site,
    pub guest: FrontEnd,
    asked: Vec<Option<Asked>>,
    /// By block: what was acknowledged last, and what is durable.
    acknowledged: Vec<u64>,
    durable: Vec<u64>,
    busy: Vec<bool>,
    /// How many writes there were.
    pub number: u64,
    pub chance: Chance,
    pub flushes: u64,
}

impl Load {
    /// On an image that holds nothing.
    pub fn over(site: Site) -> Self {
        Self {
            guest: FrontEnd::unconnected(&site.ram),
            site,
            asked: (0..OUTSTANDING).map(|_| None).collect(),
            acknowledged: vec![0; BLOCKS],
            durable: vec![0; BLOCKS],
            busy: vec![false; BLOCKS],
            number: 0,
            chance: Chance(7),
            flushes: 0,
        }
    }

    /// A machine that is switched on, and works with a disk that is served.
    pub fn boot(&mut self) {
        self.guest = self.site.front_end();
        self.site.clear_rings();
        self.guest.negotiate(0);
        self.guest.start();
    }

    pub fn ask(&mut self) {
        for place in 0..OUTSTANDING {
            if self.asked[place].is_some() {
                continue;
            }
            if self.chance.below(20) == 0 {
                self.asked[place] = Some(Asked::Flush(self.acknowledged.clone()));
                let parts = self.site.request(place as u64, 4, 0, None);
                self.guest.put_at(place, &parts);
                continue;
            }
            let block = self.chance.below(BLOCKS as u64) as usize;
            if !std::mem::replace(&mut self.busy[block], true) {
                self.number += 1;
                let number = self.number;
                self.asked[place] = Some(Asked::Write { block, number });
                let data = places(place as u64).data;
                self.site
                    .write(data, &number.to_le_bytes().repeat(BLOCK / 8));
                let sector = (block * BLOCK / 512) as u64;
                let parts =
                    self.site
                        .request(place as u64, 1, sector, Some(out(data, BLOCK as u32)));
                self.guest.put_at(place, &parts);
            }
        }
        self.guest.kick(0);
    }

    /// Until some more flushes are answered; requests are under way then.
    pub fn work(&mut self) -> Result<()> {
        let (until, flushes) = (Instant::now() + LONG, self.flushes);
        let more = 1 + self.chance.below(6);
        while self.flushes < flushes + more {
            ensure!(Instant::now() < until, "nothing is flushed");
            self.ask();
            self.look()?;
        }
        self.ask();
        Ok(())
    }

    pub fn look(&mut self) -> Result<()> {
        while let Some((head, _)) = self.guest.answered(0) {
            let place = head as usize / 3;
            let asked = self.asked.get_mut(place).and_then(Option::take);
            let status = self.site.status(place as u64);
            let asked = asked.context("it was answered twice")?;
            let what = match &asked {
                Asked::Write { block, .. } => format!("a write to block {block}"),
                Asked::Flush(_) => "a flush".to_owned(),
            };
            ensure!(status == 0, "{what} ended with status {status}");
            match asked {
                Asked::Write { block, number } => {
                    self.acknowledged[block] = number;
                    self.busy[block] = false;
                }
                Asked::Flush(had) => {
                    self.flushes += 1;
                    for (durable, had) in self.durable.iter_mut().zip(had) {
                        *durable = had.max(*durable);
                    }
                }
            }
        }
        Ok(())
    }

    /// What is on the disk after a cut, which counts from here on.
    pub fn examine(&mut self) -> Result<()> {
        self.examine_bytes(&std::fs::read(&self.site.image)?)
    }

    /// The same where that was read already.
    pub fn examine_bytes(&mut self, content: &[u8]) -> Result<()> {
        ensure!(
            content.len() == BLOCKS * BLOCK,
            "the image is {} bytes long",
            content.len()
        );
        for (block, bytes) in content.chunks(BLOCK).enumerate() {
            let first: [u8; 8] = bytes[..8].try_into()?;
            let number = u64::from_le_bytes(first);
            ensure!(
                bytes.chunks(8).all(|part| part == first),
                "block {block} is torn"
            );
            let durable = self.durable[block];
            ensure!(
                number >= durable,
                "block {block} has {number}, and {durable} was durable"
            );
            (self.acknowledged[block], self.durable[block]) = (number, number);
        }
        self.busy.fill(false);
        self.asked.iter_mut().for_each(|asked| *asked = None);
        Ok(())
    }
}

/// A machine of this name with that volume, where there can be one.
pub fn machine(name: &str) -> Result<Option<Machine>> {
    if let Some(why) = testvol::unavailable() {
        println!("skipped: {why}");
        return Ok(None);
    }
    let plan = Plan {
        name,
        visible: &[],
        shared: &[],
        outlive_maker: false,
    };
    let mut machine = Machine::start(&plan)?;
    machine.mount_volume(Path::new(AT))?;
    Ok(Some(machine))
}

/// Whatever waits for the volume ends while this is done.
pub fn without_power<T: Send>(volume: &Volume, work: impl FnOnce() -> T + Send) -> Result<T> {
    std::thread::scope(|scope| {
        let works = scope.spawn(work);
        while !works.is_finished() {
            volume.refuse_held();
            std::thread::yield_now();
        }
        works.join().map_err(|_| anyhow::anyhow!("it panicked"))
    })
}
