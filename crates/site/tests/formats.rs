//! Rows of the controller's database about who may hold what, against their golden file.

#[path = "../../store/tests/common/golden.rs"]
mod golden;

use godwit_site::{Entry, HostRow};
use golden::{again, check};
use std::path::Path;

#[test]
fn rows_are_as_their_golden_file_says() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/rows");
    check(
        &file,
        &[("Entry", again::<Entry>), ("HostRow", again::<HostRow>)],
    );
}
