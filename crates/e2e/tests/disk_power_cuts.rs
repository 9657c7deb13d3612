//! Power cuts under a disk: what a guest was told is durable is there afterwards, and no block is torn or misplaced.

#[path = "../../vhost/tests/common/mod.rs"]
mod common;

use anyhow::{Context as _, Result, ensure};
use common::{Chance, FrontEnd, LONG, Site, out, places};
use godwit_testkit::lab::Machine;
use godwit_testkit::lab::namespace::Plan;
use godwit_testkit::testvol::{self, Survives, Volume};
use std::fs::File;
use std::path::Path;
use std::time::{Duration, Instant};

const AT: &str = "/var/lib/volume";
const BLOCK: usize = 4096;
const BLOCKS: usize = 64;
const OUTSTANDING: usize = 12;
const CUTS: u64 = 30;

enum Asked {
    Write {
        block: usize,
        number: u64,
    },
    /// What each block had when it was asked for.
    Flush(Vec<u64>),
}

/// A guest that writes numbers that grow, and flushes now and then.
struct Load {
    site: Site,
    guest: FrontEnd,
    asked: Vec<Option<Asked>>,
    /// By block: what was acknowledged last, and what is durable.
    acknowledged: Vec<u64>,
    durable: Vec<u64>,
    busy: Vec<bool>,
    number: u64,
    chance: Chance,
    flushes: u64,
}

impl Load {
    fn ask(&mut self) {
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

    fn look(&mut self) -> Result<()> {
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
    fn examine(&mut self) -> Result<()> {
        let content = std::fs::read(&self.site.image)?;
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

fn machine() -> Result<Option<Machine>> {
    if let Some(why) = testvol::unavailable() {
        println!("skipped: {why}");
        return Ok(None);
    }
    let plan = Plan {
        name: "diskcuts",
        visible: &[],
        shared: &[],
        outlive_maker: false,
    };
    let mut machine = Machine::start(&plan)?;
    machine.mount_volume(Path::new(AT))?;
    Ok(Some(machine))
}

#[test]
fn an_acknowledged_flush_survives_thirty_power_cuts() -> Result<()> {
    let Some(machine) = machine()? else {
        return Ok(());
    };
    let volume: &Volume = machine.volume(AT).context("mounted above")?;
    volume.change(|disk| disk.latency = Duration::from_micros(200));
    let directory = machine.path_from_outside(AT);
    let site = Site::over(
        directory.join("disk.raw"),
        (BLOCKS * BLOCK) as u64,
        tempfile::tempdir()?,
    );
    File::open(&site.image)?.sync_all()?;
    File::open(&directory)?.sync_all()?;
    let mut load = Load {
        guest: FrontEnd::unconnected(&site.ram),
        site,
        asked: (0..OUTSTANDING).map(|_| None).collect(),
        acknowledged: vec![0; BLOCKS],
        durable: vec![0; BLOCKS],
        busy: vec![false; BLOCKS],
        number: 0,
        chance: Chance(7),
        flushes: 0,
    };
    for cut in 0..CUTS {
        let disk = load.site.disk(Vec::new());
        load.guest = load.site.front_end();
        load.site.clear_rings();
        load.guest.negotiate(0);
        load.guest.start();
        let (until, flushes) = (Instant::now() + LONG, load.flushes);
        let more = 1 + load.chance.below(6);
        while load.flushes < flushes + more {
            ensure!(Instant::now() < until, "nothing is flushed");
            load.ask();
            load.look().with_context(|| format!("after {cut} cuts"))?;
        }
        load.ask();
        volume.power_off(if cut % 3 == 0 {
            Survives::Nothing
        } else {
            Survives::Some(cut)
        });
        // It is dead like everything on that machine; what it still asks for ends here.
        std::thread::scope(|scope| {
            let ends = scope.spawn(|| drop(disk));
            while !ends.is_finished() {
                volume.refuse_held();
                std::thread::yield_now();
            }
        });
        volume.power_on();
        load.examine()?;
    }
    println!(
        "  {} writes, {} flushes, {CUTS} cuts",
        load.number, load.flushes
    );
    Ok(())
}
