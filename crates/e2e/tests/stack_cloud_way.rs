//! The whole way of a cloud image, as a person goes it at the command line: made into a VM, kept as it was, cloned, moved to other storage and to another
//! host, and taken back. With `--show-output` all that is typed and answered is a transcript. The guest is a Debian with cloud-init and qemu-guest-agent.

use anyhow::{Context as _, Result, ensure};
use godwit_e2e::stack::{HostPlan, Plan, SOON, Stack};
use godwit_testkit::guest::debian::{self, ADDRESS, Images, Shell};
use serde_json::{Value, json};
use std::net::{IpAddr, Ipv4Addr};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// Longest boot, command in the guest or merge of its images, on a machine that has little time for it.
const PATIENCE: Duration = Duration::from_secs(300);
const VM: &str = "web";
const CLONE: &str = "web2";
/// Where the clone is told to be.
const CLONE_ADDRESS: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 77, 0, 11));
/// Datastores of both hosts, which have the paths in common and nothing in them.
const VMS: &str = "/var/tmp/vms";
const FAST: &str = "/var/tmp/fast";
const SIZE_GIB: u64 = 3;
/// Where the image's partition begins.
const PARTITION: u64 = 1 << 20;
const KEY: &str =
    "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJl3dIeudNqd0DPMRD6OIh65tjkxFNOtGcWB2gCgXhOm eve";
const USER_DATA: &str = "#cloud-config\nruncmd:\n  - echo told >> /root/told\n";
const TEXT: &str = "before the update";

/// Both hosts, each with two datastores.
fn bring_up() -> Result<Stack> {
    let host = HostPlan {
        config: format!(
            "datastores = {{ vms = {{ path = \"{VMS}\" }}, fast = {{ path = \"{FAST}\" }} }}\n"
        ),
        ..HostPlan::default()
    };
    let plan = Plan {
        hosts: [host.clone(), host],
        ..Plan::default()
    };
    let stack = Stack::new("cloud-way", &plan)?;
    for (host, path) in [("a", VMS), ("a", FAST), ("b", VMS), ("b", FAST)] {
        stack.make_directory(host, path)?;
    }
    Ok(stack)
}

/// Types a command that must succeed. Its answer is printed, and given.
fn types(stack: &Stack, words: &[&str]) -> Result<String> {
    let quoted = |word: &&str| match word.contains(' ') {
        true => format!("'{word}'"),
        false => (*word).to_owned(),
    };
    let typed: Vec<String> = words.iter().map(quoted).collect();
    println!("$ godwit {}", typed.join(" "));
    let ran = stack.run("controller", words)?;
    print!("{}{}", ran.stderr, ran.stdout);
    ensure!(ran.code == Some(0), "{words:?}: {ran:?}");
    Ok(ran.stdout)
}

/// Somebody in a guest.
struct Guest {
    vm: &'static str,
    shell: Shell,
}

impl Guest {
    /// Waits until the guest has booted.
    fn reach(stack: &Stack, vm: &'static str, address: IpAddr) -> Result<Self> {
        let shell = debian::reach_at(stack, address, PATIENCE)?;
        Ok(Self { vm, shell })
    }

    fn types(&mut self, command: &str) -> Result<String> {
        println!("root@{}:~# {command}", self.vm);
        let said = self.shell.run(command, PATIENCE)?;
        println!("{said}");
        Ok(said)
    }

    /// What it holds, as it reads it from its disk.
    fn content(&mut self) -> Result<String> {
        self.types("sync; echo 3 >/proc/sys/vm/drop_caches; md5sum </root/data; cat /root/state; if test -e /root/later; then md5sum </root/later; else echo 'nothing later'; fi")
    }

    /// Another one after each boot.
    fn boot_id(&mut self) -> Result<String> {
        self.shell
            .run("cat /proc/sys/kernel/random/boot_id", PATIENCE)
    }

