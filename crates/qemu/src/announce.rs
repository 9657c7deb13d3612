//! Frames that tell the network where a guest is, and frames that ask whether one port group reaches another.
//!
//! Pure builders and one parser, byte by byte as the standards have them. After a move the switches learn the guest's
//! place from any frame with its address as the sender (RARP needs no IP address for that); neighbours with a stale
//! entry are told by gratuitous ARP and by an unsolicited neighbour advertisement where the guest's addresses are
//! known. Sent on the bridge these reach the other hosts; the bridge of this host learns from what QEMU itself sends
//! (`announce-self`), since that enters through the guest's own port.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// The six bytes of an Ethernet address, in the order of the wire.
pub type Mac = [u8; 6];

/// The type of probe frames: IEEE's first local experimental one.
pub const PROBE_ETHERTYPE: u16 = 0x88b5;
const PROBE_MAGIC: [u8; 8] = *b"GODWIT-1";
const BROADCAST: Mac = [0xff; 6];
/// The shortest Ethernet frame, without its checksum.
const SHORTEST: usize = 60;

const ETHERTYPE_ARP: u16 = 0x0806;
const ETHERTYPE_RARP: u16 = 0x8035;
const ETHERTYPE_IPV6: u16 = 0x86dd;
const ICMPV6: u8 = 58;

/// "Who am I?" from `mac`, to everyone: switches learn where it is, hosts ignore it.
pub fn rarp(mac: Mac) -> Vec<u8> {
    arp(ETHERTYPE_RARP, 3, mac, Ipv4Addr::UNSPECIFIED, mac)
}

/// "`address` is at `mac`" to everyone who has an entry for it.
pub fn gratuitous_arp(mac: Mac, address: Ipv4Addr) -> Vec<u8> {
    arp(ETHERTYPE_ARP, 1, mac, address, [0; 6])
}

/// "`address` is at `mac`, forget what you knew" to all nodes on the link.
pub fn unsolicited_advertisement(mac: Mac, address: Ipv6Addr) -> Vec<u8> {
    let all_nodes = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
    let mut message = vec![136, 0, 0, 0, 0x20, 0, 0, 0];
    message.extend(address.octets());
    message.extend([2, 1]);
    message.extend(mac);
    let checksum = icmpv6_checksum(address, all_nodes, &message);
    if let Some(field) = message.get_mut(2..4) {
        field.copy_from_slice(&checksum.to_be_bytes());
    }
    let mut frame = ethernet([0x33, 0x33, 0, 0, 0, 1], mac, ETHERTYPE_IPV6);
    frame.extend([0x60, 0, 0, 0, 0, 32, ICMPV6, 255]);
    frame.extend(address.octets());
    frame.extend(all_nodes.octets());
    frame.extend(message);
    frame
}

/// "Do you hear me?" to every listener of the same link, recognised by its nonce. To be repeated until it is heard:
/// bridges and switches drop frames until their ports forward.
pub fn probe(sender: Mac, nonce: [u8; 16]) -> Vec<u8> {
    let mut frame = ethernet(BROADCAST, sender, PROBE_ETHERTYPE);
    frame.extend(PROBE_MAGIC);
    frame.extend(nonce);
    padded(frame)
}

/// The nonce of a probe frame; `None` for every other frame.
pub fn parse_probe(frame: &[u8]) -> Option<[u8; 16]> {
    let rest = frame
        .get(12..)?
        .strip_prefix(&PROBE_ETHERTYPE.to_be_bytes())?
        .strip_prefix(&PROBE_MAGIC)?;
    rest.first_chunk().copied()
}

/// What to tell the network about one card: where its address is, then which addresses it has.
pub fn announcement(mac: Mac, addresses: &[IpAddr]) -> Vec<Vec<u8>> {
    let told = addresses.iter().map(|address| match address {
        IpAddr::V4(address) => gratuitous_arp(mac, *address),
        IpAddr::V6(address) => unsolicited_advertisement(mac, *address),
    });
    std::iter::once(rarp(mac)).chain(told).collect()
}

/// The address that the card `mac` says it has, in an ARP packet or a neighbour discovery message; `None` for every
/// other frame. It may be any address: whoever keeps it checks it.
pub fn claimed_address(frame: &[u8], mac: Mac) -> Option<IpAddr> {
    if frame.get(6..12)? != mac {
        return None;
    }
    match u16::from_be_bytes(*frame.get(12..)?.first_chunk()?) {
        ETHERTYPE_ARP => claimed_by_arp(frame, mac),
        ETHERTYPE_IPV6 => claimed_by_discovery(frame),
        _ => None,
    }
}

fn claimed_by_arp(frame: &[u8], mac: Mac) -> Option<IpAddr> {
    let (head, rest) = frame.get(14..)?.split_first_chunk::<8>()?;
    let known = matches!(head, [0, 1, 8, 0, 6, 4, 0, 1 | 2]);
    let (sender, rest) = rest.split_first_chunk::<6>()?;
    let address: [u8; 4] = *rest.first_chunk()?;
    (known && *sender == mac).then_some(IpAddr::V4(address.into()))
}

/// Router solicitations and advertisements, neighbour solicitations: the sender; neighbour advertisements: what they
/// advertise.
fn claimed_by_discovery(frame: &[u8]) -> Option<IpAddr> {
    let address = |at: usize| -> Option<IpAddr> {
        let octets: [u8; 16] = *frame.get(at..)?.first_chunk()?;
        Some(IpAddr::V6(octets.into()))
    };
    match (frame.get(20)?, frame.get(54)?) {
        (&ICMPV6, 133..=135) => address(22),
        (&ICMPV6, 136) => address(62),
        _ => None,
    }
}

