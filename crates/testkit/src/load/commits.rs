//! Commits in a guest's PostgreSQL, noted outside of the guest as they are acknowledged, while pgbench runs in it.
//!
//! A [`Committer`] is one `psql` in the guest at one connection; it numbers its rows from 1 without holes, so that the last
//! number is the record of all. Refuses: an answer that is not the row's number, such as an error of the database.

use super::pace::{Progress, Session, find_and_hold};
use super::series::Workload;
use crate::guest::debian::Shell;
use anyhow::{Context as _, Result, ensure};
use std::io;
use std::net::{IpAddr, TcpStream};
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

/// The database that rows and pgbench's tables are in.
const DATABASE: &str = "bench";
/// PostgreSQL's own programs in the guest.
const PROGRAMS: &str = "/usr/lib/postgresql/15/bin";
/// What `psql` says once it reads statements.
const READY: &str = "ready";
/// Size of pgbench's tables for each step of its scale.
const MIB_OF_SCALE: u32 = 15;
const CLIENTS: u32 = 2;

/// A command in the guest that gives a statement to the database.
fn sql(statement: &str) -> String {
    format!("su postgres -c 'psql -qAtX -v ON_ERROR_STOP=1 {DATABASE}' <<'S'\n{statement}\nS")
}

/// Waits until the database answers in a guest that boots.
pub fn wait_ready(shell: &mut Shell, within: Duration) -> Result<()> {
    shell.run("systemctl start postgresql@15-main", within)?;
    shell.run("su postgres -c pg_isready", within).map(drop)
}

/// Makes the database, pgbench's tables of about so many MiB in it and one for committers, and starts pgbench as a unit.
pub fn prepare(shell: &mut Shell, data_mib: u32, within: Duration) -> Result<()> {
    let table = "create table commits (client int, n bigint, primary key (client, n))";
    shell.run(&format!("su postgres -c 'createdb {DATABASE}'"), within)?;
    shell.run(&sql(table), within)?;
    let scale = (data_mib / MIB_OF_SCALE).max(1);
    let fill = format!("su postgres -c 'pgbench -q -i -s {scale} {DATABASE}'");
    shell.run(&fill, within)?;
    let unit = "systemd-run --quiet --unit=pgbench --uid=postgres";
    let pgbench = format!("{unit} pgbench -n -c {CLIENTS} -T 86400 {DATABASE}");
    shell.run(&pgbench, within).map(drop)
}

/// How many acknowledged rows are not in the database; `acknowledged` has the last row of each client.
pub fn missing(shell: &mut Shell, acknowledged: &[u64], within: Duration) -> Result<u64> {
    let mut missing = 0;
    for (client, &last) in acknowledged.iter().enumerate() {
        let query = format!("select count(*) from commits where client = {client} and n <= {last}");
        let found: u64 = shell.run(&sql(&query), within)?.parse()?;
        missing += last.saturating_sub(found);
    }
    Ok(missing)
}

/// Refuses a database in which pgbench's sums differ: each of its transactions adds the same to four tables.
pub fn check_sums(shell: &mut Shell, within: Duration) -> Result<()> {
    let sum =
        |column: &str, table: &str| format!("(select coalesce(sum({column}), 0) from {table})");
    let sums = [
        sum("abalance", "pgbench_accounts"),
        sum("tbalance", "pgbench_tellers"),
        sum("bbalance", "pgbench_branches"),
        sum("delta", "pgbench_history"),
    ];
    let query = format!("select {}", sums.join(", "));
    let said = shell.run(&sql(&query), within)?;
    let mut sums = said.split('|');
    let first = sums.next().context("no sums")?;
    ensure!(
        sums.all(|sum| sum == first),
        "the sums of pgbench's tables differ: {said}"
    );
    Ok(())
}

/// Refuses a database that PostgreSQL's own tools find damaged, or cannot read whole.
pub fn check_deeply(shell: &mut Shell, within: Duration) -> Result<()> {
    let check = format!("{PROGRAMS}/pg_amcheck --install-missing --heapallindexed");
    for tool in [&check, "pg_dump -f /dev/null"] {
        shell.run(&format!("su postgres -c '{tool} {DATABASE}'"), within)?;
    }
    Ok(())
}

/// One client of the guest's database.
#[derive(Debug)]
pub struct Committer {
    shell: Shell,
    number: u32,
    acknowledged: u64,
    is_lost: bool,
}

