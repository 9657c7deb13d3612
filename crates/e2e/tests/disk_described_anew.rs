//! A VM that was deleted is described anew over the images that it had, also where Godwit made them for its user alone.

use anyhow::{Result, ensure};
use godwit_e2e::stack::disks::{
    describe, disk, goes_on_at, image_has_all_at, make_image, with_stores,
};
use godwit_e2e::stack::{SOON, Stack, names};
use std::os::unix::fs::MetadataExt as _;

/// Its image belongs to its user, and nobody else may open it.
fn image_is_its_own(stack: &Stack, (image, host): (&str, &str)) -> Result<()> {
    let uid = stack.vm("one")?["spec"]["uid"].as_u64();
    let found = std::fs::metadata(stack.inside(host, image)?)?;
    ensure!(Some(found.uid().into()) == uid, "{found:?} of {uid:?}");
    ensure!(found.mode() & 0o777 == 0o600, "{found:?}");
    Ok(())
}

/// The VM is turned off, deleted, described with its image, and started: where that is, which nobody has to say.
fn is_described_anew(stack: &Stack, (image, host): (&str, &str)) -> Result<()> {
    let ok = |words: &[&str]| stack.ok("controller", words);
    ok(&["vm", "stop", "one", "--force"])?;
    stack.until("it is off", SOON, || {
        Ok(stack.vm("one")?["state"] == "stopped")
    })?;
    ok(&["vm", "delete", "one"])?;
    ok(&["vm", "create", &describe(stack, "one", &disk(image))?])?;
    ok(&["vm", "start", "one"])?;
    goes_on_at(stack, "one", host)
}

/// It got another user's id, and its own images were refused with the advice to give them to the host's common user.
#[test]
fn a_vm_that_was_deleted_goes_on_from_images_that_a_migration_and_a_snapshot_made() -> Result<()> {
    let stack = with_stores("anew")?;
    let ok = |words: &[&str]| stack.ok("controller", words);
    let image = make_image(&stack, "root")?;
    ok(&["vm", "create", &describe(&stack, "one", &disk(&image))?])?;
    ok(&["vm", "start", "one", "--on", "a"])?;
    goes_on_at(&stack, "one", "a")?;
    ok(&["vm", "migrate", "one", "--to", "b"])?;
    goes_on_at(&stack, "one", "b")?;
    image_is_its_own(&stack, (&image, "b"))?;
    is_described_anew(&stack, (&image, "b"))?;
    image_is_its_own(&stack, (&image, "b"))?;

    ok(&["vm", "snapshot", "create", "one", "monday"])?;
    goes_on_at(&stack, "one", "b")?;
    is_described_anew(&stack, (&image, "b"))?;
    names(&ok(&["vm", "snapshot", "list", "one"])?, &["monday"])?;
    ok(&["vm", "snapshot", "delete", "one", "monday"])?;
    stack.until("what was written since is in the image", SOON, || {
        Ok(!stack.inside("b", format!("{image}.images"))?.exists())
    })?;
    goes_on_at(&stack, "one", "b")?;
    ok(&["vm", "pause", "one"])?;
    image_has_all_at(&stack, "one", (&image, "b"))?;
    stack.remove("one")
}