fn arp(ethertype: u16, operation: u8, mac: Mac, address: Ipv4Addr, about: Mac) -> Vec<u8> {
    let mut frame = ethernet(BROADCAST, mac, ethertype);
    frame.extend([0, 1, 8, 0, 6, 4, 0, operation]);
    frame.extend(mac);
    frame.extend(address.octets());
    frame.extend(about);
    frame.extend(address.octets());
    padded(frame)
}

fn ethernet(to: Mac, from: Mac, ethertype: u16) -> Vec<u8> {
    [&to[..], &from, &ethertype.to_be_bytes()].concat()
}

fn padded(mut frame: Vec<u8>) -> Vec<u8> {
    frame.resize(frame.len().max(SHORTEST), 0);
    frame
}

/// RFC 4443, 2.3: the ones' complement sum over a pseudo header and the message.
fn icmpv6_checksum(from: Ipv6Addr, to: Ipv6Addr, message: &[u8]) -> u16 {
    let length = u32::try_from(message.len())
        .unwrap_or(u32::MAX)
        .to_be_bytes();
    let covered = [
        &from.octets()[..],
        &to.octets(),
        &length,
        &[0, 0, 0, ICMPV6],
        message,
    ]
    .concat();
    let mut sum = covered.chunks(2).fold(0_u64, |sum, pair| {
        let word = u16::from_be_bytes([
            pair.first().copied().unwrap_or(0),
            pair.get(1).copied().unwrap_or(0),
        ]);
        sum.saturating_add(word.into())
    });
    while sum > 0xffff {
        sum = (sum & 0xffff).saturating_add(sum >> 16);
    }
    !u16::try_from(sum).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAC: Mac = [0x52, 0x54, 0x00, 0x12, 0x34, 0x56];

    fn bytes(hex: &str) -> Vec<u8> {
        let digits: String = hex.split_whitespace().collect();
        (0..digits.len())
            .step_by(2)
            .map(|i| u8::from_str_radix(&digits[i..i + 2], 16).expect("hex"))
            .collect()
    }

    #[test]
    fn rarp_is_what_qemu_sends() {
        let want = "ffffffffffff 525400123456 8035 0001 0800 06 04 0003 525400123456 00000000 525400123456 00000000 \
            000000000000000000000000000000000000";
        assert_eq!(rarp(MAC), bytes(want));
    }

    #[test]
    fn gratuitous_arp_names_the_address_twice() {
        let want = "ffffffffffff 525400123456 0806 0001 0800 06 04 0001 525400123456 c0000207 000000000000 c0000207 \
            000000000000000000000000000000000000";
        assert_eq!(
            gratuitous_arp(MAC, Ipv4Addr::new(192, 0, 2, 7)),
            bytes(want)
        );
    }

    #[test]
    fn advertisement_has_the_override_flag_and_a_right_checksum() {
        let address: Ipv6Addr = "2001:db8::7".parse().expect("address");
        let frame = unsolicited_advertisement(MAC, address);
        let want = "333300000001 525400123456 86dd 60000000 0020 3a ff 20010db8000000000000000000000007 \
            ff020000000000000000000000000001 88 00 7463 20000000 20010db8000000000000000000000007 02 01 525400123456";
        assert_eq!(frame, bytes(want));
        // A message with its right checksum in place sums up to all ones.
        let all_nodes = "ff02::1".parse().expect("address");
        assert_eq!(icmpv6_checksum(address, all_nodes, &frame[54..]), 0);
    }

    #[test]
    fn what_a_card_says_of_itself_is_read() {
        let (four, six): (Ipv4Addr, Ipv6Addr) = (
            Ipv4Addr::new(192, 0, 2, 7),
            "2001:db8::7".parse().expect("address"),
        );
        let frames = announcement(MAC, &[four.into(), six.into()]);
        let read: Vec<_> = frames
            .iter()
            .map(|frame| claimed_address(frame, MAC))
            .collect();
        assert_eq!(read, [None, Some(four.into()), Some(six.into())]);
        let other = [0x52, 0x54, 0, 0, 0, 1];
        assert!(
            frames
                .iter()
                .all(|frame| claimed_address(frame, other).is_none())
        );
        for frame in &frames {
            for cut in 0..frame.len().min(78) {
                // Cut anywhere, it is read in full or not at all.
                let read = claimed_address(&frame[..cut], MAC);
                assert!(
                    read.is_none() || read == claimed_address(frame, MAC),
                    "{cut}"
                );
            }
        }
        let mut solicitation = frames[2].clone();
        solicitation[54] = 135;
        solicitation[62] ^= 1;
        assert_eq!(
            claimed_address(&solicitation, MAC),
            Some(six.into()),
            "its sender"
        );
        let mut lie = frames[1].clone();
        lie[22] ^= 2;
        assert_eq!(claimed_address(&lie, MAC), None, "another card's ARP entry");
    }

    #[test]
    fn probes_are_recognised_and_nothing_else_is() {
        let frame = probe(MAC, [7; 16]);
        assert_eq!((frame.len(), parse_probe(&frame)), (60, Some([7; 16])));
        for cut in 0..38 {
            assert_eq!(parse_probe(&frame[..cut]), None, "cut at {cut}");
        }
        assert_eq!(parse_probe(&rarp(MAC)), None);
        let mut other = frame;
        other[14] ^= 1;
        assert_eq!(parse_probe(&other), None);
    }
}
