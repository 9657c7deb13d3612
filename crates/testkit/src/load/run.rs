//! A whole run: fill, find the most the guest can serve, then a fixed rate with a row for every second.

use std::net::SocketAddr;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::client::{Client, Counts, fill};
use super::pace::{Progress, Session, find_and_hold};
use super::series::Workload;

#[derive(Clone, Debug)]
pub struct LoadConfig {
    pub address: SocketAddr,
    pub data_mib: u64,
    pub value_bytes: usize,
    /// Connections, each with its own share of the keys.
    pub connections: usize,
    /// How long to look for the most that can be served.
    pub probe: Duration,
    /// Operations a second; absent: `fraction` of the most.
    pub rate_ops_per_s: Option<f64>,
    /// Share of the most that can be served, when no rate is given.
    pub fraction: f64,
    /// How long to run at the fixed rate, unless stopped.
    pub duration: Duration,
    /// Share of operations that write, 0 to 1.
    pub write_share: f64,
    /// Read every key once at the end.
    pub verify_all: bool,
}

/// Runs until the time is over or `stop` is set, telling `progress` what happens.
pub fn run(
    config: &LoadConfig,
    stop: &AtomicBool,
    mut progress: impl FnMut(Progress),
) -> Result<Workload> {
    let keys = (config.data_mib << 20) / config.value_bytes.max(1) as u64;
    ensure!(
        config.connections > 0 && keys >= config.connections as u64,
        "fewer keys than connections"
    );
    ensure!(
        (0.0..=1.0).contains(&config.write_share),
        "the share of writes lies between 0 and 1"
    );
    let filled = fill(config.address, keys, config.value_bytes).context("cannot fill Redis")?;
    progress(Progress::Filled(filled.as_secs_f64()));
    let mut clients = connect_all(config, keys)?;
    let times = (config.probe, config.duration);
    let choose = |most| config.rate_ops_per_s.unwrap_or(most * config.fraction);
    let paced = find_and_hold(&mut clients, times, choose, stop, &mut progress)?;
    if config.verify_all {
        verify(&mut clients);
    }
    let mut counts = Counts::default();
    clients
        .iter()
        .for_each(|mixed| counts.add(&mixed.client.counts()));
    Ok(Workload {
        name: name(config),
        started_unix_ms: paced.started_unix_ms,
        seconds: paced.seconds,
        connections_lost: counts.lost,
        verified_reads: counts.verified,
        damaged_reads: counts.damaged,
        lost_writes: counts.lost_writes,
        errors: counts.errors,
        keys,
        value_bytes: config.value_bytes as u64,
        fill_seconds: filled.as_secs_f64(),
        max_ops_per_s: paced.most,
        rate_ops_per_s: paced.rate,
        ..Workload::default()
    })
}

fn name(config: &LoadConfig) -> String {
    let (mib, bytes, writes) = (
        config.data_mib,
        config.value_bytes,
        config.write_share * 100.0,
    );
    format!(
        "redis: {mib} MiB in values of {bytes} bytes, {writes:.0} % SET, {} connections",
        config.connections
    )
}

/// A connection that reads and writes its keys in the wanted mixture.
struct Mixed {
    client: Client,
    write_below: u64,
}

impl Session for Mixed {
    fn operate(&mut self, random: u64) -> bool {
        let index = (random >> 16) as usize % self.client.key_count().max(1);
        self.client
            .operate(index, random & 0xFFFF < self.write_below)
    }
}

fn connect_all(config: &LoadConfig, keys: u64) -> Result<Vec<Mixed>> {
    let count = config.connections as u64;
    let share = |number: u64| (number..keys).step_by(config.connections).collect();
    let write_below = (config.write_share * 65536.0) as u64;
    let connect = |number| {
        let client = Client::new(config.address, share(number), config.value_bytes)?;
        Ok(Mixed {
            client,
            write_below,
        })
    };
    (0..count)
        .map(connect)
        .collect::<std::io::Result<_>>()
        .context("cannot connect to Redis")
}

fn verify(clients: &mut [Mixed]) {
    std::thread::scope(|scope| {
        for Mixed { client, .. } in clients {
            scope.spawn(move || {
                for index in 0..client.key_count() {
                    client.operate(index, false);
                }
            });
        }
    });
}
