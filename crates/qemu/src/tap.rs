//! Taps for a guest's network cards, and the bridges they hang on.
//!
//! A tap made here lives as long as its descriptors do: ours, and later QEMU's. Nothing has to be deleted, whoever
//! dies. It takes the bridge's MTU and says nothing by itself. Bridges are the operator's: they are never made here.
//! Everything happens in the calling thread's network namespace. Needs CAP_NET_ADMIN.

use godwit_types::vm::VmSpec;
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{self, AddressFamily, SocketFlags, SocketType};
use std::fs::{self, OpenOptions};
use std::io;

/// `SIOCBRADDIF` of linux/sockios.h: adds an interface to a bridge.
const ADD_TO_BRIDGE: libc::c_ulong = 0x89a2;

/// Why there is no tap.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TapError {
    /// Not a name that an interface can have.
    #[error(
        "'{name}' cannot be the name of a network interface: 1 to 15 letters, digits, '.', '_' and '-'"
    )]
    Name {
        /// The name, control characters escaped.
        name: String,
    },
    /// The bridge is missing.
    #[error(
        "bridge '{name}' does not exist on this host: create it (ip link add {name} type bridge && ip link set {name} up) or change the port group"
    )]
    NoBridge { name: String },
    /// There is an interface of that name, but it is no bridge.
    #[error("network interface '{name}' is not a bridge: change the port group")]
    NotABridge { name: String },
    /// The tap exists and belongs to somebody.
    #[error("tap '{name}' is in use by another process")]
    InUse { name: String },
    /// A system call failed.
    #[error("cannot {doing} '{name}': {source}")]
    Io {
        doing: &'static str,
        name: String,
        /// What the kernel said.
        source: io::Error,
    },
}

/// The name of a card's tap: at most 15 bytes, and this card's alone.
pub fn name_of(spec: &VmSpec, index: usize) -> String {
    let mac = spec.mac(index).unwrap_or_default();
    let hex: String = mac
        .iter()
        .skip(2)
        .map(|byte| format!("{byte:02x}"))
        .collect();
    format!("gw{hex}{index}")
}

/// An open tap, ready to be given to QEMU by its descriptor.
#[derive(Debug)]
pub struct Tap {
    fd: OwnedFd,
    name: String,
}

