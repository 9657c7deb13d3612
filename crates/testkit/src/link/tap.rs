//! A TAP device in a network namespace: made, set up, read and written a frame at a time.
//!
//! The device lives as long as its [`Tap`]; [`remove`] ends one that a child between its fork and its exec still holds.
//! Checksums and the cutting of large TCP packets are left to whoever reads, so that a bulk stream costs one system call
//! for up to 64 KiB; other large packets are cut by the sender's kernel.

use std::fs::File;
use std::io::{self, Read, Write};
use std::net::UdpSocket;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::End;
use super::frame::VIRTIO_HEADER_BYTES;

/// Largest frame with its virtio header: a large packet of 64 KiB, its Ethernet and VLAN headers.
pub const FRAME_BYTES_MAX: usize = VIRTIO_HEADER_BYTES + 18 + 65_536;

/// Frames that may wait in the kernel for a relay that is not running: 400 ms of full packets at 1 Gb/s.
const KERNEL_QUEUE_FRAMES: u32 = 32_768;

const TUN_F_CSUM: libc::c_uint = 1;
const TUN_F_TSO4: libc::c_uint = 2;
const TUN_F_TSO6: libc::c_uint = 4;
const TUN_F_TSO_ECN: libc::c_uint = 8;

pub struct Tap {
    file: File,
}

impl Tap {
    /// Makes the device in its namespace, with its addresses or on its bridge, and up.
    pub fn new(end: &End) -> io::Result<Self> {
        inside(end.namespace.as_fd(), || {
            let tap = Self::open(&end.device)?;
            set_up(end)?;
            wait_until_running(&end.device).map(|()| tap)
        })
        .map_err(|error| {
            let device = &end.device;
            io::Error::new(
                error.kind(),
                format!("cannot make device {device}: {error}"),
            )
        })
    }

    fn open(device: &str) -> io::Result<Self> {
        let file = File::options()
            .read(true)
            .write(true)
            .open("/dev/net/tun")?;
        let mut request = request_about(device)?;
        let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR | libc::IFF_TUN_EXCL;
        request.ifr_ifru.ifru_flags = flags as libc::c_short;
        let header_bytes = VIRTIO_HEADER_BYTES as libc::c_int;
        let offloads = TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6 | TUN_F_TSO_ECN;
        let fd = file.as_raw_fd();
        // SAFETY: each request takes what it is given: a valid ifreq, a valid int, a number; the last two change flags
        // of our own descriptor.
        unsafe {
            check(libc::ioctl(fd, libc::TUNSETIFF, &raw mut request))?;
            check(libc::ioctl(
                fd,
                libc::TUNSETVNETHDRSZ,
                &raw const header_bytes,
            ))?;
            check(libc::ioctl(
                fd,
                libc::TUNSETOFFLOAD,
                libc::c_ulong::from(offloads),
            ))?;
            check(libc::fcntl(fd, libc::F_SETFL, libc::O_NONBLOCK))?;
        }
        Ok(Self { file })
    }

    /// The next frame that the kernel sent through the device, or nothing if there is none now.
    pub fn receive<'a>(&self, buffer: &'a mut [u8]) -> io::Result<Option<&'a [u8]>> {
        match (&self.file).read(buffer) {
            Ok(length) => Ok(Some(&buffer[..length])),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Gives the kernel a frame as if it had come in through the device.
    pub fn send(&self, frame: &[u8]) -> io::Result<()> {
        (&self.file).write(frame).map(|_| ())
    }

    /// What to wait for.
    pub fn poll(&self) -> libc::pollfd {
        libc::pollfd {
            fd: self.file.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        }
    }
}

/// Runs on a thread that is in a network namespace, which is a property of a thread.
fn inside<T: Send>(
    namespace: BorrowedFd,
    action: impl FnOnce() -> io::Result<T> + Send,
) -> io::Result<T> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new();
        let done = thread.spawn_scoped(scope, || enter(namespace).and_then(|()| action()))?;
        done.join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Frames that the kernel dropped since nobody read the device.