    /// It has done what its seed says, so many times in all.
    fn was_told(&mut self, times: usize) -> Result<()> {
        let done = "until systemctl is-active -q cloud-final.service; do sleep 1; done";
        self.shell.run(done, PATIENCE)?;
        let told = self.types("cat /root/told")?;
        ensure!(told.lines().count() == times, "it was told {told:?}");
        let name = self.types("hostname")?;
        ensure!(name == self.vm, "it is called {name}");
        let keys = self
            .shell
            .run("cat /home/debian/.ssh/authorized_keys", PATIENCE)?;
        ensure!(keys.contains("gXhOm eve"), "{keys}");
        Ok(())
    }
}

/// A description of a VM whose disk begins as these lines say.
fn describe(stack: &Stack, vm: &str, begins: &str, address: IpAddr) -> Result<String> {
    let text = format!(
        "name = \"{vm}\"\nvcpus = 1\nmemory_mib = 512\n\n[[disk]]\nname = \"root\"\npath = \"{VMS}/{vm}-root.raw\"\n{begins}\n[[nic]]\nport_group = \"vm\"\n\n[cloud_init]\nuser_data_file = \"web.yaml\"\nssh_keys = [\"{KEY}\"]\n\n[[cloud_init.network]]\naddresses = [\"{address}/24\"]\n"
    );
    println!("$ cat {vm}.toml\n{text}");
    stack.describe(vm, &text)
}

/// A qcow2 image that holds nothing of its own, and the raw one below it, as the machines see them.
fn cloud_image(stack: &Stack, raw: &Path) -> Result<[PathBuf; 2]> {
    let [base, image] = ["debian-12.raw", "debian-12.qcow2"].map(|name| stack.dir().join(name));
    let mut copy = Command::new("cp");
    let copied = copy.arg("--sparse=always").arg(raw).arg(&base).status()?;
    ensure!(copied.success(), "the image is not copied");
    let mut make = Command::new("qemu-img");
    make.args(["create", "-q", "-f", "qcow2", "-F", "raw", "-b"]);
    let made = make.arg("debian-12.raw").arg(&image).output()?;
    ensure!(made.status.success(), "{made:?}");
    for path in [&base, &image] {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o644))?;
    }
    Ok([base, image])
}

/// Files in a directory of a host.
fn files(stack: &Stack, host: &str, directory: &str) -> Result<Vec<String>> {
    let all = std::fs::read_dir(stack.inside(host, directory)?)?;
    let names = all.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
    let mut names = names.collect::<Result<Vec<_>>>()?;
    names.sort();
    Ok(names)
}

/// One QEMU has it, on this host, by the controller's word and by what runs.
fn is_on(stack: &Stack, vm: &str, host: &str) -> Result<()> {
    let shown = stack.vm(vm)?;
    ensure!(
        shown["state"] == "running" && shown["host"] == host,
        "{shown}"
    );
    let (here, all) = (stack.hypervisors(vm, host)?.len(), stack.copies(vm)?);
    ensure!(
        (here, all) == (1, 1),
        "{vm} runs {here} times on {host}, and {all} times in all"
    );
    Ok(())
}

/// Its snapshots, without what they take, which depends on the storage.
fn tree(stack: &Stack) -> Result<Value> {
    let mut listed = stack.json("controller", &["vm", "snapshot", "list", VM])?;
    let all = listed["snapshots"].as_array_mut();
    for snapshot in all.context("no snapshots")? {
        let snapshot = snapshot.as_object_mut().context("no snapshot")?;
        snapshot.remove("bytes");
    }
    Ok(json!([listed["snapshots"], listed["after"]]))
}

/// Waits until nothing is left to be merged.
fn is_merged(stack: &Stack) -> Result<()> {
    stack.until("all is merged", PATIENCE, || {
        let listed = stack.json("controller", &["vm", "snapshot", "list", VM])?;
        let left = listed["unneeded_images"].as_u64().context("no number")?;
        ensure!(left == 0, "{left} are left: {}", listed["why_unmerged"]);
        Ok(true)
    })
}

