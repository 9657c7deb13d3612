//! What nothing can beat here: the network by iperf3, the first touch of the destination's memory, the cipher.
//!
//! Rows of their own beside the systems. Owns what it starts and the files that it makes.

use crate::machine::warm_again;
use crate::plan::Cell;
use crate::row::Row;
use crate::stage::{PEER_RAM, Stage};
use crate::system::System;
use anyhow::{Context as _, Result, ensure};
use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use godwit_testkit::touch;
use serde_json::{Value, json};
use std::fs::File;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

const IPERF_SECONDS: u32 = 3;
/// Size of a sealed record.
const RECORD_BYTES: usize = 256 << 10;
/// Long beyond every cache, as guest memory is.
const CIPHER_BYTES: usize = 512 << 20;

/// Fills in the rate and gives the outcome.
pub fn measure(stage: &Stage, system: &System, cell: &Cell, row: &mut Row) -> Result<String> {
    // As the systems beside it: a limit of memory that the hypervisor had taken back would be none.
    row.first_touch_gb_per_s = Some(warm_again(cell.ram_mib)?.warm);
    row.throughput_gb_per_s = Some(match *system {
        System::Iperf { streams } => match iperf(stage, streams, row)? {
            Some(rate) => rate,
            None => return Ok("skipped: iperf3 is not installed: scripts/install-deps.sh".into()),
        },
        System::FirstTouch { huge } => first_touch(stage, huge, u64::from(cell.ram_mib) << 20)?,
        System::Cipher { open } => cipher(open)?,
        System::Godwit { .. } | System::Qemu(_) => anyhow::bail!("not a limit"),
    });
    Ok("completed".into())
}

struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill(); // it has ended by itself after its one client
        let _ = self.0.wait();
    }
}

fn iperf(stage: &Stage, streams: u32, row: &mut Row) -> Result<Option<f64>> {
    let program = "/usr/bin/iperf3";
    if !std::path::Path::new(program).exists() {
        return Ok(None);
    }
    let address = stage.address(1);
    let mut server = stage.command("b", program)?;
    server.args(["-s", "-1", "-B", &address]);
    let server = server
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let _server = Server(server.spawn()?);
    let deadline = Instant::now() + Duration::from_secs(10);
    let (streams, seconds) = (streams.to_string(), IPERF_SECONDS.to_string());
    let report: Value = loop {
        let mut client = stage.command("a", program)?;
        client.args(["-c", &address, "-P", &streams, "-t", &seconds, "-J"]);
        let output = client.output()?;
        // A server that does not listen yet is an error in the report, whatever the exit code.
        match serde_json::from_slice::<Value>(&output.stdout) {
            Ok(report) if report["error"].is_null() => break report,
            _ => {}
        }
        ensure!(
            Instant::now() < deadline,
            "iperf3 reaches no server at {address}"
        );
        std::thread::sleep(Duration::from_millis(50));
    };
    let end = &report["end"];
    let bits = end["sum_received"]["bits_per_second"]
        .as_f64()
        .context("iperf3 told no rate")?;
    let gb = end["sum_received"]["bytes"].as_f64().unwrap_or(0.0) / 1e9;
    let cores_s = |side: &str| {
        let percent = end["cpu_utilization_percent"][side].as_f64()?;
        (gb > 0.0).then(|| percent / 100.0 * f64::from(IPERF_SECONDS) / gb)
    };
    row.cpu_source_s_per_gb = cores_s("host_total");
    row.cpu_destination_s_per_gb = cores_s("remote_total");
    Ok(Some(bits / 8e9))
}

/// A fresh file on a tmpfs of the destination, touched by as many threads as there are cores.
fn first_touch(stage: &Stage, huge: bool, bytes: u64) -> Result<f64> {
    let dir = if huge {
        PEER_RAM.to_owned()
    } else {
        format!("{PEER_RAM}-small")
    };
    if !huge {
        let script = format!(
            "mountpoint -q {dir} || {{ mkdir -p {dir} && mount -t tmpfs -o huge=never,size=90% tmpfs {dir}; }}"
        );
        let output = stage.command("b", "sh")?.args(["-c", &script]).output()?;
        ensure!(output.status.success(), "cannot mount {dir}");
    }
    let path = stage.inside("b", format!("{dir}/touch"))?;
    let file = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .open(&path)?;
    std::fs::remove_file(&path)?;
    file.set_len(bytes)?;
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let took = touch::file(&file, bytes, threads)?;
    Ok(bytes as f64 / 1e9 / took.as_secs_f64())
}

/// One core, records as the product makes them, out of memory that no cache holds.
fn cipher(open: bool) -> Result<f64> {
    let wrong = |_| anyhow::anyhow!("the cipher refuses");
    let key = LessSafeKey::new(UnboundKey::new(&AES_256_GCM, &[7; 32]).map_err(wrong)?);
    let nonce = || Nonce::assume_unique_for_key([0; 12]);
    let mut memory = vec![1_u8; CIPHER_BYTES];
    let tag = AES_256_GCM.tag_len();
    let mut record = vec![0_u8; RECORD_BYTES + tag];
    if open {
        // Every record of the memory becomes a sealed one.
        for chunk in memory.chunks_exact_mut(RECORD_BYTES + tag) {
            let body = &mut chunk[..RECORD_BYTES];
            let sealed = key
                .seal_in_place_separate_tag(nonce(), Aad::empty(), body)
                .map_err(wrong)?;
            chunk[RECORD_BYTES..].copy_from_slice(sealed.as_ref());
        }
    }
    let (began, mut bytes) = (Instant::now(), 0_usize);
    while began.elapsed() < Duration::from_secs(1) {
        for chunk in memory.chunks_exact(RECORD_BYTES + tag) {
            let (body, sealed) = chunk.split_at(RECORD_BYTES);
            let out = &mut record[..RECORD_BYTES];
            if open {
                key.open_separate_gather(nonce(), Aad::empty(), body, sealed, out)
                    .map_err(wrong)?;
            } else {
                out.copy_from_slice(body);
                let sealed = key
                    .seal_in_place_separate_tag(nonce(), Aad::empty(), out)
                    .map_err(wrong)?;
                let _ = std::hint::black_box(sealed);
            }
            std::hint::black_box(&record);
            bytes += RECORD_BYTES;
        }
    }
    Ok(bytes as f64 / 1e9 / began.elapsed().as_secs_f64())
}

/// Says which limits were asked in what way, for the page.
pub fn explained() -> Value {
    json!({
        "iperf3": format!("{IPERF_SECONDS} s between the same hosts over the same addresses"),
        "first-touch": "a byte of every page of a fresh tmpfs file, all cores",
        "aes-256-gcm": "records of 256 KiB from cold memory on one core; sealing includes a copy",
    })
}
