//! What people see: tables, colours where a terminal is, JSON where asked.
//!
//! Owns the decision whether colours are used. Refuses: colours in a pipe, or where NO_COLOR is set.

use crate::disk_rows::disk_rows;
use crate::figures::columns;
use crate::guest_rows::guest_rows;
use crate::host_rows::info_rows;
use crate::move_report::pause_ms;
use crate::plain;
use crate::tables::vms_of;
use comfy_table::{ContentArrangement, Table, presets};
use godwit_types::VmSpec;
use godwit_types::control_api::{HostState, HostView, VmView};
use godwit_types::host::{Check, CheckStatus};
use godwit_types::host_api::HostVm;
use godwit_types::migration::{MigrationReport, PreflightReport};
use godwit_types::site::{Claim, Standing};
use godwit_types::vm::{VmState, mac_text};
use serde::Serialize;
use std::fmt::Display;
use std::io::{IsTerminal, Write};

/// How things are shown.
#[derive(Debug, Clone, Copy)]
pub struct Output {
    pub json: bool,
    colour: bool,
    /// Of the terminal; a pipe has none, and gets every line whole.
    columns: Option<usize>,
}

/// Narrower than this no last column is broken into lines.
const LAST_COLUMN_MIN: usize = 20;

/// What a word means for the reader, which decides its colour.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tone {
    Plain,
    Good,
    Warn,
    Bad,
}

impl Output {
    /// As standard output and the environment have it.
    pub fn new(json: bool) -> Self {
        let terminal = std::io::stdout().is_terminal();
        let no_colour = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        Self {
            json,
            colour: terminal && !no_colour,
            columns: columns(std::io::stdout()),
        }
    }

    /// Text in a colour, where colours are shown.
    pub fn paint(&self, text: impl Display, tone: Tone) -> String {
        let code = match tone {
            Tone::Good => "32",
            Tone::Warn => "33",
            Tone::Bad => "1;31",
            Tone::Plain => return text.to_string(),
        };
        if self.colour {
            format!("\x1b[{code}m{text}\x1b[0m")
        } else {
            text.to_string()
        }
    }

    /// Prints a value as JSON.
    pub fn json(&self, value: &impl Serialize) {
        match serde_json::to_string_pretty(value) {
            Ok(text) => self.verbatim(plain::json(&text)),
            Err(error) => eprintln!("godwit: the answer cannot be written as JSON: {error}"),
        }
    }

    /// Prints a line, broken at words where the terminal ends; what follows hangs two columns behind its first word.
    pub fn line(&self, text: impl Display) {
        for line in text.to_string().split('\n') {
            let indent = line.len() - line.trim_start_matches(' ').len();
            self.hanging(line, indent + 2);
        }
    }

    /// The same with another place for what follows.
    fn hanging(&self, text: &str, hang: usize) {
        self.verbatim(plain::wrapped(text, self.columns, hang));
    }

    /// Prints text as it stands: commands to copy, a guest's console. A reader that has gone away is no error.
    pub fn verbatim(&self, text: impl Display) {
        let text = plain::lines(&text.to_string());
        #[cfg(test)]
        tests::PRINTED.with_borrow_mut(|printed| printed.extend(text.lines().map(String::from)));
        let _ = writeln!(std::io::stdout(), "{text}");
    }

    /// Prints JSON or what `people` makes.
    pub fn show<T: Serialize>(&self, value: &T, people: impl FnOnce(&Self, &T)) {
        if self.json {
            self.json(value);
        } else {
            people(self, value);
        }
    }

    /// A table whose last column is broken into lines where it is too wide for the terminal.
    pub fn table(&self, header: &[&str], rows: Vec<Vec<String>>) {
        let clean = |row: Vec<String>| row.iter().map(|cell| plain::sentence(cell)).collect();
        let mut rows: Vec<Vec<String>> = rows.into_iter().map(clean).collect();
        let last = header.len().saturating_sub(1);
        let before: usize = (0..last).map(|column| widest(header, &rows, column)).sum();
        let room = self
            .columns
            .map(|columns| columns.saturating_sub(before + 1));
        let room = room.filter(|room| *room >= LAST_COLUMN_MIN);
        for cell in rows.iter_mut().filter_map(|row| row.get_mut(last)) {
            *cell = plain::wrapped(cell, room, 0);
        }
        let mut table = Table::new();
        table.load_style(presets::NOTHING);
        table.set_content_arrangement(ContentArrangement::Disabled);
        table.set_header(header.iter().map(|name| name.to_uppercase()));
        table.add_rows(rows);
        let text = table.to_string();
        text.lines()
            .for_each(|line| self.verbatim(self.tone_of_line(line.trim_end())));
    }

