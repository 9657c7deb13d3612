//! How fast a guest's memory arrives, and what it costs: two VM processes as they are, on one machine's loopback.
//!
//! For each run, alternating: pages in clear and sealed, each into memory that the destination must first allocate
//! ("cold") and into memory that it has allocated beforehand ("prepared"); before them, how fast the product allocates
//! guest memory at all. The guest halts, so that nothing but the migration runs; its memory is random bytes, compared
//! page for page afterwards. Both sides share this machine's cores: a core-second per GB is the figure to trust.
//!
//! Needs root (it mounts a tmpfs with huge pages per host) and `e2e-vm-process` beside it.
#![forbid(unsafe_code)]

use anyhow::{Context as _, bail, ensure};
use godwit_e2e::guests::counter_vm;
use godwit_e2e::pair::{Options, Pair};
use godwit_guestmem::{CHUNK_PAGES, RamFile, mem_tmpfs};
use godwit_testkit::guest::counter::{CONTROL_ADDRESS, CounterSpec};
use godwit_types::MigrationId;
use godwit_types::migration::{Cipher, MigrationReport, Outcome};
use godwit_types::vm::Accelerator;
use serde_json::{Value, json};
use std::fs::File;
use std::os::unix::fs::{FileExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
/// Memory below is the firmware's and the guest's own.
const FILLED_FROM: u64 = 2 * MIB;
const PIECE: usize = 2 << 20;
const BOOT_WAIT: Duration = Duration::from_secs(30);
const MOVE_WAIT: Duration = Duration::from_secs(120);
const SAMPLE_EVERY: Duration = Duration::from_millis(10);
/// Where the counter kernel's code begins, and what replaces it: say that it runs, then halt for ever.
const CODE_OFFSET: usize = 0x200;
const HALTING: [u8; 16] = [
    0xFA, // cli
    0xB8, 0x00, 0x80, 0x8E, 0xD8, // mov ax, 8000h; mov ds, ax
    0xC7, 0x06, 0x00, 0x00, 0x57, 0x47, // mov word [0], "GW"
    0xF4, 0xEB, 0xFD, 0x90, // hlt; jmp hlt
];
const RUNS_MARK: [u8; 2] = *b"WG";

/// One kind of run.
#[derive(Debug, Clone, Copy)]
struct Cell {
    name: &'static str,
    cipher: Cipher,
    prepare: bool,
}

const CELLS: [Cell; 4] = [
    cell("plain, cold", Cipher::None, false),
    cell("plain, prepared", Cipher::None, true),
    cell("sealed, cold", Cipher::Aes256Gcm, false),
    cell("sealed, prepared", Cipher::Aes256Gcm, true),
];

const fn cell(name: &'static str, cipher: Cipher, prepare: bool) -> Cell {
    Cell {
        name,
        cipher,
        prepare,
    }
}

fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let memory_mib: u64 = arguments.next().map_or(Ok(2048), |text| text.parse())?;
    let runs: usize = arguments.next().map_or(Ok(3), |text| text.parse())?;
    let only = arguments.next().unwrap_or_default();
    ensure!(
        memory_mib >= 64 && memory_mib.is_multiple_of(2) && runs > 0,
        "usage: godwit-receive-rate [MIB [RUNS [CELL]]]"
    );
    let mut rows = Vec::new();
    println!(
        "{:17} {:>7} {:>9} {:>7} {:>9} {:>11} {:>8}  beside guest memory, MiB (page tables)",
        "", "total_s", "prepare_s", "GB/s", "source", "destination", "equal"
    );
    println!("{:46} core-seconds per GB", "");
    for _ in 0..runs {
        allocate(memory_mib)?;
        for cell in CELLS.iter().filter(|cell| cell.name.contains(&only)) {
            rows.push(measure(cell, memory_mib)?);
        }
    }
    summary(&rows);
    let target = godwit_testkit::guest::linux::target_dir()?.join("bench");
    std::fs::create_dir_all(&target)?;
    let path = target.join("receive-rate.json");
    std::fs::write(&path, serde_json::to_vec_pretty(&json!({"rows": rows}))?)?;
    println!("written to {}", path.display());
    Ok(())
}

