//! The durable record and the hosts' messages about it, against their golden file.

#[path = "../../store/tests/common/golden.rs"]
mod golden;

use godwit_ownership::{HostRecord, PeerMessage};
use golden::{again, check};
use std::path::Path;

#[test]
fn records_and_peer_messages_are_as_their_golden_file_says() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/formats");
    check(
        &file,
        &[
            ("HostRecord", again::<HostRecord>),
            ("PeerMessage", again::<PeerMessage>),
        ],
    );
}