/// The image is made into a disk once, and is not needed any more.
fn begins_from_an_image(stack: &Stack, raw: &Path) -> Result<Guest> {
    let images = cloud_image(stack, raw)?;
    std::fs::write(stack.dir().join("web.yaml"), USER_DATA)?;
    let [_, image] = &images;
    let begins = format!("from = \"{}\"\nsize_gib = {SIZE_GIB}\n", image.display());
    let file = describe(stack, VM, &begins, ADDRESS)?;
    types(stack, &["vm", "create", &file])?;
    types(stack, &["vm", "start", VM, "--on", "a"])?;
    for image in images {
        std::fs::remove_file(image)?;
    }
    is_on(stack, VM, "a")?;
    ensure!(files(stack, "a", VMS)? == ["web-root.raw"]);

    let mut web = Guest::reach(stack, VM, ADDRESS)?;
    web.was_told(1)?;
    let size = web.types("blockdev --getsize64 /dev/vda")?;
    ensure!(size == (SIZE_GIB << 30).to_string(), "{size}");
    stack.until("the guest says who it is", PATIENCE, || {
        let guest = &stack.vm(VM)?["guest"];
        let has_address = guest["cards"].to_string().contains(&ADDRESS.to_string());
        Ok(guest["hostname"] == VM && has_address)
    })?;
    let said = types(stack, &["vm", "show", VM])?;
    ensure!(
        said.contains(&ADDRESS.to_string()) && said.contains("web, Debian"),
        "{said}"
    );
    Ok(web)
}

/// What the guest holds then is kept, with file systems that stood still. Gives the tree.
fn is_kept(stack: &Stack) -> Result<Value> {
    let create = ["vm", "snapshot", "create", VM, "clean", "--text", TEXT];
    types(stack, &create)?;
    types(stack, &["vm", "snapshot", "list", VM])?;
    let tree = tree(stack)?;
    let (one, more) = (&tree[0][0], &tree[0][1]);
    ensure!(one["name"] == "clean" && one["text"] == TEXT, "{tree}");
    ensure!(more.is_null() && tree[1] == "clean", "{tree}");
    ensure!(one["disks"] == json!(["root"]), "{tree}");
    ensure!(one["quiesced"] == true, "{tree}");
    Ok(tree)
}

/// The clone begins as the snapshot is, and is a guest of its own.
fn is_cloned(stack: &Stack, clean: &str) -> Result<()> {
    let clone = ["vm", "clone", VM, CLONE, "--snapshot", "clean"];
    let said = types(stack, &clone)?;
    ensure!(said.contains("is told the same addresses"), "{said}");
    let file = describe(stack, CLONE, "", CLONE_ADDRESS)?;
    types(stack, &["vm", "edit", CLONE, &file])?;
    types(stack, &["vm", "start", CLONE])?;
    let mut clone = Guest::reach(stack, CLONE, CLONE_ADDRESS)?;
    types(stack, &["vm", "list"])?;
    is_on(stack, VM, "a")?;
    is_on(stack, CLONE, "a")?;
    // Once as the other one, and once as itself.
    clone.was_told(2)?;
    let has = clone.content()?;
    ensure!(has == clean, "not what was kept: {has}");

    types(stack, &["vm", "stop", CLONE, "--force", "--wait"])?;
    types(stack, &["vm", "delete", CLONE])?;
    let image = stack.inside("a", format!("{VMS}/{CLONE}-root.raw"))?;
    Ok(std::fs::remove_file(image)?)
}

/// To another datastore, and to the other host, with its snapshot and without a moment in which it is off.
fn moves(stack: &Stack, web: &mut Guest, (now, kept): (&str, &Value)) -> Result<()> {
    let boot = web.boot_id()?;
    let mut goes_on = |host: &str| -> Result<()> {
        is_on(stack, VM, host)?;
        let has = web.content()?;
        ensure!(has == now, "not what it wrote: {has}");
        ensure!(web.boot_id()? == boot, "it has booted again");
        types(stack, &["vm", "snapshot", "list", VM])?;
        ensure!(tree(stack)? == *kept, "another tree: {}", tree(stack)?);
        // What the move put over its images is not needed any more.
        is_merged(stack)?;
        let there = files(stack, host, FAST)?;
        let is_own = |name: &String| name.starts_with("web-root.raw");
        ensure!(
            there.len() > 1 && there.iter().all(is_own),
            "there is {there:?}"
        );
        Ok(())
    };
    let is_empty = |host: &str, directory: &str| {
        stack.until(&format!("{directory} of {host} is empty"), SOON, || {
            let left = files(stack, host, directory)?;
            ensure!(left.is_empty(), "{left:?} is left");
            Ok(true)
        })
    };
    let said = types(stack, &["vm", "move-disk", VM, "--to", "fast"])?;
    ensure!(said.contains("fast/web-root.raw now"), "{said}");
    goes_on("a")?;
    is_empty("a", VMS)?;

    let said = types(stack, &["vm", "migrate", VM, "--to", "b"])?;
    ensure!(said.contains("VM 'web' moved from a to b"), "{said}");
    stack.runs_on(VM, "b")?;
    goes_on("b")?;
    is_empty("a", FAST)
}