/// How fast the product allocates guest memory, alone, with one thread and with one per core.
fn allocate(memory_mib: u64) -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    let place = Tmpfs::mount(dir.path(), memory_mib)?;
    for threads in [1, std::thread::available_parallelism()?.get() as u64] {
        let path = dir.path().join("ram");
        let ram = RamFile::create(&path, memory_mib * MIB, None)?;
        std::fs::remove_file(&path)?;
        let began = Instant::now();
        std::thread::scope(|scope| {
            let work = |thread| {
                let ram = &ram;
                let first = (thread * CHUNK_PAGES..).step_by((threads * CHUNK_PAGES) as usize);
                let mut own = first.take_while(|first| *first < ram.page_count());
                own.try_for_each(|first| ram.populate(first..first + CHUNK_PAGES))
            };
            let threads: Vec<_> = (0..threads).map(|t| scope.spawn(move || work(t))).collect();
            let mut done = threads.into_iter().map(|thread| thread.join());
            done.all(|done| matches!(done, Ok(Ok(()))))
        });
        let rate = (memory_mib * MIB) as f64 / began.elapsed().as_secs_f64() / 1e9;
        let huge = mem_tmpfs::own_huge_bytes(&ram)? / MIB;
        println!("allocation alone, {threads} threads: {rate:.2} GB/s ({huge} MiB in huge pages)");
    }
    drop(place);
    Ok(())
}

fn measure(cell: &Cell, memory_mib: u64) -> anyhow::Result<Value> {
    let pair = Pair::new(Accelerator::Tcg)?;
    let places = [
        Tmpfs::mount(pair.a.ram_dir(), memory_mib)?,
        Tmpfs::mount(pair.b.ram_dir(), memory_mib)?,
    ];
    pair.quiet.store(true, Ordering::Relaxed);
    let measured = moved(cell, &pair, memory_mib);
    drop(pair);
    drop(places);
    let (report, memory, equal) = measured?;
    let gb = (memory_mib * MIB) as f64 / 1e9;
    let row = json!({
        "cell": cell.name, "ram_mib": memory_mib, "total_s": report.total_s, "prepare_s": report.prepare_s,
        "precopy_s": report.iterations.first().map(|first| first.seconds),
        "gb_per_s": report.throughput_gb_per_s,
        "cpu_source_s_per_gb": report.cpu_source_s / gb, "cpu_destination_s_per_gb": report.cpu_destination_s / gb,
        "limited_by": report.iterations.first().map(|first| first.limited_by),
        "switchover_ms": report.switchover_ms, "streams": report.streams, "ram_equal": equal,
        "source_beside_mib": memory[0].beside_kib as f64 / 1024.0, "source_page_tables_mib": memory[0].tables_kib as f64 / 1024.0,
        "destination_beside_mib": memory[1].beside_kib as f64 / 1024.0, "destination_page_tables_mib": memory[1].tables_kib as f64 / 1024.0,
    });
    print_row(&row);
    ensure!(equal, "the destination's memory differs from the source's");
    Ok(row)
}

fn moved(
    cell: &Cell,
    pair: &Pair,
    memory_mib: u64,
) -> anyhow::Result<(MigrationReport, [Peak; 2], bool)> {
    let spec = counter_vm(pair.dir(), &CounterSpec::real(), memory_mib)?;
    let mut kernel = std::fs::read(&spec.kernel)?;
    let code = kernel.get_mut(CODE_OFFSET..CODE_OFFSET + HALTING.len());
    code.context("a short kernel")?.copy_from_slice(&HALTING);
    std::fs::write(&spec.kernel, kernel)?;
    pair.boot(&godwit_types::vm::VmSpec {
        accelerator: Accelerator::Tcg,
        ..spec
    })?;
    let source = File::options()
        .read(true)
        .write(true)
        .open(pair.a.ram_file()?)?;
    wait_halted(&source)?;
    fill(&source, memory_mib * MIB)?;
    let options = Options {
        cipher: cell.cipher,
        prepare: cell.prepare,
        ..Options::default()
    };
    let stop = AtomicBool::new(false);
    let (report, memory) = std::thread::scope(|scope| {
        let pids = [pair.a.process_id(), pair.b.process_id()];
        let watch = pids.map(|pid| {
            let stop = &stop;
            scope.spawn(move || watch(pid, stop))
        });
        let id = pair.begin(&pair.a, &pair.b, &options);
        let report = id.and_then(|id| ended(pair, &id));
        stop.store(true, Ordering::Relaxed);
        (
            report,
            watch.map(|thread| thread.join().unwrap_or_default()),
        )
    });
    let report = report?;
    if report.outcome != Some(Outcome::Completed) {
        bail!("{}: {:?}\n{}", cell.name, report.reason, pair.logs());
    }
    let destination = File::open(pair.b.ram_file()?)?;
    let equal = same(&source, &destination, memory_mib * MIB)?;
    Ok((report, memory, equal))
}

/// The source's report, with what only the destination knows for certain.
fn ended(pair: &Pair, id: &MigrationId) -> anyhow::Result<MigrationReport> {
    let there = pair.wait_end(&pair.b, id, MOVE_WAIT);
    let mut report = pair.wait_end(&pair.a, id, MOVE_WAIT)?;
    if let Ok(there) = there {
        report.cpu_destination_s = there.cpu_destination_s.max(report.cpu_destination_s);
    }
    Ok(report)
}

