//! How fast a delta is beside a raw image, on the file system of the build's own directory: `DELTA_SPEED=1 cargo test --release -p godwit-blockio --test
//! delta_speed -- --nocapture`.

mod common;

use common::deltas::open_top;
use common::{numbers, request_of, write_of};
use godwit_blockio::delta::{Delta, NewDelta, Opening, Outliving, create, describe_base};
use godwit_blockio::{Access, Buffer, Data, Engine, Image, Outcome, Stack, Work};
use godwit_delta::Id;
use std::path::Path;
use std::time::{Duration, Instant};

const BYTES: u64 = 256 << 20;
const BLOCK: u64 = 4096;
const LONG: Duration = Duration::from_millis(1500);

#[derive(Debug, Clone, Copy)]
struct Load {
    writes: bool,
    random: bool,
    depth: usize,
}

/// Requests per second, and CPU time of this thread for each in microseconds.
fn measure(stack: &mut Stack<Engine>, load: Load) -> (f64, f64) {
    let (mut number, mut at, mut done) = (numbers(3), 0, 0u64);
    let (began, cpu) = (Instant::now(), cpu_time());
    while began.elapsed() < LONG || stack.under_way() > 0 {
        while stack.under_way() < load.depth && began.elapsed() < LONG {
            at = match load.random {
                true => number(BYTES / BLOCK),
                false => (at + 1) % (BYTES / BLOCK),
            };
            let start = at * BLOCK;
            let token = done + stack.under_way() as u64;
            let one = match load.writes {
                true => write_of(start, BLOCK, 7, token),
                false => request_of(
                    Work::Read(start..start + BLOCK),
                    Data::Own(Buffer::zeroed(BLOCK as usize)),
                    token,
                ),
            };
            stack.submit(one, Instant::now());
        }
        stack.turn(None, &mut Vec::new()).unwrap();
        while let Some((_, outcome)) = stack.finished() {
            assert_eq!(outcome, Outcome::Done);
            done += 1;
        }
    }
    let per_one = (cpu_time() - cpu).as_secs_f64() * 1e6 / done as f64;
    (done as f64 / began.elapsed().as_secs_f64(), per_one)
}

fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn image(path: &Path) -> Image {
    Image::open(path, Access::ReadWrite, 512).unwrap()
}

fn delta(directory: &Path, number: u8) -> Delta {
    let parent = describe_base(
        &directory.join(format!("b{number}.vmdk")),
        "base.raw",
        (BYTES, 7),
    );
    let descriptor = directory.join(format!("top{number}.vmdk"));
    let new = NewDelta {
        descriptor: &descriptor,
        bytes: BYTES,
        id: Id([number; 16]),
        parent: &parent.unwrap(),
    };
    create(&new).unwrap();
    let opening = Opening {
        block_bytes: 512,
        name: "this",
        patience: Duration::ZERO,
    };
    let map = Path::new("/dev/shm").join(format!("delta-speed-{}-{number}", std::process::id()));
    let outliving = Outliving {
        map: &map,
        boot: Id([1; 16]),
        no_guest_lives: false,
    };
    let delta = open_top(&descriptor, opening, outliving).unwrap();
    // It is mapped, and nobody comes after it.
    std::fs::remove_file(map).unwrap();
    delta
}

#[test]
fn raw_and_delta() {
    if std::env::var_os("DELTA_SPEED").is_none() {
        return println!("skipped: it measures for half a minute, where DELTA_SPEED is set");
    }
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let base = directory.path().join("base.raw");
    std::fs::write(&base, vec![5; BYTES as usize]).unwrap();
    std::fs::File::open(&base).unwrap().sync_all().unwrap();
    let loads = [(true, true), (true, false), (false, true), (false, false)];
    let loads = loads.map(|(writes, random)| {
        [1, 32].map(|depth| Load {
            writes,
            random,
            depth,
        })
    });
    for (number, load) in loads.into_iter().flatten().enumerate() {
        let mut raw = Stack::new(Vec::new(), Engine::new(image(&base)).unwrap());
        let plain = measure(&mut raw, load);
        raw.put_deltas(vec![delta(directory.path(), number as u8)])
            .unwrap();
        let first = measure(&mut raw, load);
        // Now all of it is present.
        let whole = 64 * BLOCK;
        for start in (0..BYTES).step_by(whole as usize) {
            raw.submit(write_of(start, whole, 6, start), Instant::now());
            while raw.under_way() > 0 {
                raw.turn(None, &mut Vec::new()).unwrap();
            }
            assert_eq!(raw.finished().unwrap().1, Outcome::Done);
        }
        let present = measure(&mut raw, load);
        println!(
            "{load:?}: raw {:.0}/s {:.1} us, delta, absent at first {:.0}/s {:.1} us, present {:.0}/s {:.1} us",
            plain.0, plain.1, first.0, first.1, present.0, present.1
        );
    }
}
