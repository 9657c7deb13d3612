//! Emulated links between real kernels. The model is judged exactly by its own tests; here is judged what holds on a busy
//! machine, and what was measured is printed (`--nocapture`).

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use godwit_testkit::lab::{EmulatedLink, Lab, LabConfig, Link as LabLink, Machine, Subnets};
use godwit_testkit::link::{Counters, Direction, End, Link, LinkSpec};

mod changes;
mod traffic;

/// A packet that does not come within this is lost, however busy the machine is.
const LONG: Duration = Duration::from_secs(60);
/// Silence that is expected lasts so long.
const SILENCE: Duration = Duration::from_secs(1);

fn spec(text: &str) -> LinkSpec {
    text.parse().expect("a link")
}

fn lab(name: &str, link: &str, change: impl FnOnce(&mut LabConfig)) -> Lab {
    let mut config = LabConfig {
        name: format!("link-{name}-{}", std::process::id()),
        link: Some(spec(link)),
        ..LabConfig::default()
    };
    change(&mut config);
    let lab = Lab::new(config).expect("the lab is built");
    for nic in 0..lab.config().migration_nics {
        let (four, six) = lab.migration_addresses(1, nic);
        for address in [four, six] {
            await_answer(&lab, address);
        }
    }
    lab
}

/// The addresses of `b`'s first migration device.
fn of_b(lab: &Lab) -> [IpAddr; 2] {
    let addresses = lab.addresses(1);
    [addresses.migration4, addresses.migration6]
}

fn option(socket: &impl AsRawFd, level: i32, name: i32, value: &[u8]) {
    // SAFETY: the value is valid for its length, the socket is open.
    let result = unsafe {
        let length = value.len() as libc::socklen_t;
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            name,
            value.as_ptr().cast(),
            length,
        )
    };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
}

/// A UDP socket on a host, large enough that its kernel drops nothing.
fn udp(machine: &Machine, address: IpAddr) -> UdpSocket {
    let bind = || UdpSocket::bind(SocketAddr::new(address, 0));
    let socket = machine
        .in_network(bind)
        .expect("its network")
        .expect("bind");
    for name in [libc::SO_RCVBUFFORCE, libc::SO_SNDBUFFORCE] {
        option(
            &socket,
            libc::SOL_SOCKET,
            name,
            &(64_i32 << 20).to_ne_bytes(),
        );
    }
    socket.set_read_timeout(Some(LONG)).expect("a time-out");
    socket
}

/// Sockets of `a` and `b` that talk to each other, on the devices of the same number.
fn udp_pair(lab: &Lab, address: IpAddr) -> (UdpSocket, UdpSocket) {
    let is_its = |(four, six)| four == address || six == address;
    let nic = (0..lab.config().migration_nics)
        .find(|nic| is_its(lab.migration_addresses(1, *nic)))
        .expect("an address of b");
    let (four, six) = lab.migration_addresses(0, nic);
    let from = if address.is_ipv4() { four } else { six };
    let a = udp(lab.host(0).expect("a"), from);
    let b = udp(lab.host(1).expect("b"), address);
    a.connect(b.local_addr().expect("bound")).expect("connect");
    b.connect(a.local_addr().expect("bound")).expect("connect");
    (a, b)
}

/// Sends back what comes, until it is over.
fn echo(socket: &UdpSocket, is_over: &AtomicBool) {
    let look = Some(Duration::from_millis(20)); // how often it looks whether it is over
    socket.set_read_timeout(look).expect("a time-out");
    let mut buffer = [0; 2048];
    while !is_over.load(Ordering::Relaxed) {
        if let Ok(length) = socket.recv(&mut buffer) {
            let _ = socket.send(&buffer[..length]); // refused when the other socket is gone
        }
    }
}

/// The round trips that were measured, in order of length.
fn round_trips(lab: &Lab, address: IpAddr, count: u64, apart: Duration) -> Vec<Duration> {
    round_trips_within(lab, address, count, apart, LONG)
}

/// The same; nobody answers any more when nothing comes for so long.
fn round_trips_within(
    lab: &Lab,
    address: IpAddr,
    count: u64,
    apart: Duration,
    silence: Duration,
) -> Vec<Duration> {
    let (a, b) = udp_pair(lab, address);
    a.set_read_timeout(Some(silence)).expect("a time-out");
    let start = Instant::now();
    let (mut found, is_over) = (Vec::new(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| echo(&b, &is_over));
        scope.spawn(|| {
            for _ in 0..count {
                let sent = start.elapsed().as_nanos() as u64;
                a.send(&sent.to_ne_bytes()).expect("send");
                std::thread::sleep(apart); // the pace of the pings, not a wait for something
            }
        });
        let mut stamp = [0; 8];
        while found.len() < count as usize && a.recv(&mut stamp).is_ok() {
            let sent = Duration::from_nanos(u64::from_ne_bytes(stamp));
            found.push(start.elapsed() - sent);
        }
        is_over.store(true, Ordering::Relaxed);
    });
    found.sort();
    found
}

/// The least round trip is the one that was set, or less than 10 ms more. A busy machine delays many in a row, so that
/// pings are sent until one was not delayed; one that is early is wrong whenever it comes.
fn assert_least(lab: &Lab, address: IpAddr, set: Duration) {
    let deadline = Instant::now() + LONG;
    loop {
        let found = round_trips(lab, address, 50, Duration::from_millis(1));
        let least = *found.first().expect("an answer");
        assert!(least >= set, "early: {least:?} instead of {set:?}");
        if least < set + Duration::from_millis(10) {
            return;
        }
        assert!(Instant::now() < deadline, "late: {least:?}, not {set:?}");
    }
}

fn answers(lab: &Lab, address: IpAddr) -> bool {
    !round_trips_within(lab, address, 3, Duration::from_millis(1), SILENCE).is_empty()
}

/// Asks until there is an answer to any of it: kernels take their time to notice that a new device has a carrier.
fn await_answer(lab: &Lab, address: IpAddr) {
    let (a, b) = udp_pair(lab, address);
    let pace = Some(Duration::from_millis(100));
    a.set_read_timeout(pace).expect("a time-out");
    let (deadline, is_over) = (Instant::now() + LONG, AtomicBool::new(false));
    let answered = std::thread::scope(|scope| {
        scope.spawn(|| echo(&b, &is_over));
        let mut answered = false;
        while !answered && Instant::now() < deadline {
            let _ = a.send(b"there?"); // refused while there is no way
            answered = a.recv(&mut [0; 8]).is_ok();
        }
        is_over.store(true, Ordering::Relaxed);
        answered
    });
    assert!(answered, "no way to {address}");
}

/// Waits for answers, which must come.
fn assert_answers(lab: &Lab, address: IpAddr) {
    let found = round_trips(lab, address, 3, Duration::from_millis(1));
    assert!(!found.is_empty(), "{address} does not answer");
}

/// A figure of the kernel's about TCP: a line of names, then one of figures.
fn statistic(statistics: &str, name: &str) -> u64 {
    let mut lines = statistics.lines().filter(|line| line.starts_with("Tcp:"));
    let (names, figures) = (lines.next().expect("names"), lines.next().expect("figures"));
    let mut pairs = names.split_whitespace().zip(figures.split_whitespace());
    let (_, figure) = pairs.find(|(other, _)| *other == name).expect(name);
    figure.parse().expect("a figure")
}

fn run(machine: &Machine, script: &str) -> String {
    let output = machine
        .command("sh")
        .args(["-c", script])
        .output()
        .expect("sh runs");
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}
