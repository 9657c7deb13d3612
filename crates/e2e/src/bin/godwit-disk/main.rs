//! Serves one disk without a VM, and moves it to a second image when it is told to: what the bench measures of the product.
//!
//! `vm move-disk` is carried out by `vmproc` (`disks/in_place.rs`, `disks/tracked.rs`, `disks/switching.rs`), which has no disk without a VM and its
//! QEMU. So [`moving`] does the same steps by the same crates (`vhost`, `blockio`, `store`), with the same pauses and limits: a
//! mirror until both images are equal, name and content durable, stand still, what is under way ends, content durable, a durable
//! record, switch. What it leaves out: the VM's description, removing the former image, and who may run the VM.
//!
//! Lines of JSON on standard output say what happens; commands come on standard input: `move PATH` moves the disk to a file that
//! is not there yet, `move-by-dirty-tracking PATH` and `move-by-snapshot PATH` do so by those methods. It ends with its standard input. Owns the disk; refuses a second move.
#![forbid(unsafe_code)]

mod by_logs;
mod moving;
mod tracked;

use anyhow::{Context as _, Result, bail};
use by_logs::Brake;
use clap::Parser;
use godwit_blockio::delta::{Delta, NewDelta, Opening, Outliving, create, read_descriptor};
use godwit_blockio::{Access, Image, Waits};
use godwit_delta::{Id, Parent};
use godwit_guestmem::RamFile;
use godwit_tracking::Options;
use godwit_vhost::block::Geometry;
use godwit_vhost::{Disk, Settings};
use moving::By;
use serde_json::{Value, json};
use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// How long an image that somebody else has is waited for.
const LOCK_WAIT: Duration = Duration::from_millis(500);
const BLOCK_BYTES: u32 = 512;

/// Serves one disk without a VM
#[derive(Parser)]
struct Arguments {
    /// The disk's image
    #[arg(long)]
    image: PathBuf,
    /// Where a front end connects to
    #[arg(long)]
    socket: PathBuf,
    /// The file of the memory that the front end shares
    #[arg(long)]
    memory: PathBuf,
    /// Where the record is written that says which image is the disk
    #[arg(long)]
    record: PathBuf,
    /// The descriptor of a delta, which is made: the disk is that over --over, and its image holds nothing
    #[arg(long, requires = "over")]
    delta: Option<PathBuf>,
    /// The image that a delta lies over, and that others have, too
    #[arg(long, requires = "delta")]
    over: Option<PathBuf>,
    /// Dirty block tracking marks what is still to be read, too
    #[arg(long)]
    no_incremental: bool,
    /// It leaves nothing out for being written again and again
    #[arg(long)]
    no_hot_blocks: bool,
    /// Whoever works with the disk may be slowed, as the method snapshot does at the end of its means
    #[arg(long)]
    may_slow: bool,
}

fn main() -> Result<()> {
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .init();
    let arguments = Arguments::parse();
    let brake = Brake::default();
    let disk = serve(&arguments, &brake)?;
    say(&json!({"event": "serving"}));
    let options = Options {
        incremental: !arguments.no_incremental,
        hot_blocks: !arguments.no_hot_blocks,
    };
    let mut at = arguments.image;
    for line in std::io::stdin().lines() {
        let line = line?;
        let (by, to) = match line.split_once(' ') {
            Some(("move", to)) => (Some(By::Mirror), to),
            Some(("move-by-dirty-tracking", to)) => (Some(By::DirtyTracking(options)), to),
            Some(("move-by-snapshot", to)) => (None, to),
            _ => bail!("'{line}' is no command: 'move PATH' is"),
        };
        let (path, record) = (Path::new(to), &arguments.record);
        let moved = match by {
            Some(by) => moving::move_disk((&disk, by), &at, path, record),
            None => by_logs::move_disk((&disk, &brake), &at, path, record),
        };
        match moved {
            Ok(()) => at = to.into(),
            Err(error) => say(&json!({"event": "failed", "why": format!("{error:#}")})),
        }
    }
    Ok(())
}

fn serve(arguments: &Arguments, brake: &Brake) -> Result<Disk> {
    let mut image = Image::open(&arguments.image, Access::ReadWrite, BLOCK_BYTES)?;
    image.lock("disk", LOCK_WAIT)?;
    let bytes = std::fs::metadata(&arguments.memory)
        .with_context(|| format!("no memory at {}", arguments.memory.display()))?
        .len();
    let deltas = deltas(arguments, image.bytes())?;
    let geometry = Geometry {
        bytes: image.bytes(),
        block: BLOCK_BYTES,
        queues: 1,
        read_only: false,
        erases: true,
        serial: "bench".to_owned(),
    };
    let waits = Waits {
        for_room: true,
        for_storage: false,
    };
    let filters = match arguments.may_slow {
        true => brake.filters(waits),
        false => Vec::new(),
    };
    let disk = Disk::start(Settings {
        name: "disk".to_owned(),
        socket: arguments.socket.clone(),
        owner: None,
        image,
        geometry,
        filters,
        ram: Arc::new(RamFile::open(&arguments.memory, bytes)?),
        has_image: true,
        waits,
        handed: None,
        deltas,
    })?;
    Ok(disk)
}

/// What a linked disk has over its parent: one that is empty.
fn deltas(arguments: &Arguments, bytes: u64) -> Result<Vec<Delta>> {
    let Some((descriptor, over)) = arguments.delta.as_ref().zip(arguments.over.as_ref()) else {
        return Ok(Vec::new());
    };
    let mut id = [0; 16];
    getrandom::fill(&mut id).map_err(|error| anyhow::anyhow!("{error}"))?;
    let map = arguments.memory.with_extension("states");
    let parent = Parent {
        cid: 1,
        hint: "parent.vmdk".to_owned(),
    };
    create(&NewDelta {
        descriptor,
        bytes,
        id: Id(id),
        parent: &parent,
    })?;
    let opening = Opening {
        block_bytes: BLOCK_BYTES,
        name: "disk",
        patience: LOCK_WAIT,
    };
    let outliving = Outliving {
        map: &map,
        boot: Id([1; 16]),
        no_guest_lives: true,
    };
    let extent = descriptor.with_file_name(read_descriptor(descriptor)?.extent);
    let file = File::options().read(true).write(true).open(&extent)?;
    let top = Delta::top_of((file, &extent), Id(id), opening, outliving)?;
    let mut common = Image::open(over, Access::ReadOnly, BLOCK_BYTES)?;
    common.lock(&format!("disk-{}", std::process::id()), LOCK_WAIT)?;
    Ok(vec![top.over(common)?])
}

/// Whoever started this may be gone; then standard input ends, too.
fn say(event: &Value) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{event}").and_then(|()| out.flush());
}
