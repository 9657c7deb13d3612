//! A guest's addresses on the network, as they travel with it, so that its neighbours can be told where it is now.
//!
//! Pure. What a guest says of itself and what a peer sends is bounded and checked by the same rules. Refuses: addresses
//! that no single host can have, more cards or addresses than the bounds.

use crate::protocol::ProtocolError;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// A list for more cards than a VM can have is refused.
pub const CARDS_MAX: usize = godwit_types::vm::NICS_MAX;
/// Most addresses of one card.
pub const ADDRESSES_MAX: usize = 16;

/// Whether one host on a link may have this address.
pub fn is_unicast(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => is_unicast_v4(address),
        IpAddr::V6(address) => is_unicast_v6(address),
    }
}

fn is_unicast_v4(address: Ipv4Addr) -> bool {
    let [first, ..] = address.octets();
    // 224 and above are groups, reserved, and everybody.
    (1..224).contains(&first) && first != 127
}

fn is_unicast_v6(address: Ipv6Addr) -> bool {
    !address.is_unspecified()
        && !address.is_loopback()
        && !address.is_multicast()
        && address.to_ipv4_mapped().is_none()
}

fn is_link_local(address: &IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => address.is_link_local(),
        IpAddr::V6(address) => address.is_unicast_link_local(),
    }
}

/// Adds an address that was just heard, newest last. A full list forgets its oldest link-local address first, which
/// few neighbours beside routers know. Says whether the list's members changed.
pub fn note(list: &mut Vec<IpAddr>, address: IpAddr) -> bool {
    if !is_unicast(address) {
        return false;
    }
    if let Some(at) = list.iter().position(|known| *known == address) {
        list.remove(at);
        list.push(address);
        return false;
    }
    if list.len() >= ADDRESSES_MAX {
        list.remove(list.iter().position(is_link_local).unwrap_or(0));
    }
    list.push(address);
    true
}

/// Checks what a peer sent: one list per card.
pub fn check(cards: &[Vec<IpAddr>]) -> Result<(), ProtocolError> {
    let fits = |card: &Vec<IpAddr>| {
        card.len() <= ADDRESSES_MAX && card.iter().all(|address| is_unicast(*address))
    };
    if cards.len() <= CARDS_MAX && cards.iter().all(fits) {
        return Ok(());
    }
    Err(ProtocolError::OutOfBounds("the guest's addresses"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::{ToDestination, decode_to_destination, encode};

    fn address(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn only_addresses_of_one_host_are_taken() {
        for good in [
            "192.0.2.7",
            "10.0.0.1",
            "169.254.3.4",
            "2001:db8::7",
            "fe80::1",
            "fd00::1",
        ] {
            assert!(is_unicast(address(good)), "{good}");
        }
        for bad in [
            "0.0.0.0",
            "0.1.2.3",
            "127.0.0.1",
            "224.0.0.1",
            "255.255.255.255",
            "240.0.0.1",
            "::",
            "::1",
            "ff02::1",
            "::ffff:192.0.2.7",
        ] {
            assert!(!is_unicast(address(bad)), "{bad}");
        }
    }

    #[test]
    fn a_full_list_forgets_link_local_addresses_first_then_the_oldest() {
        let mut list = Vec::new();
        assert!(note(&mut list, address("192.0.2.1")));
        assert!(note(&mut list, address("fe80::1")));
        for last in 2..=15 {
            assert!(note(&mut list, address(&format!("192.0.2.{last}"))));
        }
        assert_eq!(list.len(), ADDRESSES_MAX);
        assert!(
            !note(&mut list, address("192.0.2.1")),
            "known, and the newest now"
        );
        assert!(note(&mut list, address("192.0.2.16")));
        assert!(!list.contains(&address("fe80::1")));
        assert!(note(&mut list, address("192.0.2.17")));
        assert!(!list.contains(&address("192.0.2.2")));
        assert_eq!(list.len(), ADDRESSES_MAX);
        assert!(!note(&mut list, address("ff02::1")));
    }

    #[test]
    fn a_peer_cannot_send_more_or_others() {
        let decode = |cards| {
            let message = ToDestination::Addresses { cards };
            decode_to_destination(&encode(&message), 10)
        };
        let good = vec![vec![address("192.0.2.7"), address("fe80::1")], vec![]];
        assert_eq!(
            decode(good.clone()),
            Ok(ToDestination::Addresses { cards: good })
        );
        let refused = [
            vec![vec![address("ff02::1")]],
            vec![vec![address("192.0.2.7"); ADDRESSES_MAX + 1]],
            vec![vec![]; CARDS_MAX + 1],
        ];
        for cards in refused {
            assert!(matches!(decode(cards), Err(ProtocolError::OutOfBounds(_))));
        }
    }
}
