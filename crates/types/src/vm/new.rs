//! What a VM must be when a person describes it, beyond what records may hold: what no QEMU takes is refused before the
//! VM exists, not when it starts.
//!
//! Pure, owns nothing. Records of VMs that were made earlier are held to [`VmSpec::check`] alone, so that nobody refuses
//! to hear of them. Refuses: control characters, command lines that a kernel cuts, disk names that do not fit a serial
//! number, CPU models and features that are no names.

use super::{DISK_NAME_LEN_MAX, DiskSpec, InvalidVm, NEW_CMDLINE_LEN_MAX, NicSpec, VmSpec};
use serde::de::DeserializeOwned;

impl VmSpec {
    /// Reads a VM that a person describes in TOML, and checks it as a new one.
    pub fn from_toml(text: &str) -> Result<Self, InvalidVm> {
        Self::from_toml_with(text, |file| Err(format!("{file} is not read here")))
    }

    /// The same, with the text of the file that it names for cloud-init.
    pub fn from_toml_with(
        text: &str,
        read: impl FnOnce(&str) -> Result<String, String>,
    ) -> Result<Self, InvalidVm> {
        let spec: Self = toml::from_str(text).map_err(|error| unreadable(text, &error))?;
        let spec = spec.with_files_read(read)?;
        spec.check_new()?;
        Ok(spec)
    }

    /// Checks all bounds, and what QEMU will want when the VM starts.
    pub fn check_new(&self) -> Result<(), InvalidVm> {
        self.check()?;
        let boots = [
            ("kernel", Some(&self.kernel)),
            ("initramfs", self.initramfs.as_ref()),
        ];
        let disks = self.disks.iter().flat_map(|disk| {
            [
                ("disk path", Some(&disk.path)),
                ("disk from", disk.from.as_ref()),
            ]
        });
        for (key, path) in boots.into_iter().chain(disks) {
            path.map_or(Ok(()), |path| printable(key, path))?;
        }
        printable("cmdline", &self.cmdline)?;
        if self.cmdline.len() > NEW_CMDLINE_LEN_MAX {
            return Err(InvalidVm(format!(
                "cmdline has {} bytes: a kernel takes at most {NEW_CMDLINE_LEN_MAX}",
                self.cmdline.len()
            )));
        }
        check_cpu(&self.cpu)?;
        check_name("machine", &self.machine)?;
        self.disks.iter().try_for_each(|disk| match disk.name.len() {
            ..=DISK_NAME_LEN_MAX => Ok(()),
            length => Err(InvalidVm(format!(
                "disk name '{}' has {length} bytes: use at most {DISK_NAME_LEN_MAX}, since the guest sees it as the disk's serial number",
                disk.name
            ))),
        })
    }
}

fn printable(key: &str, text: &str) -> Result<(), InvalidVm> {
    match text.contains(char::is_control) {
        false => Ok(()),
        true => Err(InvalidVm(format!(
            "{key} = \"{}\" is not valid: it has a control character",
            text.escape_debug()
        ))),
    }
}

/// A model and features, each switched by a sign before it or by a value behind it: `EPYC,+avx2,-smap,svm=off`.
fn check_cpu(cpu: &str) -> Result<(), InvalidVm> {
    let mut parts = cpu.split(',');
    check_name("CPU model", parts.next().unwrap_or_default())?;
    parts.try_for_each(|part| {
        let name = match part.split_once('=') {
            Some((name, "on" | "off")) => name,
            Some(_) => {
                return Err(InvalidVm(format!(
                    "CPU feature \"{part}\" is not valid: a feature is on or off, as in {part_name}=on",
                    part_name = part.split('=').next().unwrap_or_default()
                )));
            }
            None => part.strip_prefix(['+', '-']).unwrap_or(part),
        };
        check_name("CPU feature", name)
    })
}

/// A name that QEMU's option syntax leaves alone.
fn check_name(key: &str, text: &str) -> Result<(), InvalidVm> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-' | '+');
    let begins = text.starts_with(|c: char| c.is_ascii_alphanumeric());
    match begins && text.len() <= 64 && text.chars().all(allowed) {
        true => Ok(()),
        false => Err(InvalidVm(format!(
            "{key} \"{}\" is not valid: use 1 to 64 of letters, digits, '.', '_', '-' and '+', beginning with a letter or digit",
            text.escape_debug()
        ))),
    }
}

