//! Frames: runs cut out of large packets are what a network card would send, and nothing makes the parser fail badly.

use super::*;

const PER_PACKET: usize = 1448;
const SEQUENCE: u32 = 0xffff_f000; // wraps within the packet
const NUMBER: u16 = 0xfffe;

/// A large TCP packet with 12 bytes of options, as the kernel hands it over.
fn large(four: bool, payload_bytes: usize) -> Vec<u8> {
    let ip_bytes = if four { 20 } else { 40 };
    let tcp_bytes = 32 + payload_bytes;
    let tcp = ETHERNET_BYTES + ip_bytes;
    let mut frame = vec![NEEDS_CHECKSUM, if four { LARGE_TCP4 } else { LARGE_TCP6 }];
    frame.extend(60_u16.to_ne_bytes());
    frame.extend((PER_PACKET as u16).to_ne_bytes());
    frame.extend((tcp as u16).to_ne_bytes());
    frame.extend(16_u16.to_ne_bytes());
    frame.extend([0; 12]);
    if four {
        frame.extend([8, 0, 0x45, 0]);
        frame.extend(((20 + tcp_bytes) as u16).to_be_bytes());
        frame.extend(NUMBER.to_be_bytes());
        frame.extend([0x40, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    } else {
        frame.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
        frame.extend((tcp_bytes as u16).to_be_bytes());
        frame.extend([6, 64]);
        frame.extend([0xfd; 32]);
    }
    let at = frame.len();
    frame.extend([0, 80, 0, 90]);
    frame.extend(SEQUENCE.to_be_bytes());
    frame.extend([0, 0, 0, 1, 0x80, 0x99, 1, 0, 0, 0, 0, 0]);
    frame.extend([1; 12]);
    frame.extend((0..payload_bytes).map(|byte| (byte % 251) as u8));
    let sum = pseudo_sum(&frame[VIRTIO_HEADER_BYTES + ETHERNET_BYTES..at], tcp_bytes);
    frame[at + 16..at + 18].copy_from_slice(&sum.to_be_bytes());
    frame
}

/// The part of a TCP checksum that is about addresses, protocol and length.
fn pseudo_sum(ip: &[u8], tcp_bytes: usize) -> u16 {
    let addresses = if ip[0] >> 4 == 4 {
        &ip[12..20]
    } else {
        &ip[8..40]
    };
    fold(u32::from(ones_sum(addresses)) + 6 + tcp_bytes as u32)
}

/// Checks one run against what the whole packet says.
fn check_run(whole: &[u8], four: bool, packets: Range<u16>, run: &[u8]) {
    let (ip, tcp) = (24, if four { 44 } else { 64 });
    let payload = tcp + 32;
    let (first, end) = (usize::from(packets.start), usize::from(packets.end));
    let from = payload + first * PER_PACKET;
    let to = whole.len().min(payload + end * PER_PACKET);
    assert_eq!(&run[payload..], &whole[from..to]);
    let is_one = packets.len() == 1;
    assert_eq!(run[1] == LARGE_NONE, is_one);
    assert_eq!(
        native_word(run, 4),
        Some(if is_one { 0 } else { PER_PACKET as u16 })
    );
    assert_eq!(run[6..10], whole[6..10], "where the checksum is");
    assert_eq!(run[10..24], whole[10..24], "Ethernet header");
    if four {
        assert_eq!(usize::from(word(run, ip + 2).unwrap()), run.len() - ip);
        assert_eq!(word(run, ip + 4), Some(NUMBER.wrapping_add(packets.start)));
        if run != whole {
            assert_eq!(ones_sum(&run[ip..tcp]), 0xffff, "IPv4 checksum");
        }
    } else {
        assert_eq!(usize::from(word(run, ip + 4).unwrap()), run.len() - tcp);
    }
    let sequence = u32::from_be_bytes(run[tcp + 4..tcp + 8].try_into().unwrap());
    assert_eq!(sequence, SEQUENCE.wrapping_add((first * PER_PACKET) as u32));
    let flags = run[tcp + 13];
    assert_eq!(
        flags & TCP_CWR != 0,
        first == 0,
        "congestion window reduced: on the first"
    );
    assert_eq!(
        flags & TCP_FIN_PSH != 0,
        to == whole.len(),
        "end and push: on the last"
    );
    assert_eq!(flags & 0x10, 0x10);
    let sum = pseudo_sum(&run[ip..tcp], run.len() - tcp);
    assert_eq!(
        word(run, tcp + 16).map(|sum| sum % 0xffff),
        Some(sum % 0xffff)
    );
}

#[test]
fn every_run_of_a_large_packet_is_what_a_network_card_would_send() {
    for four in [true, false] {
        for payload_bytes in [PER_PACKET + 1, 5 * PER_PACKET, 20_000, 44 * PER_PACKET + 7] {
            let whole = large(four, payload_bytes);
            let (train, frame) = Frame::parse(&whole).expect("a frame");
            let headers = whole.len() - VIRTIO_HEADER_BYTES - payload_bytes;
            let packets = payload_bytes.div_ceil(PER_PACKET);
            assert_eq!(usize::from(train.packets), packets);
            assert_eq!(train.full_bytes as usize, headers + PER_PACKET);
            let last = payload_bytes - (packets - 1) * PER_PACKET;
            assert_eq!(train.last_bytes as usize, headers + last);
            let mut scratch = Vec::new();
            for first in 0..train.packets {
                for end in first + 1..=train.packets {
                    let run = frame.run(first..end, &mut scratch).to_vec();
                    check_run(&whole, four, first..end, &run);
                }
            }
        }
    }
}

#[test]
fn a_small_frame_passes_as_it_is() {
    let mut bytes = vec![0; VIRTIO_HEADER_BYTES];
    bytes.extend([7; 60]);
    let (train, frame) = Frame::parse(&bytes).expect("a frame");
    assert_eq!(train, Train::single(60));
    assert_eq!(frame.run(0..1, &mut Vec::new()), bytes);
}

#[test]
fn senseless_frames_are_refused() {
    let whole = large(true, 5_000);
    let changed = |at: usize, value: u8| {
        let mut frame = whole.clone();
        frame[at] = value;
        Frame::parse(&frame).is_none()
    };
    assert!(
        Frame::parse(&whole[..20]).is_none(),
        "shorter than a header"
    );
    assert!(Frame::parse(&whole[..70]).is_none(), "no payload");
    assert!(changed(1, 3), "a large packet of another protocol");
    assert!(changed(1, LARGE_TCP6), "IPv4 that claims to be IPv6");
    assert!(changed(0, 0), "a complete checksum");
    assert!(changed(6, 20), "TCP inside the IP header");
    assert!(changed(56, 0x10), "a TCP header of 4 bytes");
    let mut none_each = whole.clone();
    none_each[4..6].fill(0);
    assert!(Frame::parse(&none_each).is_none(), "packets of nothing");
}

#[test]
fn no_bytes_make_the_parser_or_a_run_panic() {
    let mut state = 1_u64;
    let mut random = move |limit: usize| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % limit
    };
    let mut parsed = 0;
    for round in 0..20_000 {
        let mut bytes = large(round % 2 == 0, 1 + random(9_000));
        for _ in 0..1 + random(4) {
            let at = random(80);
            bytes[at.min(74)] = random(256) as u8;
        }
        let length = bytes.len()
            - if random(4) == 0 {
                random(bytes.len())
            } else {
                0
            };
        if let Some((train, frame)) = Frame::parse(&bytes[..length]) {
            parsed += 1;
            let first = random(usize::from(train.packets)) as u16;
            let end = first + 1 + random(usize::from(train.packets - first)) as u16;
            assert!(!frame.run(first..end, &mut Vec::new()).is_empty());
        }
    }
    assert!(parsed > 5_000, "{parsed}");
}
