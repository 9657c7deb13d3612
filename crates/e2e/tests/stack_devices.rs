//! Datastores that are block devices, as a person has them: moved to, gone along to, left and checked.

mod device;
mod disk_site;

use anyhow::{Context as _, Result, ensure};
use device::Device;
use godwit_blockio::label::Holds;
use godwit_e2e::stack::disks::{describe, disk, goes_on_at, make_image};
use godwit_e2e::stack::{Plan, SOON, Stack, names};

/// Room for the disk of a guest of this kind, which is 1 MiB long, and the label.
const DEVICE: u64 = 3 << 20;

fn holds(stack: &Stack, device: &Device, wanted: &Holds) -> Result<()> {
    stack.until("the device holds what it should", SOON, || {
        let label = device.label()?;
        Ok(label.map(|label| label.holds).as_ref() == Some(wanted))
    })
}

fn is_at(stack: &Stack, host: &str, path: &str) -> Result<()> {
    goes_on_at(stack, "one", host)?;
    let shown = stack.vm("one")?;
    ensure!(shown["spec"]["disk"][0]["path"] == path, "{shown}");
    Ok(())
}

#[test]
fn a_disk_moves_to_a_device_and_goes_along_to_another_and_comes_back_to_a_file() -> Result<()> {
    let (Some(here), Some(there)) = (Device::new(DEVICE)?, Device::new(DEVICE)?) else {
        return Ok(());
    };
    let path = |device: &Device| -> Result<String> {
        Ok(device.node().to_str().context("a path")?.to_owned())
    };
    let (lun, other) = (path(&here)?, path(&there)?);
    let config = |device: &str| {
        format!(
            "datastores = {{ lun = {{ path = \"{device}\" }}, fast = {{ path = \"/var/tmp/fast\" }} }}\n"
        )
    };
    let mut plan = Plan::default();
    plan.hosts[0].config = config(&lun);
    plan.hosts[1].config = config(&other);
    let stack = Stack::new("devices", &plan)?;
    let ok = |words: &[&str]| stack.ok("controller", words);
    let image = make_image(&stack, "root")?;
    stack.make_directory("b", "/var/tmp/fast")?;
    ok(&["vm", "create", &describe(&stack, "one", &disk(&image))?])?;
    ok(&["vm", "start", "one", "--on", "a"])?;
    goes_on_at(&stack, "one", "a")?;

    let to_lun = ["vm", "move-disk", "one", "--to", "lun"];
    here.write(&[7; 512], 0)?;
    let sentence = stack.refused("controller", &to_lun, 3, "preflight")?;
    names(
        &sentence,
        &["datastore 'lun' of host 'a'", &lun, "blkdiscard -z"],
    )?;
    ensure!(here.label()?.is_none());
    here.write(&[0; 512], 0)?;
    let dry = ok(&["vm", "move-disk", "one", "--to", "lun", "--dry-run"])?;
    names(&dry, &["would move from", &lun])?;
    ensure!(here.label()?.is_none(), "a dry run wrote to the device");
    names(&ok(&to_lun)?, &[&format!("is {lun} now")])?;
    is_at(&stack, "a", &lun)?;
    holds(&stack, &here, &Holds::Disk)?;
    let sentence = stack.refused("controller", &to_lun, 3, "preflight")?;
    names(&sentence, &["is in datastore 'lun'", "already"])?;
    ok(&["vm", "stop", "one", "--force"])?;
    ok(&["vm", "start", "one"])?;
    is_at(&stack, "a", &lun)?;

    stack.migrate("one", "b", &[])?;
    is_at(&stack, "b", &other)?;
    holds(&stack, &there, &Holds::Disk)?;
    holds(&stack, &here, &Holds::Nothing)?;
    let moved = ok(&["vm", "move-disk", "one", "--to", "fast"])?;
    names(&moved, &["is /var/tmp/fast/one-root.raw now"])?;
    is_at(&stack, "b", "/var/tmp/fast/one-root.raw")?;
    holds(&stack, &there, &Holds::Nothing)?;
    stack.migrate("one", "a", &["--disk", "root=lun"])?;
    is_at(&stack, "a", &lun)?;
    holds(&stack, &here, &Holds::Disk)?;
    stack.remove("one")
}