pub fn dropped_by_kernel(end: &End) -> io::Result<u64> {
    // After the name eight figures of what was received, then bytes, packets, errors, drops of what was sent.
    let figures = inside(end.namespace.as_fd(), || figures(&end.device))?;
    let dropped = figures.and_then(|text| text.split_whitespace().nth(11)?.parse().ok());
    dropped.ok_or_else(|| {
        let text = format!(
            "device {} is gone or its counters are unreadable",
            end.device
        );
        io::Error::other(text)
    })
}

/// Removes a device that is still there after its [`Tap`] was dropped. A child that another thread has just forked holds
/// a copy of every descriptor until its exec closes them, and the kernel keeps the device as long.
pub fn remove(end: &End) -> io::Result<()> {
    inside(end.namespace.as_fd(), || match figures(&end.device)? {
        Some(_) => ip(&format!("link delete {}\n", end.device)),
        None => Ok(()),
    })
}

/// What the kernel counted for a device in the namespace of the calling thread, or nothing if it is gone.
fn figures(device: &str) -> io::Result<Option<String>> {
    let table = std::fs::read_to_string("/proc/thread-self/net/dev")?;
    let of_ours = table.lines().filter_map(|line| line.rsplit_once(':'));
    let mut of_ours = of_ours.filter(|(name, _)| name.trim() == device);
    Ok(of_ours.next().map(|(_, figures)| figures.to_owned()))
}

fn enter(namespace: BorrowedFd) -> io::Result<()> {
    // SAFETY: changes the network namespace of the calling thread only.
    check(unsafe { libc::setns(namespace.as_raw_fd(), libc::CLONE_NEWNET) })
}

/// A request about the device of that name.
fn request_about(device: &str) -> io::Result<libc::ifreq> {
    // SAFETY: a zeroed ifreq is a valid value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    if device.is_empty() || device.len() >= request.ifr_name.len() || !device.is_ascii() {
        let text = "a device has a name of 1 to 15 characters";
        return Err(io::Error::other(text));
    }
    for (to, from) in request.ifr_name.iter_mut().zip(device.bytes()) {
        *to = from as libc::c_char;
    }
    Ok(request)
}

/// The kernel notices the carrier of a new device up to a second later, and until then a bridge does not use it.
fn wait_until_running(device: &str) -> io::Result<()> {
    let socket = UdpSocket::bind("0.0.0.0:0")?;
    let mut request = request_about(device)?;
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        // SAFETY: takes a valid ifreq, of which it writes the flags; reading them afterwards is what the request is for.
        let flags = unsafe {
            check(libc::ioctl(
                socket.as_raw_fd(),
                libc::SIOCGIFFLAGS,
                &raw mut request,
            ))?;
            request.ifr_ifru.ifru_flags
        };
        if i32::from(flags) & libc::IFF_RUNNING != 0 {
            return Ok(());
        }
        if Instant::now() > deadline {
            return Err(io::Error::other("it does not come up"));
        }
        std::thread::sleep(Duration::from_millis(5)); // the flags cannot be waited on, only read
    }
}

/// Gives the device what its end is to have, in the namespace of the calling thread.
fn set_up(end: &End) -> io::Result<()> {
    let (device, mtu) = (&end.device, end.mtu);
    let mut lines = format!("link set {device} mtu {mtu} txqueuelen {KERNEL_QUEUE_FRAMES}\n");
    match &end.bridge {
        Some(bridge) => {
            lines += &format!(
                "link set {device} addrgenmode none\nlink set {device} master {bridge} up\n"
            );
        }
        None => lines += &format!("link set {device} up\n"),
    }
    for address in &end.addresses {
        // No duplicate address detection: for its second the address cannot be used.
        let nodad = if address.contains(':') { " nodad" } else { "" };
        lines += &format!("addr add {address} dev {device}{nodad}\n");
    }
    ip(&lines)
}

/// Runs lines of `ip` in the namespace of the calling thread.
fn ip(lines: &str) -> io::Result<()> {
    let mut child = Command::new("ip")
        .args(["-batch", "-"])
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    if let Some(mut stdin) = child.stdin.take() {
        stdin.write_all(lines.as_bytes())?;
    }
    let output = child.wait_with_output()?;
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stderr);
    Err(io::Error::other(text.trim().to_owned()))
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
