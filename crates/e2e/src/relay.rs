//! A TCP relay between two hosts: bytes only, cut, stalled and healed at will.
//!
//! Owns a listening socket and two threads per connection. Knows nothing of what passes.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// How often a thread looks at the mode.
const TURN: Duration = Duration::from_millis(2);

/// What happens to bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Mode {
    Open,
    /// Connections are closed, new ones as well.
    Cut,
    /// Nothing passes, nothing is closed: a dead link.
    Stalled,
    /// Nothing passes towards the source.
    HalfOpen,
}

/// A relay to one address.
#[derive(Debug)]
pub struct Relay {
    address: SocketAddr,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    mode: AtomicU8,
    cuts: AtomicU32,
    bytes: AtomicU64,
}

impl Relay {
    /// A relay to `target` on a free port of the same loopback.
    pub fn to(target: SocketAddr) -> std::io::Result<Self> {
        let listener = TcpListener::bind((target.ip(), 0))?;
        let shared = Arc::new(Shared {
            mode: AtomicU8::new(Mode::Open as u8),
            cuts: AtomicU32::new(0),
            bytes: AtomicU64::new(0),
        });
        let address = listener.local_addr()?;
        let relay = Self {
            address,
            shared: Arc::clone(&shared),
        };
        std::thread::spawn(move || accept(&listener, target, &shared));
        Ok(relay)
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Changes what happens from now on; `Cut` also ends the connections there are.
    pub fn set(&self, mode: Mode) {
        self.shared.mode.store(mode as u8, Ordering::SeqCst);
        if mode == Mode::Cut {
            self.shared.cuts.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// Bytes that have passed, both ways.
    pub fn bytes(&self) -> u64 {
        self.shared.bytes.load(Ordering::SeqCst)
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.set(Mode::Cut);
        // Wakes the thread that accepts; it ends when nobody but it holds the state.
        let _ = TcpStream::connect(self.address);
    }
}

impl Shared {
    fn is(&self, mode: Mode) -> bool {
        self.mode.load(Ordering::SeqCst) == mode as u8
    }
}

fn accept(listener: &TcpListener, target: SocketAddr, shared: &Arc<Shared>) {
    for client in listener.incoming().flatten() {
        if shared.is(Mode::Cut) {
            if Arc::strong_count(shared) == 1 {
                return;
            }
            continue;
        }
        let Ok(server) = TcpStream::connect(target) else {
            continue;
        };
        let cuts = shared.cuts.load(Ordering::SeqCst);
        for (from, to, back) in [(&client, &server, false), (&server, &client, true)] {
            let (Ok(from), Ok(to)) = (from.try_clone(), to.try_clone()) else {
                continue;
            };
            let shared = Arc::clone(shared);
            std::thread::spawn(move || {
                pass(&from, &to, back, &shared, cuts);
                let _ = from.shutdown(Shutdown::Both);
                let _ = to.shutdown(Shutdown::Both);
            });
        }
    }
}

fn pass(mut from: &TcpStream, mut to: &TcpStream, back: bool, shared: &Shared, cuts: u32) {
    let mut buffer = vec![0; 64 << 10];
    let _ = from.set_read_timeout(Some(TURN));
    let _ = to.set_nodelay(true);
    loop {
        if shared.cuts.load(Ordering::SeqCst) != cuts {
            return;
        }
        if shared.is(Mode::Stalled) || (back && shared.is(Mode::HalfOpen)) {
            std::thread::sleep(TURN);
            continue;
        }
        match from.read(&mut buffer) {
            Ok(0) => return,
            Ok(count) => {
                // What was read as the link failed is lost, or waits.
                while shared.is(Mode::Stalled) || (back && shared.is(Mode::HalfOpen)) {
                    std::thread::sleep(TURN);
                }
                if shared.cuts.load(Ordering::SeqCst) != cuts {
                    return;
                }
                if to.write_all(&buffer[..count]).is_err() {
                    return;
                }
                shared.bytes.fetch_add(count as u64, Ordering::SeqCst);
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
            Err(_) => return,
        }
    }
}
