//! The VM process as the tests start it: the product's own `run`, and an end when the test is gone.
#![forbid(unsafe_code)]

use std::io::Read as _;
use std::path::Path;

fn main() -> anyhow::Result<()> {
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .init();
    let mut words = std::env::args().skip(1);
    let path = words
        .next()
        .ok_or_else(|| anyhow::anyhow!("usage: e2e-vm-process CONFIG [--handed FD]"))?;
    let handed = words.nth(1).map(|number| number.parse()).transpose()?;
    let config = serde_json::from_slice(&std::fs::read(&path)?)?;
    std::thread::spawn(move || end_with_the_test(&config));
    godwit_vmproc::run(path.as_ref(), handed)
}

/// The test holds the other end of our standard input. A test that was killed leaves no QEMU and no RAM behind.
fn end_with_the_test(config: &godwit_types::host_api::VmProcessConfig) {
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
    godwit_e2e::host::kill_qemu_of(Path::new(&config.run_dir));
    // The directories may be gone already, and the identity with them.
    godwit_e2e::host::kill_qemus_on(Path::new(&config.ram_dir));
    let _ = std::fs::remove_dir_all(&config.ram_dir);
    std::process::exit(0);
}