impl Committer {
    /// Connects from this thread's network; no commit takes longer than `within`.
    pub fn connect(guest: IpAddr, number: u32, within: Duration) -> io::Result<Self> {
        let mut shell = Shell::connect(guest, within)?;
        let psql = format!("psql -qAtX -v ON_ERROR_STOP=1 -c \"\\echo {READY}\" -f - {DATABASE}");
        shell.send(&format!("exec su postgres -c '{psql}' 2>&1\n"))?;
        let said = shell.line()?;
        if said != READY {
            return Err(io::Error::other(said));
        }
        Ok(Self {
            shell,
            number,
            acknowledged: 0,
            is_lost: false,
        })
    }

    /// Adds the next row and waits until its commit is acknowledged.
    pub fn commit(&mut self) -> io::Result<()> {
        let row = self.acknowledged + 1;
        let insert = format!("insert into commits values ({}, {row});\n", self.number);
        self.shell.send(&format!("{insert}\\echo {row}\n"))?;
        let said = self.shell.line()?;
        if said != row.to_string() {
            return Err(io::Error::other(format!("row {row}: {said}")));
        }
        self.acknowledged = row;
        Ok(())
    }

    /// The last row that is known to be committed, and with it all before.
    pub fn acknowledged(&self) -> u64 {
        self.acknowledged
    }

    /// The connection, for whoever wants to end it.
    pub fn stream(&self) -> io::Result<TcpStream> {
        self.shell.stream().try_clone()
    }
}

/// Commits as an operation. A connection that was lost stays so: whether its last row was committed is not known.
impl Session for Committer {
    fn operate(&mut self, _random: u64) -> bool {
        self.is_lost = self.is_lost || self.commit().is_err();
        !self.is_lost
    }
}

#[derive(Clone, Debug)]
pub struct CommitsConfig {
    pub guest: IpAddr,
    /// Size of pgbench's tables, about.
    pub data_mib: u32,
    /// How many clients commit at a time.
    pub connections: u32,
    /// How long to look for the most that can be served.
    pub probe: Duration,
    /// Share of the most that is then sent.
    pub fraction: f64,
    /// How long to run at the fixed rate, unless stopped.
    pub duration: Duration,
    /// Longest command in the guest.
    pub patience: Duration,
}

/// Prepares the guest's database, commits until the time is over or `stop` is set, and looks for what was acknowledged.
pub fn run(
    config: &CommitsConfig,
    stop: &AtomicBool,
    mut progress: impl FnMut(Progress),
) -> Result<Workload> {
    let (began, patience) = (Instant::now(), config.patience);
    let mut shell = Shell::connect(config.guest, patience)?;
    wait_ready(&mut shell, patience)?;
    prepare(&mut shell, config.data_mib, patience)?;
    let fill_seconds = began.elapsed().as_secs_f64();
    progress(Progress::Filled(fill_seconds));
    let connect = |number| Committer::connect(config.guest, number, patience);
    let committers = (0..config.connections).map(connect);
    let mut committers = committers.collect::<io::Result<Vec<_>>>()?;
    let times = (config.probe, config.duration);
    let choose = |most| most * config.fraction;
    let paced = find_and_hold(&mut committers, times, choose, stop, &mut progress)?;
    shell.run("systemctl stop pgbench", patience)?;
    let acknowledged: Vec<u64> = committers.iter().map(Committer::acknowledged).collect();
    let lost_writes = missing(&mut shell, &acknowledged, patience)?;
    let checked = [
        check_sums(&mut shell, patience),
        check_deeply(&mut shell, patience),
    ];
    let errors = checked.iter().filter_map(|check| check.as_ref().err());
    let errors = errors.inspect(|error| eprintln!("{error:#}")).count() as u64;
    let rows: u64 = acknowledged.iter().sum();
    Ok(Workload {
        name: name(config),
        started_unix_ms: paced.started_unix_ms,
        seconds: paced.seconds,
        connections_lost: committers.iter().filter(|one| one.is_lost).count() as u64,
        verified_reads: rows - lost_writes,
        lost_writes,
        errors,
        keys: rows,
        fill_seconds,
        max_ops_per_s: paced.most,
        rate_ops_per_s: paced.rate,
        ..Workload::default()
    })
}

fn name(config: &CommitsConfig) -> String {
    format!(
        "postgresql: pgbench as fast as it can over {CLIENTS} connections in the guest, tables of about {} MiB; from outside, \
         commits of one row each over {} connections",
        config.data_mib, config.connections
    )
}