impl Tap {
    /// Makes a tap, hangs it on a bridge and brings it up.
    pub fn create(name: &str, bridge: &str) -> Result<Tap, TapError> {
        check_name(name)?;
        check_bridge(bridge)?;
        let tap = Tap {
            fd: open(name)?,
            name: name.to_owned(),
        };
        silence(name);
        let mtu = interface_mtu(bridge)?;
        // The bridge takes the lowest address of its ports; this one is never it.
        tap.change(
            "set the address of",
            libc::SIOCSIFHWADDR as libc::c_ulong,
            |request| hardware_address(request, name),
        )?;
        tap.change(
            "set the MTU of",
            libc::SIOCSIFMTU as libc::c_ulong,
            |request| request.ifr_ifru.ifru_mtu = mtu,
        )?;
        tap.attach(bridge)?;
        let up = (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
        tap.change("bring up", libc::SIOCSIFFLAGS as libc::c_ulong, |request| {
            request.ifr_ifru.ifru_flags = up
        })?;
        Ok(tap)
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Sends one whole frame as if the guest's card had: it enters the bridge by the guest's own port, so that the bridge
    /// learns the port and the frame reaches all others, but not the guest.
    pub fn send(&self, frame: &[u8]) -> Result<(), TapError> {
        let sent = header_length(&self.fd).and_then(|length| {
            // All zeroes: no checksum to complete, no segments.
            let header = vec![0; length];
            let parts = [io::IoSlice::new(&header), io::IoSlice::new(frame)];
            Ok(rustix::io::writev(&self.fd, &parts)?)
        });
        sent.map(drop).map_err(|source| TapError::Io {
            doing: "send a frame by",
            name: self.name.clone(),
            source,
        })
    }

    fn attach(&self, bridge: &str) -> Result<(), TapError> {
        let index = index_of(&self.name)?.cast_signed();
        let set = |request: &mut libc::ifreq| request.ifr_ifru.ifru_ifindex = index;
        interface_ioctl(bridge, ADD_TO_BRIDGE, set)
            .map(drop)
            .map_err(|source| match source.raw_os_error() {
                Some(libc::EOPNOTSUPP) => TapError::NotABridge {
                    name: bridge.to_owned(),
                },
                _ => TapError::Io {
                    doing: "add a port to bridge",
                    name: bridge.to_owned(),
                    source,
                },
            })
    }

    fn change(
        &self,
        doing: &'static str,
        request: libc::c_ulong,
        fill: impl FnOnce(&mut libc::ifreq),
    ) -> Result<(), TapError> {
        let failed = |source| TapError::Io {
            doing,
            name: self.name.clone(),
            source,
        };
        interface_ioctl(&self.name, request, fill)
            .map(drop)
            .map_err(failed)
    }
}

impl AsFd for Tap {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Whether a tap could be hung on this bridge.
pub fn check_bridge(name: &str) -> Result<(), TapError> {
    check_name(name)?;
    match index_of(name) {
        Ok(_) => {}
        Err(TapError::Io { source, .. }) if source.raw_os_error() == Some(libc::ENODEV) => {
            return Err(TapError::NoBridge {
                name: name.to_owned(),
            });
        }
        Err(error) => return Err(error),
    }
    match interface_driver(name) {
        Ok(driver) if driver == b"bridge" => Ok(()),
        _ => Err(TapError::NotABridge {
            name: name.to_owned(),
        }),
    }
}

/// The MTU of an interface, in bytes.
pub fn interface_mtu(name: &str) -> Result<i32, TapError> {
    let failed = |source| TapError::Io {
        doing: "read the MTU of",
        name: name.to_owned(),
        source,
    };
    let request =
        interface_ioctl(name, libc::SIOCGIFMTU as libc::c_ulong, |_| {}).map_err(failed)?;
    // SAFETY: the kernel has filled this member for this request.
    Ok(unsafe { request.ifr_ifru.ifru_mtu })
}

fn check_name(name: &str) -> Result<(), TapError> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    let fits = (1..libc::IFNAMSIZ).contains(&name.len())
        && name.chars().all(allowed)
        && name != "."
        && name != "..";
    if fits {
        Ok(())
    } else {
        Err(TapError::Name {
            name: name.escape_debug().to_string(),
        })
    }
}

fn open(name: &str) -> Result<OwnedFd, TapError> {
    let failed = |source: io::Error| match source.raw_os_error() {
        Some(libc::EBUSY) => TapError::InUse {
            name: name.to_owned(),
        },
        _ => TapError::Io {
            doing: "make tap",
            name: name.to_owned(),
            source,
        },
    };
    let device = OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/net/tun")
        .map_err(failed)?;
    let flags = (libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR) as libc::c_short;
    let mut request = empty_request(name);
    request.ifr_ifru.ifru_flags = flags;
    ioctl(&device, libc::TUNSETIFF as libc::c_ulong, &mut request).map_err(failed)?;
    Ok(device.into())
}

/// Keeps the host's own IPv6 off the tap; a kernel without IPv6 has nothing to switch off.
fn silence(name: &str) {
    let _ = fs::write(format!("/proc/sys/net/ipv6/conf/{name}/disable_ipv6"), "1");
}

/// A local address, high in order, that differs by the tap's name.
fn hardware_address(request: &mut libc::ifreq, name: &str) {
    let hash = name.bytes().fold(0x811c_9dc5_u32, |hash, byte| {
        (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193)
    });
    let mut data = [0; 14];
    let address = [[0xfe, 0x67].as_slice(), &hash.to_be_bytes()].concat();
    data.iter_mut()
        .zip(address)
        .for_each(|(to, from)| *to = from.cast_signed());
    request.ifr_ifru.ifru_hwaddr = libc::sockaddr {
        sa_family: libc::ARPHRD_ETHER,
        sa_data: data,
    };
}

fn index_of(name: &str) -> Result<u32, TapError> {
    let failed = |errno: Errno| TapError::Io {
        doing: "find",
        name: name.to_owned(),
        source: errno.into(),
    };
    let socket = control_socket().map_err(failed)?;
    net::netdevice::name_to_index(&socket, name).map_err(failed)
}

fn control_socket() -> Result<OwnedFd, Errno> {
    net::socket_with(
        AddressFamily::INET,
        SocketType::DGRAM,
        SocketFlags::CLOEXEC,
        None,
    )
}

/// Bytes before each frame, as whoever serves the card has set it.
fn header_length(tap: &OwnedFd) -> io::Result<usize> {
    /// `_IOR('T', 215, int)` of linux/if_tun.h.
    const TUNGETVNETHDRSZ: libc::c_ulong = 0x8004_54d7;
    let mut length: libc::c_int = 0;
    // SAFETY: the kernel writes one `int` for this request, which `length` is.
    let result = unsafe { libc::ioctl(tap.as_raw_fd(), TUNGETVNETHDRSZ, &raw mut length) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    // A header is 10 to 20 bytes long.
    usize::try_from(length)
        .ok()
        .filter(|length| *length <= 64)
        .ok_or_else(|| io::Error::other("a header of impossible length"))
}

fn empty_request(name: &str) -> libc::ifreq {
    // SAFETY: all zeroes is a valid value of this plain structure.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    // One byte less than there is room for: the name ends with a zero.
    let room = request.ifr_name.iter_mut().take(libc::IFNAMSIZ - 1);
    room.zip(name.bytes())
        .for_each(|(to, from)| *to = from.cast_signed());
    request
}

fn interface_ioctl(
    name: &str,
    number: libc::c_ulong,
    fill: impl FnOnce(&mut libc::ifreq),
) -> io::Result<libc::ifreq> {
    let mut request = empty_request(name);
    fill(&mut request);
    ioctl(&control_socket()?, number, &mut request)?;
    Ok(request)
}

/// For requests whose argument is an `ifreq` without pointers; the one with a pointer is in [`interface_driver`].
fn ioctl(fd: &impl AsFd, number: libc::c_ulong, request: &mut libc::ifreq) -> io::Result<()> {
    // SAFETY: every number that is used here makes the kernel read and write one `ifreq`, which `request` is.
    let result =
        unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), number, std::ptr::from_mut(request)) };
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

/// `struct ethtool_drvinfo` of linux/ethtool.h: the command, then the driver's name in 32 of 196 bytes.
#[repr(C)]
struct DriverInfo {
    command: u32,
    driver: [u8; 32],
    rest: [u8; 160],
}

fn interface_driver(name: &str) -> io::Result<Vec<u8>> {
    const ETHTOOL_GDRVINFO: u32 = 3;
    let mut info = DriverInfo {
        command: ETHTOOL_GDRVINFO,
        driver: [0; 32],
        rest: [0; 160],
    };
    let data = (&raw mut info).cast();
    interface_ioctl(name, libc::SIOCETHTOOL as libc::c_ulong, |request| {
        request.ifr_ifru.ifru_data = data
    })?;
    // SAFETY: the kernel wrote through the pointer; a volatile read makes no guess about what it held before.
    let driver = unsafe { (&raw const info.driver).read_volatile() };
    Ok(driver
        .iter()
        .copied()
        .take_while(|&byte| byte != 0)
        .collect())
}

#[cfg(test)]
mod tests;
