//! A soak: the whole product on three test hosts is broken at random for a time, and looked at from outside.
//!
//! [`plan`] works out each round from a seed, [`faults`], [`orders`] and [`rules`] do it to the [`site`], [`watch`] looks at it
//! meanwhile, [`meter`] tells a guest's CPU time from QEMU's own, [`settle`] waits until it has come to rest, [`snapshots`] has each disk
//! be one image again, [`checks`] judges, [`report`] tells. After a violation
//! the site is built anew, so that each round stands for itself.

pub mod checks;
pub mod disks;
pub mod faults;
pub mod meter;
pub mod orders;
pub mod plan;
pub mod report;
pub mod rules;
pub mod settle;
pub mod site;
pub mod snapshots;
pub mod watch;

use anyhow::{Context as _, Result};
use checks::{Kind, Violation, boots, doublings, losses, not_ended, unexplained, wrong_lists};
use faults::{Account, Scene};
use godwit_testkit::guest::linux::target_dir;
use godwit_testkit::interrupt;
use plan::{Fault, Round};
use report::{Outcome, Record, Report};
use settle::{Rest, Settling};
use site::Site;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::{Duration, Instant};

#[derive(Debug)]
pub struct Options {
    pub time: Duration,
    /// At most so many rounds.
    pub rounds: Option<u32>,
    /// What the plans come from.
    pub seed: u64,
    /// The first round's number.
    pub first: u32,
    pub vms: usize,
    pub faults: Vec<&'static Fault>,
    /// Whether a VM that a person's false word ran twice is no violation.
    pub forgives: bool,
}

/// A round's part that the watchers see.
struct Played {
    account: Account,
    violations: Vec<Violation>,
    homes: Option<BTreeMap<String, String>>,
}

/// Soaks and gives the report. Ends early, without judging the round, on Ctrl-C.
pub fn run(options: &Options) -> Result<Report> {
    let directory = target_dir()?.join("soak");
    if directory.exists() {
        std::fs::remove_dir_all(&directory)?;
    }
    let until = Instant::now() + options.time;
    let mut report = Report::default();
    let mut standing: Option<(Site, BTreeMap<String, String>)> = None;
    for number in options.first.. {
        let enough = options
            .rounds
            .is_some_and(|rounds| number - options.first >= rounds);
        if enough || Instant::now() > until || interrupt::caught() {
            break;
        }
        let (mut site, homes) = match standing.take() {
            Some(standing) => standing,
            None => build(options.vms)?,
        };
        let round = Round::plan(options.seed, number, &options.faults, options.vms);
        let (record, homes) = one_round(&mut site, round, homes, options.forgives)?;
        if interrupt::caught() {
            break;
        }
        println!("{}", report::line(&record));
        report::note(&directory, &record)?;
        report.add(&record);
        keep_violations(&mut site, &record, &directory)?;
        if record.violations.is_empty() {
            standing = homes.map(|homes| (site, homes));
        }
    }
    Ok(report)
}

fn keep_violations(site: &mut Site, record: &Record, directory: &Path) -> Result<()> {
    if record.violations.is_empty() {
        return Ok(());
    }
    for host in site.hosts.clone() {
        site.keep_logs(&host);
    }
    let kept = report::keep(directory, record, site.stack.dir())?;
    println!("    kept in {}", kept.display());
    Ok(())
}

/// A new site with all VMs running.
fn build(vms: usize) -> Result<(Site, BTreeMap<String, String>)> {
    let site = Site::new(vms)?;
    let mut account = Account::default();
    match Settling::new(&site, &mut account).rest()? {
        Rest::At(homes) => Ok((site, homes)),
        Rest::Not(_) if interrupt::caught() => Ok((site, BTreeMap::new())),
        Rest::Not(why) => anyhow::bail!("a new site does not come to rest: {why}"),
    }
}

