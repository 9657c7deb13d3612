//! Encryption modes on the whole product, and what a listener on the migration link sees in each.

use anyhow::{Context as _, Result, ensure};
use godwit_e2e::stack::disks::{describe, disk, goes_on_at, make_image};
use godwit_e2e::stack::{Counter, HostPlan, Plan, SOON, Stack, names};
use rustix::net::sockopt::{Timeout, set_socket_recv_buffer_size_force, set_socket_timeout};
use rustix::net::{AddressFamily, Protocol, RecvFlags, SocketType, recv, socket};
use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Pages that the guests count.
const MEMORY_MIB: u32 = 32;
/// Fills what a disk holds before its guest runs.
const HELD: u32 = 0x0707_0707;

/// One lab for all cases; host b may encrypt or not.
static STACK: LazyLock<Mutex<Result<Stack, String>>> = LazyLock::new(|| {
    let stack = Stack::new("encryption", &Plan::default());
    Mutex::new(stack.map_err(|error| format!("{error:#}")))
});

fn stack() -> MutexGuard<'static, Result<Stack, String>> {
    STACK.lock().unwrap_or_else(PoisonError::into_inner)
}

fn up(stack: &Result<Stack, String>) -> Result<&Stack> {
    stack.as_ref().map_err(|error| anyhow::anyhow!("{error}"))
}

/// What a listener saw.
#[derive(Debug, Default)]
struct Heard {
    bytes: usize,
    pages: usize,
    /// What it saw again and again, as a disk's guest fills its sectors.
    words: BTreeSet<u32>,
}

impl Heard {
    /// Whether it saw what [`HELD`] fills, and how many other words that a guest may have filled sectors with.
    fn of_disk(&self) -> (bool, usize) {
        let has_held = self.words.contains(&HELD);
        (has_held, self.words.len() - usize::from(has_held))
    }
}

/// Counts beginnings of counter pages in a packet: counter, zeros, the page's number below the end of memory, and
/// 52 more zeros. Sealed bytes show this with a probability of 2^-400.
fn count_pages(packet: &[u8]) -> usize {
    let end = MEMORY_MIB * 256;
    let is_page = |window: &&[u8]| {
        let number = window[8..12].try_into().map_or(0, u32::from_le_bytes);
        window[0] != 0
            && (0x101..end).contains(&number)
            && window[4..8]
                .iter()
                .chain(&window[12..])
                .all(|byte| *byte == 0)
    };
    packet.windows(64).filter(is_page).count()
}

/// Words but zero that fill 64 bytes of a packet, each in the least way that its bytes can be turned.
fn words(packet: &[u8]) -> impl Iterator<Item = u32> {
    let filled = packet.windows(64).filter(|it| it[..60] == it[4..]);
    let word = filled.filter_map(|it| it[..4].try_into().ok().map(u32::from_le_bytes));
    let turned = word.filter_map(|word| (0..4).map(|by| word.rotate_left(8 * by)).min());
    turned.filter(|word| *word != 0)
}

/// Listens on all links of the switch while `action` runs.
fn listen<T>(stack: &Stack, action: impl FnOnce() -> Result<T>) -> Result<(T, Heard)> {
    let every = Protocol::from_raw(
        u32::from(0x0003_u16.to_be())
            .try_into()
            .context("protocol number")?,
    );
    let open = || socket(AddressFamily::PACKET, SocketType::RAW, Some(every));
    let ear = stack.machine("switch")?.in_network(open)??;
    set_socket_recv_buffer_size_force(&ear, 64 << 20)?;
    set_socket_timeout(&ear, Timeout::Recv, Some(Duration::from_millis(100)))?;
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let listener = scope.spawn(|| hear(&ear, &over));
        let done = action();
        over.store(true, Ordering::SeqCst);
        let heard = listener.join();
        let heard = heard.map_err(|_| anyhow::anyhow!("the listener ended badly"))?;
        Ok((done?, heard))
    })
}

fn hear(ear: &std::os::fd::OwnedFd, over: &AtomicBool) -> Heard {
    let mut heard = Heard::default();
    let mut packet = vec![0; 128 << 10];
    loop {
        match recv(ear, &mut packet[..], RecvFlags::empty()) {
            Ok((_, length)) => {
                heard.bytes += length;
                heard.pages += count_pages(&packet[..length]);
                heard.words.extend(words(&packet[..length]));
            }
            Err(_) if over.load(Ordering::SeqCst) => return heard,
            Err(_) => {}
        }
    }
}