    /// A table from which columns are left out, the last named first, until it fits the terminal.
    pub fn fitting_table(&self, header: &[&str], rows: Vec<Vec<String>>, needless: &[&str]) {
        let room = self.columns.unwrap_or(usize::MAX);
        let (header, rows) = fit(header, rows, needless, room);
        self.table(&header, rows);
    }

    /// Colours stay out of the table itself, whose widths they would spoil.
    fn tone_of_line(&self, line: &str) -> String {
        let has = |word: &str| line.split_whitespace().any(|part| part == word);
        let tone =
            if has("in-doubt") || has("damaged-record") || has("running-twice") || has("FAILED") {
                Tone::Bad
            } else if ["crashed", "panicked", "unreachable", "WARNING"]
                .iter()
                .any(|word| has(word))
            {
                Tone::Warn
            } else {
                Tone::Plain
            };
        self.paint(line.strip_prefix(' ').unwrap_or(line), tone)
    }

    /// VMs, those in doubt first.
    pub fn vms(&self, vms: &[VmView]) {
        let mut sorted: Vec<&VmView> = vms.iter().collect();
        sorted.sort_by_key(|vm| (urgency(vm.state), vm.spec.name.clone()));
        let rows = sorted.iter().map(|vm| {
            vec![
                vm.spec.name.to_string(),
                state_since(vm),
                hosts_of(vm),
                vm.spec.vcpus.to_string(),
                format!("{} MiB", vm.spec.memory_mib),
                vm.accelerator.map_or("-".into(), |a| a.to_string()),
                vm.migration.clone().unwrap_or_else(|| "-".into()),
            ]
        });
        self.fitting_table(
            &[
                "name",
                "state",
                "host",
                "vcpus",
                "memory",
                "accel",
                "migration",
            ],
            rows.collect(),
            &["host", "migration", "memory", "vcpus", "accel"],
        );
        for vm in sorted {
            self.note(&vm.spec.name, vm.state, vm.note.as_deref());
        }
    }

    /// What is to be said about a VM, if anything.
    fn note(&self, name: &impl Display, state: VmState, note: Option<&str>) {
        let Some(note) = note else {
            return;
        };
        let tone = if is_alarming(state) {
            Tone::Bad
        } else {
            Tone::Warn
        };
        self.line("");
        let note = plain::sentence(note);
        self.line(self.paint(format!("{name}: {note}"), tone));
    }

    pub fn vm(&self, vm: &VmView) {
        let tone = if is_alarming(vm.state) {
            Tone::Bad
        } else {
            Tone::Plain
        };
        let mut rows = vec![
            ("name", vm.spec.name.to_string()),
            ("state", self.paint(state_since(vm), tone)),
            ("host", hosts_of(vm)),
            ("generation", vm.generation.to_string()),
            ("vcpus", vm.spec.vcpus.to_string()),
            ("memory", format!("{} MiB", vm.spec.memory_mib)),
            ("cpu", vm.spec.cpu.clone()),
            ("machine", vm.spec.machine.clone()),
        ];
        rows.extend(boot_rows(&vm.spec));
        let accelerator = vm.accelerator.map_or("-".into(), |a| a.to_string());
        rows.push(("encryption", vm.spec.encryption.to_string()));
        rows.push(("accel", accelerator));
        for (index, nic) in vm.spec.nics.iter().enumerate() {
            rows.push((
                "nic",
                format!(
                    "{} {}",
                    nic.port_group,
                    mac_text(vm.spec.mac(index).unwrap_or_default())
                ),
            ));
        }
        rows.extend(disk_rows(vm));
        rows.extend(guest_rows(vm));
        if let Some(version) = &vm.vm_process_version {
            rows.push(("vm process", format!("godwit {version}")));
        }
        if let Some(migration) = &vm.migration {
            rows.push(("migration", migration.clone()));
        }
        self.pairs(&rows);
        self.note(&vm.spec.name, vm.state, vm.note.as_deref());
    }

