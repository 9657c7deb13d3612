//! Moves a tiny guest's devices between two QEMUs on this host, ten times, and prints what each step takes.
//!
//! RAM is copied file to file between `save` and `load` and is not part of these times. Ends within two minutes.
//! usage: `move_devices [tcg|kvm]`

#[path = "../tests/common/mod.rs"]
mod common;

use common::{COUNTING, Place, expect_heartbeat, permit, soon};
use godwit_qemu::device_state::SaveNews;
use std::time::{Duration, Instant};

const MOVES: usize = 10;

fn main() {
    let kvm = std::env::args().nth(1).as_deref() == Some("kvm");
    let place = || {
        if kvm {
            Place::new(COUNTING).kvm()
        } else {
            Place::new(COUNTING)
        }
    };
    let version = place().start().machine().version();
    println!(
        "QEMU {version:?}, {}, {} MiB",
        if kvm { "kvm" } else { "tcg" },
        common::MEMORY_MIB
    );
    let mut all: Vec<_> = (0..MOVES)
        .map(|_| one_move(&place(), &place().incoming()))
        .collect();
    for (index, part) in ["stop", "save", "load", "cont"].into_iter().enumerate() {
        all.sort_by_key(|times| times[index]);
        let ms = |n: usize| all[n][index].as_secs_f64() * 1e3;
        println!(
            "{part}: median {:.1} ms, {:.1} to {:.1}",
            ms(MOVES / 2),
            ms(0),
            ms(MOVES - 1)
        );
    }
}

/// Times of stop, save, load and cont.
fn one_move(source: &Place, destination: &Place) -> [Duration; 4] {
    let (from, to) = (source.start(), destination.start());
    from.machine().prepare_outgoing(soon()).expect("source");
    let incoming = to.machine().prepare_incoming(soon()).expect("destination");
    let events = from.machine().events();
    from.machine().cont(permit(), soon()).expect("cont");
    expect_heartbeat(&events);
    let start = Instant::now();
    let _stopped = from.machine().stop(soon()).expect("stopped");
    let stop = start.elapsed();
    source.copy_ram_to(destination);
    let (mut state, start) = (Vec::new(), Instant::now());
    let sink = |news: SaveNews| {
        if let SaveNews::Piece(piece) = news {
            state.extend_from_slice(piece);
        }
        Ok(())
    };
    let bytes = from
        .machine()
        .save_device_state(soon(), sink)
        .expect("saved");
    let (save, start) = (start.elapsed(), Instant::now());
    to.load(incoming, &state).expect("loaded");
    let (load, start) = (start.elapsed(), Instant::now());
    let generation = to.machine().cont(permit(), soon()).expect("cont");
    let cont = start.elapsed();
    expect_heartbeat(&to.machine().events());
    println!(
        "{bytes} bytes: {stop:.1?} {save:.1?} {load:.1?} {cont:.1?}, generation {generation:?}"
    );
    [stop, save, load, cont]
}