/// The guest is asked to power off, and nothing runs it then.
fn powers_off(stack: &Stack) -> Result<()> {
    types(stack, &["vm", "stop", VM, "--wait", "240"])?;
    let shown = stack.vm(VM)?;
    ensure!(shown["state"] == "stopped", "{shown}");
    stack.until("nothing runs it", SOON, || Ok(stack.copies(VM)? == 0))
}

/// What was written after the snapshot is gone, and without the snapshot the disk is one image again.
fn is_taken_back(stack: &Stack, (clean, kept): (&str, &Value)) -> Result<()> {
    powers_off(stack)?;
    types(stack, &["vm", "snapshot", "revert", VM, "clean"])?;
    types(stack, &["vm", "start", VM])?;
    is_on(stack, VM, "b")?;
    let mut web = Guest::reach(stack, VM, ADDRESS)?;
    // It is the same instance, which does once what it does once.
    web.was_told(1)?;
    let has = web.content()?;
    ensure!(has == clean, "not what was kept: {has}");
    ensure!(tree(stack)? == *kept, "another tree: {}", tree(stack)?);

    types(stack, &["vm", "snapshot", "delete", VM, "clean"])?;
    is_merged(stack)?;
    let said = types(stack, &["vm", "snapshot", "list", VM])?;
    ensure!(said.trim() == "VM 'web' has no snapshots", "{said}");
    stack.until("the disk is one image", SOON, || {
        let there = files(stack, "b", FAST)?;
        ensure!(there == ["web-root.raw"], "there is {there:?}");
        Ok(true)
    })?;
    let has = web.content()?;
    ensure!(has == clean, "not what was kept: {has}");
    powers_off(stack)?;
    let image = stack.inside("b", format!("{FAST}/web-root.raw"))?;
    let partition = format!("{}?offset={PARTITION}", image.display());
    let checked = Command::new("e2fsck")
        .args(["-f", "-n", &partition])
        .output()?;
    ensure!(checked.status.success(), "e2fsck: {checked:?}");
    types(stack, &["vm", "delete", VM])?;
    ensure!(image.exists(), "its image is gone");
    Ok(())
}

#[test]
fn a_cloud_image_becomes_a_vm_that_is_kept_cloned_moved_and_taken_back() -> Result<()> {
    let raw = match debian::images("guest")? {
        Images::Here(images) => images.into_iter().next().context("no image is named")?,
        Images::NotHere(why) => {
            println!("skipped: {why}");
            return Ok(());
        }
    };
    let began = Instant::now();
    let stack = bring_up()?;
    let mut web = begins_from_an_image(&stack, &raw)?;
    web.types("head -c 4M /dev/urandom >/root/data; echo clean >/root/state; sync")?;
    let clean = web.content()?;
    let kept = is_kept(&stack)?;

    web.types("head -c 8M /dev/urandom >/root/later; head -c 1M /dev/urandom | dd of=/root/data conv=notrunc status=none; echo changed >/root/state; sync")?;
    let now = web.content()?;
    ensure!(now != clean && !now.contains("nothing later"), "{now}");
    is_cloned(&stack, &clean)?;
    moves(&stack, &mut web, (&now, &kept))?;
    is_taken_back(&stack, (&clean, &kept))?;
    println!("  {:.0} s in all", began.elapsed().as_secs_f64());
    Ok(())
}