    /// VMs as an agent alone knows them.
    pub fn host_vms(&self, vms: &[HostVm]) {
        let mut sorted: Vec<&HostVm> = vms.iter().collect();
        sorted.sort_by_key(|vm| (urgency(vm.state), vm.spec.name.clone()));
        let rows = sorted.iter().map(|vm| {
            vec![
                vm.spec.name.to_string(),
                state_here(vm),
                if vm.holds() { "yes" } else { "no" }.into(),
                vm.generation.to_string(),
                format!("{} MiB", vm.spec.memory_mib),
                vm.migration
                    .as_ref()
                    .map_or("-".into(), ToString::to_string),
            ]
        });
        self.fitting_table(
            &[
                "name",
                "state",
                "held here",
                "generation",
                "memory",
                "migration",
            ],
            rows.collect(),
            &["held here", "migration", "memory", "generation"],
        );
        for vm in sorted {
            self.note(&vm.spec.name, vm.state, vm.note.as_deref());
        }
    }

    /// Name and value, one pair a line.
    pub fn pairs(&self, rows: &[(&str, String)]) {
        let width = rows.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
        for (name, value) in rows {
            let value = value.replace(['\n', '\r'], " ");
            self.hanging(&format!("{name:width$}  {value}"), width + 2);
        }
    }

    pub fn hosts(&self, hosts: &[HostView]) {
        let rows = hosts.iter().map(|host| {
            let info = &host.info;
            // A host that was never heard has said nothing of itself.
            let heard = |text: String| match info.version.is_empty() {
                true => "-".to_owned(),
                false => text,
            };
            let memory = format!("{} of {} MiB", info.memory_free_mib, info.memory_total_mib);
            vec![
                info.name.to_string(),
                host_state(host),
                info.agent_address.to_string(),
                heard(info.cpus.to_string()),
                heard(memory),
                heard(info.accelerator.to_string()),
                heard(if info.encryption { "yes" } else { "no" }.to_owned()),
                heard(host.vms_on().to_string()),
                heard(info.version.clone()),
            ]
        });
        let header = [
            "name",
            "state",
            "agent",
            "cpus",
            "memory free",
            "accel",
            "encryption",
            "vms",
            "godwit",
        ];
        let needless = [
            "agent",
            "memory free",
            "vms",
            "cpus",
            "godwit",
            "encryption",
            "accel",
        ];
        self.fitting_table(&header, rows.collect(), &needless);
    }

    pub fn host(&self, host: &HostView) {
        let mut rows = info_rows(&host.info);
        rows.insert(1, ("state", host_state(host)));
        rows.push(("not heard for", format!("{} s", host.last_seen_s)));
        rows.push(("vms", vms_of(host)));
        self.pairs(&rows);
    }

    pub fn checks(&self, checks: &[Check]) {
        let rows = checks.iter().map(|check| {
            let status = match check.status {
                CheckStatus::Ok => "ok",
                CheckStatus::Note => "note",
                CheckStatus::Warning => "WARNING",
                CheckStatus::Failed => "FAILED",
            };
            vec![status.to_string(), check.name.clone(), check.found.clone()]
        });
        self.table(&["status", "check", "found"], rows.collect());
        let open: Vec<&Check> = checks
            .iter()
            .filter(|check| !check.remedy.is_empty())
            .collect();
        if !open.is_empty() {
            self.line("\nWhat to do:");
        }
        for check in open {
            let tone = if check.status == CheckStatus::Failed {
                Tone::Bad
            } else {
                Tone::Warn
            };
            let name = self.paint(plain::sentence(&check.name), tone);
            let remedy = plain::sentence(&check.remedy);
            self.line(format!("  {name}: {remedy}"));
        }
    }

    /// What a dry run found.
    pub fn preflight(&self, report: &PreflightReport) {
        for line in &report.passed {
            let tone = if line.starts_with("warning:") {
                Tone::Warn
            } else {
                Tone::Good
            };
            let line = plain::sentence(line);
            self.hanging(&format!("{} {line}", self.paint("ok     ", tone)), 8);
        }
        for refusal in &report.refusals {
            let refused = self.paint("refused", Tone::Bad);
            let why = plain::sentence(&refusal.message);
            self.hanging(&format!("{refused} {why}"), 8);
        }
        if let Some(prediction) = &report.prediction {
            self.prediction(prediction);
        }
        self.cannot_keep(&report.cannot_keep);
    }

    pub fn migrations(&self, reports: &[MigrationReport]) {
        let rows = reports.iter().map(|report| {
            vec![
                report.id.to_string(),
                report.vm.to_string(),
                report.from.to_string(),
                report.to.to_string(),
                state_of(report),
                format!("{:.1} s", report.total_s),
                match pause_ms(report) {
                    Some(ms) => format!("{ms:.1} ms"),
                    None => "-".into(),
                },
            ]
        });
        self.fitting_table(
            &["id", "vm", "from", "to", "state", "time", "switchover"],
            rows.collect(),
            &["from", "to", "switchover", "time"],
        );
    }
}