/// Plays a round and judges it. Gives where the VMs are afterwards, unless the site cannot be used again.
fn one_round(
    site: &mut Site,
    round: Round,
    homes: BTreeMap<String, String>,
    forgives: bool,
) -> Result<(Record, Option<BTreeMap<String, String>>)> {
    let began = Instant::now();
    let since = site.watch.begin_round();
    let mut scene = Scene::new(site, &round, homes);
    let played = scene.play(&round);
    let healed = scene.heal().context("healing the site");
    let account = scene.account;
    played.and(healed).with_context(|| {
        let log = account.log.join("\n  ");
        format!(
            "round {} ({round}) cannot be played to its end:\n  {log}\n ",
            round.number
        )
    })?;
    let mut played = Played {
        account,
        violations: Vec::new(),
        homes: None,
    };
    conclude(site, &round, &mut played)?;
    if played.homes.is_none() && played.account.needs_person && !interrupt::caught() {
        way_out(site, &round, &mut played)?;
        conclude(site, &round, &mut played)?;
    }
    let (traces, shown) = (site.watch.traces(), site.watch.shown());
    let (none, account) = (BTreeSet::new(), &mut played.account);
    let explained = if forgives {
        &account.false_words
    } else {
        &none
    };
    let doubled = unexplained(doublings(&traces), explained, &account.doubled);
    played.violations.append(&mut account.violations);
    played.violations.extend(doubled);
    played
        .violations
        .extend(losses(&traces, &played.account.excuses, since));
    // Of a VM that runs twice one copy may be ended and the other run on.
    let false_words = &played.account.false_words;
    let ended = &mut played.account.ended;
    ended.retain(|promise| !false_words.contains(&promise.vm));
    played.violations.extend(not_ended(&traces, ended));
    // A host that a person falsely said to be off counts as one in lists, too.
    let (falsely_off, mut seen) = (&played.account.falsely_off, traces.clone());
    seen.retain(|trace| !falsely_off.contains(&trace.host));
    played.violations.extend(wrong_lists(&shown, &seen));
    let outcome = outcome(&played, boots(&traces, since));
    let record = Record {
        round,
        account: played.account,
        traces,
        shown,
        violations: played.violations,
        outcome,
        took: began.elapsed(),
    };
    Ok((record, played.homes))
}

/// Whether a person has something to do: a VM is down, or, though all run, a host stands on an old copy of its disk.
fn waits_for_person(site: &Site, rest: &Rest, played: &mut Played) -> Result<bool> {
    let old = rules::old_copies(&site.stack.site()?);
    let why = match rest {
        Rest::At(_) if old.is_empty() => return Ok(false),
        Rest::At(_) => "all VMs run",
        Rest::Not(why) => why,
    };
    let at = site.watch.now() as f64 / 1e9;
    let log = &mut played.account.log;
    log.push(format!("{at:9.3} old copies on {old:?}, and: {why}"));
    played.violations.extend(settle::down_and_shown(site));
    Ok(true)
}

/// A person does what the site says that has to be done. After that nobody is needed any more.
fn way_out(site: &mut Site, round: &Round, played: &mut Played) -> Result<()> {
    let mut scene = Scene::new(site, round, BTreeMap::new());
    scene.account = std::mem::take(&mut played.account);
    let taken = rules::take_out_old_copies(&mut scene);
    scene.account.needs_person = false;
    if let Err(error) = taken {
        let what = format!("the way out that an alarm names is none: {error:#}");
        let violation = Violation::new(Kind::Stuck, "site", what);
        scene.account.violations.push(violation);
    }
    let healed = scene.heal().context("healing the site");
    played.account = scene.account;
    healed
}

/// What is true once the site is at rest, and one more move.
fn conclude(site: &Site, round: &Round, played: &mut Played) -> Result<()> {
    let mut settling = Settling::new(site, &mut played.account);
    let rest = settling.rest()?;
    played.violations.append(&mut settling.violations);
    if interrupt::caught() {
        return Ok(());
    }
    if played.account.needs_person && waits_for_person(site, &rest, played)? {
        return Ok(());
    }
    let mut homes = match rest {
        Rest::At(homes) => homes,
        Rest::Not(why) => {
            played
                .violations
                .push(Violation::new(Kind::Stuck, "site", why));
            return Ok(());
        }
    };
    let (unmerged, log) = snapshots::tidy(site);
    played.account.log.extend(log);
    if !unmerged.is_empty() {
        // Such a disk is held against nothing: what it holds is not in its own image alone.
        played.violations.extend(unmerged);
        return Ok(());
    }
    let put_away = site.put_away(&homes)?;
    played.account.log.extend(put_away);
    played.violations.extend(settle::inspect(site, &homes));
    let with_disk = homes.keys().filter(|vm| site.disks.has(vm));
    played.account.disks_checked += with_disk.count();
    played
        .violations
        .extend(settle::moves(site, &played.account));
    let vm = site.vms.get(round.vm).context("no such VM")?;
    let home = homes.get(vm).context("it is nowhere")?;
    match settle::move_once(site, vm, home) {
        Ok(to) => drop(homes.insert(vm.clone(), to)),
        Err(error) => {
            let what = format!("{error:#}");
            played
                .violations
                .push(Violation::new(Kind::MoveFailed, vm, what));
        }
    }
    played.homes = Some(homes);
    Ok(())
}

fn outcome(played: &Played, boots: usize) -> Outcome {
    if !played.violations.is_empty() {
        Outcome::Violated
    } else if played.homes.is_none() {
        Outcome::Down
    } else if played.account.helped > 0 {
        Outcome::Helped
    } else if boots > 0 {
        Outcome::BootedAnew
    } else {
        Outcome::Unharmed
    }
}
