//! `make install` and `make uninstall` with a PREFIX that is nobody's habit, and below a DESTDIR.
//!
//! Where it could reach this machine's own processes and units it runs in namespaces of its own, with a `systemctl` that only
//! writes down what it is asked for: that needs root, and is left out without it.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .canonicalize()
        .unwrap()
}

fn script(verb: &str, prefix: &str, dest: &Path) -> Output {
    let output = Command::new(root().join("scripts/install.sh"))
        .arg(verb)
        .env("PREFIX", prefix)
        .env("DESTDIR", dest)
        .env("BINARY", env!("CARGO_BIN_EXE_godwit"))
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{verb}: {errors}");
    output
}

/// Every file and link below a directory.
fn files(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).unwrap().flatten() {
        match entry.file_type().unwrap().is_dir() {
            true => found.extend(files(&entry.path())),
            false => found.push(entry.path()),
        }
    }
    found
}

#[test]
fn what_was_installed_below_a_destdir_is_taken_away_with_what_enabled_it() {
    let dest = tempfile::tempdir().unwrap();
    script("install", "/opt/odd place", dest.path());
    let unit = "/opt/odd place/lib/systemd/system/godwit-agent.service";
    let installed = dest.path().join(unit.trim_start_matches('/'));
    let text = std::fs::read_to_string(&installed).unwrap();
    assert!(text.contains("/opt/odd place/bin/godwit"), "{text}");
    let wants = dest
        .path()
        .join("etc/systemd/system/multi-user.target.wants");
    std::fs::create_dir_all(&wants).unwrap();
    std::os::unix::fs::symlink(unit, wants.join("godwit-agent.service")).unwrap();
    std::os::unix::fs::symlink("/lib/systemd/system/other.service", wants.join("other")).unwrap();
    script("uninstall", "/opt/odd place", dest.path());
    assert_eq!(files(dest.path()), [wants.join("other")]);
}

/// Runs a script with processes, /run and a `systemctl` of its own; gives what it said and what systemctl was asked for.
fn alone(dir: &Path, script: &str) -> Option<(Output, String)> {
    if !rustix::process::geteuid().is_root() {
        eprintln!("not root: left out");
        return None;
    }
    let bin = dir.join("bin");
    std::fs::create_dir_all(&bin).unwrap();
    let asked = dir.join("asked");
    let systemctl = format!(
        "#!/bin/sh\necho \"$*\" >>'{}'\n[ \"$1\" != is-active ]\n",
        asked.display()
    );
    for (name, text) in [
        ("systemctl", systemctl.as_str()),
        ("systemd-sysusers", "#!/bin/sh\n"),
        ("systemd-tmpfiles", "#!/bin/sh\n"),
    ] {
        use std::os::unix::fs::OpenOptionsExt as _;
        let mut options = std::fs::OpenOptions::new();
        let file = options.create(true).truncate(true).write(true).mode(0o755);
        std::io::Write::write_all(&mut file.open(bin.join(name)).unwrap(), text.as_bytes())
            .unwrap();
    }
    let script = format!(
        "set -e\nmount -t tmpfs none /run\nmkdir -p /run/systemd/system\nPATH='{}':$PATH\n{script}",
        bin.display()
    );
    let output = Command::new("unshare")
        .args([
            "--mount",
            "--pid",
            "--fork",
            "--mount-proc",
            "--kill-child",
            "sh",
            "-c",
            &script,
        ])
        .current_dir(root())
        .env("PREFIX", dir.join("odd"))
        .env("ETC", dir.join("etc"))
        .env("BINARY", env!("CARGO_BIN_EXE_godwit"))
        .env_remove("DESTDIR")
        .output()
        .unwrap();
    let asked = std::fs::read_to_string(asked).unwrap_or_default();
    Some((output, asked))
}

#[test]
fn units_of_an_odd_prefix_are_disabled() {
    let dir = tempfile::tempdir().unwrap();
    let both = "scripts/install.sh install\nscripts/install.sh uninstall";
    let Some((output, asked)) = alone(dir.path(), both) else {
        return;
    };
    let told = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{output:?}");
    assert!(
        told.contains("odd/lib/systemd/system/godwit-agent.service"),
        "{told}"
    );
    for unit in ["agent", "controller", "guests"] {
        let disabled = format!("disable --quiet --now godwit-{unit}.service");
        assert!(asked.contains(&disabled), "{disabled} is not in:\n{asked}");
    }
    assert_eq!(files(&dir.path().join("odd")), Vec::<PathBuf>::new());
}

/// The memory file of a VM's QEMU, as a host has it: its user's, in a directory of root's.
const RAM: &str = "uid=1879048200
        ram=/run/godwit/ram
        mkdir -p $ram
        chmod 711 $ram
        touch $ram/web.1
        chown $uid $ram/web.1
        ";
const INSTALLED: &str = "scripts/install.sh install";

/// Any user may start a process with the words of a QEMU, through a program with root's rights, too.
#[test]
fn a_users_process_that_looks_like_a_qemu_does_not_keep_the_program_installed() {
    let dir = tempfile::tempdir().unwrap();
    let script = format!("{RAM}{INSTALLED}
        mkdir -p /run/own/ram
        touch /run/own/ram/web.1
        chown -R 1000 /run/own
        looks_like() {{
            setpriv --reuid=$1 sh -c 'sleep 600; :' -name guest=web -object memory-backend-file,mem-path=$2 &
            until grep -q ^sh /proc/$!/cmdline; do :; done
        }}
        looks_like 1000 $ram/web.1
        looks_like 0 $ram/web.1
        looks_like 1000 /run/own/ram/web.1
        looks_like 1000 /run/own/ram/none
        looks_like 1000 $ram/../../own/ram/web.1
        scripts/install.sh uninstall");
    let Some((output, _)) = alone(dir.path(), &script) else {
        return;
    };
    assert!(output.status.success(), "{output:?}");
    assert_eq!(files(&dir.path().join("odd")), Vec::<PathBuf>::new());
}

#[test]
fn nothing_of_an_odd_prefix_is_taken_away_while_a_vm_runs() {
    let dir = tempfile::tempdir().unwrap();
    let script = format!("{RAM}{INSTALLED}
        setpriv --reuid=$uid sh -c 'sleep 600; :' -name guest=web,debug-threads=on -object memory-backend-file,mem-path=$ram/web.1,share=on &
        until grep -q ^sh /proc/$!/cmdline; do :; done
        scripts/install.sh uninstall");
    let Some((output, asked)) = alone(dir.path(), &script) else {
        return;
    };
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{errors}");
    assert!(errors.contains("VMs run on this host: web"), "{errors}");
    assert!(!asked.contains("disable"), "{asked}");
    assert!(
        dir.path()
            .join("odd/lib/systemd/system/godwit-agent.service")
            .is_file()
    );
}