/// Columns that a table's column takes, with a space on each side.
fn widest(header: &[&str], rows: &[Vec<String>], column: usize) -> usize {
    let cells = rows.iter().filter_map(|row| row.get(column));
    let cells = cells.map(|cell| cell.chars().count());
    let name = header.get(column).map_or(0, |name| name.chars().count());
    cells.max().unwrap_or(0).max(name) + 2
}

/// Leaves out columns until a table fits into so much room.
fn fit<'a>(
    header: &[&'a str],
    mut rows: Vec<Vec<String>>,
    needless: &[&str],
    room: usize,
) -> (Vec<&'a str>, Vec<Vec<String>>) {
    let mut header = header.to_vec();
    for name in needless.iter().rev() {
        let columns = 0..header.len();
        let wide: usize = columns.map(|column| widest(&header, &rows, column)).sum();
        // The space before the first column is not printed.
        if wide <= room.saturating_add(1) {
            break;
        }
        let Some(column) = header.iter().position(|other| other == name) else {
            continue;
        };
        header.remove(column);
        for row in rows.iter_mut().filter(|row| row.len() > column) {
            row.remove(column);
        }
    }
    (header, rows)
}

/// A value's name as JSON has it.
pub fn kebab(value: &impl Serialize) -> String {
    match serde_json::to_value(value) {
        Ok(serde_json::Value::String(text)) => text,
        _ => String::new(),
    }
}

/// What a person must end.
fn is_alarming(state: VmState) -> bool {
    matches!(
        state,
        VmState::RunningTwice | VmState::InDoubt | VmState::DamagedRecord
    )
}

/// A VM's state at one host: one that moved away is off here and may run elsewhere.
fn state_here(vm: &HostVm) -> String {
    match (&vm.claim, vm.state) {
        (Claim::Moved { to, .. }, VmState::Stopped) => format!("moved to {to}"),
        (_, state) => state.to_string(),
    }
}

/// Orders a list so that what needs a person stands first.
fn urgency(state: VmState) -> u8 {
    match state {
        VmState::RunningTwice => 0,
        VmState::InDoubt | VmState::DamagedRecord => 1,
        _ => 2,
    }
}

/// A VM's state, and since when nothing newer is known.
fn state_since(vm: &VmView) -> String {
    match vm.heard_s {
        Some(seconds) => format!("{} ({seconds} s)", vm.state),
        None => vm.state.to_string(),
    }
}

/// The host that holds a VM; all, when there are several.
fn hosts_of(vm: &VmView) -> String {
    if vm.copies.is_empty() {
        return vm.host.as_ref().map_or("-".into(), ToString::to_string);
    }
    let copies: Vec<&str> = vm.copies.iter().map(|host| host.as_str()).collect();
    copies.join(" and ")
}

/// What a VM boots, what follows a crash, and as whom its QEMU runs.
fn boot_rows(spec: &VmSpec) -> Vec<(&'static str, String)> {
    let mut rows = vec![match (spec.kernel(), spec.disks.first()) {
        (None, Some(disk)) => ("boots from", disk.name.clone()),
        (kernel, _) => ("kernel", kernel.unwrap_or_default().to_owned()),
    }];
    if spec.has_variables() {
        rows.insert(0, ("firmware", spec.firmware.to_string()));
    }
    rows.extend(spec.initramfs.clone().map(|path| ("initramfs", path)));
    if !spec.cmdline.is_empty() {
        rows.push(("cmdline", spec.cmdline.clone()));
    }
    rows.push(("on crash", kebab(&spec.on_crash)));
    let common = || "the host's common user".to_owned();
    let uid = spec.uid.map_or_else(common, |uid| uid.to_string());
    rows.push(("uid", uid));
    rows
}

fn host_state(host: &HostView) -> String {
    match (host.standing, host.fenced) {
        (Standing::OldCopy, _) => return "old copy".into(),
        (Standing::SecondInstance, _) => return "second instance".into(),
        (_, true) => return "fenced".into(),
        _ => {}
    }
    match host.state {
        HostState::Connected if host.info.closing => "closed".into(),
        HostState::Connected if host.draining => "draining".into(),
        HostState::Connected => "connected".into(),
        HostState::Unreachable => "unreachable".into(),
    }
}

fn state_of(report: &MigrationReport) -> String {
    match report.outcome {
        Some(outcome) => kebab(&outcome),
        None => kebab(&report.phase),
    }
}

#[cfg(test)]
#[path = "output_tests.rs"]
pub mod tests;