#[test]
fn between_encrypting_hosts_everything_but_disabled_is_sealed() -> Result<()> {
    let stack = stack();
    let stack = up(&stack)?;
    stack.start_counter(&Counter::flat("sealed", MEMORY_MIB), "a")?;
    let (report, heard) = listen(stack, || stack.migrate("sealed", "b", &[]))?;
    println!("opportunistic: {heard:?}");
    ensure!(report["encryption"] == "aes-256-gcm", "{report}");
    ensure!(heard.bytes > 4 << 20, "the listener was deaf: {heard:?}");
    ensure!(heard.pages == 0, "guest pages could be read: {heard:?}");
    stack.check_guest("sealed", "b")?;

    let clear = ["--encryption", "disabled"];
    let (report, heard) = listen(stack, || stack.migrate("sealed", "a", &clear))?;
    println!("disabled: {heard:?}");
    ensure!(report["encryption"] == "none", "{report}");
    ensure!(
        heard.pages > 256,
        "the listener would not have seen a page: {heard:?}"
    );
    stack.check_guest("sealed", "a")?;
    stack.remove("sealed")
}

#[test]
fn between_encrypting_hosts_a_disk_and_what_its_guest_writes_are_sealed() -> Result<()> {
    let stack = stack();
    let stack = up(&stack)?;
    let image = make_image(stack, "along")?;
    let file = File::options()
        .write(true)
        .open(stack.inside("a", &image)?)?;
    file.write_all_at(&HELD.to_le_bytes().repeat(1 << 20), 1 << 20)?;
    let file = describe(stack, "along", &disk(&image))?;
    stack.ok("controller", &["vm", "create", &file])?;
    stack.ok("controller", &["vm", "start", "along", "--on", "a"])?;
    goes_on_at(stack, "along", "a")?;
    // The cap leaves the guest time to write to what was copied.
    let slowly = ["--max-bandwidth", "40"];
    let (report, heard) = listen(stack, || stack.migrate("along", "b", &slowly))?;
    ensure!(report["encryption"] == "aes-256-gcm", "{report}");
    ensure!(heard.bytes > 4 << 20, "the listener was deaf: {heard:?}");
    let (has_held, written) = heard.of_disk();
    ensure!(!has_held, "what the disk held could be read");
    ensure!(written == 0, "{written} writes could be read");
    goes_on_at(stack, "along", "b")?;
    stack.until("the image is gone where the VM was", SOON, || {
        Ok(!stack.inside("a", &image)?.exists())
    })?;

    let clear = ["--max-bandwidth", "40", "--encryption", "disabled"];
    let (report, heard) = listen(stack, || stack.migrate("along", "a", &clear))?;
    ensure!(report["encryption"] == "none", "{report}");
    let (has_held, written) = heard.of_disk();
    println!("disabled: {written} writes");
    ensure!(has_held, "the listener would not have seen what it held");
    // Memory, and the sectors that were written before, have a few of them.
    ensure!(
        written > 64,
        "the listener would not have seen writes: {written}"
    );
    goes_on_at(stack, "along", "a")?;
    stack.remove("along")
}

#[test]
fn a_request_cannot_lower_required() -> Result<()> {
    let stack = stack();
    let stack = up(&stack)?;
    let guest = Counter::small("strict").with("encryption = \"required\"");
    stack.start_counter(&guest, "a")?;
    for mode in ["disabled", "opportunistic"] {
        let arguments = ["vm", "migrate", "strict", "--to", "b", "--encryption", mode];
        let sentence = stack.refused("controller", &arguments, 3, "encryption")?;
        names(&sentence, &["strict", mode, "requires"])?;
    }
    let report = stack.migrate("strict", "b", &[])?;
    ensure!(report["encryption"] == "aes-256-gcm", "{report}");
    stack.remove("strict")
}

#[test]
fn a_host_that_does_not_encrypt_gets_what_may_go_in_clear() -> Result<()> {
    let b = HostPlan {
        join: vec!["--no-encryption".into()],
        ..HostPlan::default()
    };
    let plan = Plan {
        hosts: [HostPlan::default(), b],
        ..Plan::default()
    };
    let stack = Stack::new("no-encryption", &plan)?;
    stack.start_counter(&Counter::small("any"), "a")?;
    let required = Counter::small("secret").with("encryption = \"required\"");
    stack.start_counter(&required, "a")?;

    let refused = ["vm", "migrate", "secret", "--to", "b"];
    let sentence = stack.refused("controller", &refused, 3, "encryption")?;
    names(&sentence, &["host b", "encryption"])?;
    let raised = [
        "vm",
        "migrate",
        "any",
        "--to",
        "b",
        "--encryption",
        "required",
    ];
    let sentence = stack.refused("controller", &raised, 3, "encryption")?;
    names(&sentence, &["host b", "encryption"])?;
    let elsewhere = ["vm", "list"];
    ensure!(stack.json("b", &elsewhere)? == serde_json::json!([]));

    let report = stack.migrate("any", "b", &[])?;
    ensure!(report["encryption"] == "none", "{report}");
    let report = stack.migrate("any", "a", &["--encryption", "disabled"])?;
    ensure!(report["encryption"] == "none", "{report}");
    stack.check_guest("any", "a")?;
    stack.check_guest("secret", "a")?;
    Ok(())
}