/// Why TOML is no VM: where, and what is missing of what.
fn unreadable(text: &str, error: &toml::de::Error) -> InvalidVm {
    let parts = toml::from_str::<toml::Table>(text).unwrap_or_default();
    let nic = wrong_part::<NicSpec>(&parts, "nic");
    let part = nic.or_else(|| wrong_part::<DiskSpec>(&parts, "disk"));
    let (whose, why) = match part {
        Some((number, why, key)) => (format!("[[{key}]] number {number}"), why),
        None => ("the VM".to_owned(), error.message().to_owned()),
    };
    if let Some(key) = why.strip_prefix("missing field ") {
        return InvalidVm(format!("{whose} has no {key}"));
    }
    let line = error.span().and_then(|span| text.get(..span.start));
    let line = line.map(|before| format!("line {}: ", before.matches('\n').count() + 1));
    InvalidVm(format!("{}{}", line.unwrap_or_default(), error.message()))
}

/// The first of these parts that cannot be read: its number, from 1, and why.
fn wrong_part<T: DeserializeOwned>(
    vm: &toml::Table,
    key: &'static str,
) -> Option<(usize, String, &'static str)> {
    let parts = vm.get(key)?.as_array()?;
    let errors = parts.iter().zip(1..).filter_map(|(part, number)| {
        let error = part.clone().try_into::<T>().err()?;
        Some((number, error.message().to_owned(), key))
    });
    errors.into_iter().next()
}

#[cfg(test)]
mod tests {
    use super::*;

    const WEB: &str = "name = \"web\"\nvcpus = 2\nmemory_mib = 1024\nkernel = \"/k\"\n";

    fn refusal(text: &str) -> String {
        let error = VmSpec::from_toml(text).expect_err(text).0;
        assert!(!error.contains(char::is_control), "{error:?}");
        error
    }

    #[test]
    fn what_qemu_would_refuse_at_start_is_refused_before_the_vm_exists() {
        let disk = "[[disk]]\nname = \"a-name-of-21-bytes-xx\"\npath = \"/d\"\n";
        for (more, words) in [
            ("cmdline = \"a\\u001bb\"\n", "control character"),
            ("cmdline = \"a\\tb\"\n", "control character"),
            (
                &format!("cmdline = \"{}\"\n", "x".repeat(2048)),
                "2048 bytes",
            ),
            ("cpu = \"a,+\"\n", "CPU feature \"\""),
            ("cpu = \"a,,b\"\n", "CPU feature \"\""),
            ("cpu = \"a,+-b\"\n", "CPU feature \"-b\""),
            ("cpu = \"a,b=7\"\n", "on or off"),
            ("cpu = \"+a\"\n", "CPU model"),
            ("machine = \"-q35\"\n", "machine"),
            ("initramfs = \"/i\\u001b[2J\"\n", "initramfs"),
            (disk, "21 bytes"),
            (
                "[[nic]]\nport_group = \"vm\"\nmac = \"+2:54:00:00:00:01\"\n",
                "mac",
            ),
        ] {
            let error = refusal(&format!("{WEB}{more}"));
            assert!(error.contains(words), "{more}: {error}");
        }
        let error = refusal(&WEB.replace("/k", "/\\u001b]0;x\\u0007"));
        assert!(error.contains("kernel"), "{error}");
        let most = format!("{WEB}cmdline = \"{}\"\n", "x".repeat(2047));
        VmSpec::from_toml(&most).unwrap();
        VmSpec::from_toml(&format!("{WEB}cpu = \"EPYC-v3,+avx2,-smap,svm=off,aes\"\n")).unwrap();
    }

    #[test]
    fn too_many_disks_are_refused_before_the_vm_exists() {
        let disks = |count: usize| {
            let disk = |n| format!("[[disk]]\nname = \"d{n}\"\npath = \"/d{n}\"\n");
            format!("{WEB}{}", (0..count).map(disk).collect::<String>())
        };
        VmSpec::from_toml(&disks(16)).unwrap();
        assert!(refusal(&disks(17)).contains("17 disks"));
    }

    #[test]
    fn a_missing_key_is_named_with_what_it_belongs_to() {
        let two = "[[disk]]\nname = \"a\"\npath = \"/a\"\n[[disk]]\npath = \"/b\"\n";
        for (text, sentence) in [
            (format!("{WEB}{two}"), "[[disk]] number 2 has no `name`"),
            (
                format!("{WEB}[[nic]]\n"),
                "[[nic]] number 1 has no `port_group`",
            ),
            (
                WEB.replace("kernel", "#"),
                "VM 'web' is not valid: it has neither a `kernel` nor a [[disk]] to boot from",
            ),
        ] {
            assert_eq!(refusal(&text), sentence);
        }
        let error = refusal(&format!("{WEB}[[disk]]\nname = \"a\"\npth = \"/a\"\n"));
        assert!(error.contains("line 7") && error.contains("pth"), "{error}");
    }

    #[test]
    fn a_record_of_an_older_vm_is_still_taken() {
        let mut spec = VmSpec::from_toml(WEB).unwrap();
        spec.cmdline = "x".repeat(2048);
        spec.kernel = "/\u{1b}".into();
        spec.check().unwrap();
        spec.check_new().unwrap_err();
    }
}
