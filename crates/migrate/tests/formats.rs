//! The words of the control channel, against their golden file.

#[path = "../../store/tests/common/golden.rs"]
mod golden;

use godwit_migrate::protocol::{ToDestination, ToSource};
use golden::{again, check};
use std::path::Path;

#[test]
fn control_messages_are_as_their_golden_file_says() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/protocol");
    check(
        &file,
        &[
            ("ToDestination", again::<ToDestination>),
            ("ToSource", again::<ToSource>),
        ],
    );
}