fn wait_halted(ram: &File) -> anyhow::Result<()> {
    let deadline = Instant::now() + BOOT_WAIT;
    let mut mark = [0; 2];
    while mark != RUNS_MARK {
        ensure!(Instant::now() < deadline, "the guest does not boot");
        // The guest says so in its memory, and in no other way.
        std::thread::sleep(Duration::from_millis(5));
        ram.read_exact_at(&mut mark, CONTROL_ADDRESS)?;
    }
    Ok(())
}

/// Random bytes: a xorshift, whose quality does not matter as long as no page is zero or equals another.
fn fill(ram: &File, bytes: u64) -> anyhow::Result<()> {
    let mut piece = vec![0_u8; PIECE];
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    let mut at = FILLED_FROM;
    while at < bytes {
        for word in piece.chunks_exact_mut(8) {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            word.copy_from_slice(&state.to_le_bytes());
        }
        ram.write_all_at(&piece, at)?;
        at += PIECE as u64;
    }
    Ok(())
}

fn same(one: &File, other: &File, bytes: u64) -> anyhow::Result<bool> {
    let (mut left, mut right) = (vec![0_u8; PIECE], vec![0_u8; PIECE]);
    let mut at = FILLED_FROM;
    while at < bytes {
        one.read_exact_at(&mut left, at)?;
        other.read_exact_at(&mut right, at)?;
        if left != right {
            return Ok(false);
        }
        at += PIECE as u64;
    }
    Ok(true)
}

/// Most memory that a process had at any moment, KiB.
#[derive(Debug, Default, Clone, Copy)]
struct Peak {
    /// Its own memory: guest memory that it maps, and page tables, not counted.
    beside_kib: u64,
    tables_kib: u64,
}

fn watch(pid: Option<u32>, stop: &AtomicBool) -> Peak {
    let mut peak = Peak::default();
    let Some(pid) = pid else { return peak };
    while !stop.load(Ordering::Relaxed) {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let beside = kib(&status, "RssAnon:") + kib(&status, "RssFile:");
        peak.beside_kib = peak.beside_kib.max(beside);
        peak.tables_kib = peak.tables_kib.max(kib(&status, "VmPTE:"));
        std::thread::sleep(SAMPLE_EVERY);
    }
    peak
}

fn kib(status: &str, field: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix(field));
    let value = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
    value.unwrap_or(0)
}

fn number(row: &Value, field: &str) -> f64 {
    row.get(field).and_then(Value::as_f64).unwrap_or(0.0)
}

fn print_row(row: &Value) {
    let n = |field| number(row, field);
    println!(
        "{:17} {:7.2} {:9.2} {:7.2} {:9.2} {:11.2} {:>8}  source {:.0} ({:.1}), destination {:.0} ({:.1}); {}",
        row.get("cell").and_then(Value::as_str).unwrap_or_default(),
        n("total_s"),
        n("prepare_s"),
        n("gb_per_s"),
        n("cpu_source_s_per_gb"),
        n("cpu_destination_s_per_gb"),
        row.get("ram_equal")
            .map(Value::to_string)
            .unwrap_or_default(),
        n("source_beside_mib"),
        n("source_page_tables_mib"),
        n("destination_beside_mib"),
        n("destination_page_tables_mib"),
        row.get("limited_by")
            .map(Value::to_string)
            .unwrap_or_default(),
    );
}

fn summary(rows: &[Value]) {
    println!("medians (lowest..highest)");
    for cell in CELLS {
        let own = rows
            .iter()
            .filter(|row| row.get("cell").and_then(Value::as_str) == Some(cell.name));
        let own: Vec<&Value> = own.collect();
        let figure = |field| {
            let mut values: Vec<f64> = own.iter().map(|row| number(row, field)).collect();
            values.sort_by(f64::total_cmp);
            let at = |index: usize| values.get(index).copied().unwrap_or(0.0);
            format!(
                "{:.2} ({:.2}..{:.2})",
                at(values.len() / 2),
                at(0),
                at(values.len().saturating_sub(1))
            )
        };
        if !own.is_empty() {
            println!(
                "{:17} total {} s, {} GB/s, source {} and destination {} core-s/GB",
                cell.name,
                figure("total_s"),
                figure("gb_per_s"),
                figure("cpu_source_s_per_gb"),
                figure("cpu_destination_s_per_gb")
            );
        }
    }
}

/// A tmpfs as the agent mounts it, gone when dropped.
struct Tmpfs(PathBuf);

impl Tmpfs {
    fn mount(at: &Path, memory_mib: u64) -> anyhow::Result<Self> {
        std::fs::create_dir_all(at)?;
        mem_tmpfs::ensure_mounted(at, memory_mib * MIB + 64 * MIB)?;
        std::fs::set_permissions(at, std::fs::Permissions::from_mode(0o755))?;
        Ok(Self(at.to_owned()))
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}
