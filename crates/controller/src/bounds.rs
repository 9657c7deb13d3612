//! How much of what a host says is taken: no host fills this controller's memory, or anybody's screen.
//!
//! Pure. Sentences that are too long are cut. Refuses a whole answer that no agent gives: too many VMs, one of them twice,
//! or a description that no controller ever passed on.

use godwit_types::host::HostInfo;
use godwit_types::host_api::{HostVm, VMS_MAX};
use godwit_types::migration::{DiskToMove, LinkedTo, MigrationReport};
use godwit_types::site::{Instance, SiteTable, WholeSurvey};
use godwit_types::snapshots::PARENT_MARK_DIGITS;
use godwit_types::text::{SENTENCE_LEN_MAX, cut};
use godwit_types::vm::{DISKS_MAX, InvalidVm, VmSpec};
use godwit_types::{ApiError, HostName, VmName};
use std::collections::BTreeSet;

/// Most passes of a migration that are kept of its report.
const ITERATIONS_MAX: usize = 10_000;
/// Most iterations that are kept of a disk.
const DISK_ITERATIONS_MAX: usize = 64;
/// Most notes that are kept of a report, and most lines of a check.
const LINES_MAX: usize = 100;

/// Most disks of a VM that was described while nobody counted them.
const OLD_DISKS_MAX: usize = 256;

/// Most rows of VMs in a host's table: more do not fit into the 3 MiB that an agent keeps of it.
const ROWS_MAX: usize = 65_536;
/// Most hosts in a host's table, of each kind, and most that may hold one VM.
const HOSTS_MAX: usize = 4096;
/// Most VMs that nobody had used here and that one host may bring by its answers to polls, since this start.
pub const NEW_NAMES_MAX: usize = 1024;
/// Longest id of a machine or of a boot, bytes: each goes to every host with the site's table.
const ID_LEN_MAX: usize = 128;
/// Longest version, model or bridge, bytes.
const WORD_LEN_MAX: usize = 512;
/// Longest path of an image, bytes.
const PATH_LEN_MAX: usize = 4096;
/// Most machine types, CPU models, port groups or addresses of a host.
const LISTED_MAX: usize = 4096;

/// An answer that is not taken, and why.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "host {host} says what no agent says ({what}), so nothing of it is taken: it is broken or lies; see its log, or power it off and run 'godwit host remove {host} --confirm-unreachable'"
)]
pub struct NotTaken {
    pub host: HostName,
    pub what: String,
}

fn not_taken(host: &HostName, what: String) -> NotTaken {
    NotTaken {
        host: host.clone(),
        what,
    }
}

/// The disks that go along with a VM, as its host measures them: no others than the VM has.
pub fn disks(spec: &VmSpec, said: Vec<DiskToMove>) -> Vec<DiskToMove> {
    let along = spec.disks.iter().filter(|disk| disk.goes_along());
    let measured = along.filter_map(|disk| said.iter().find(|said| said.name == disk.name));
    let mut measured: Vec<DiskToMove> = measured.cloned().collect();
    for disk in &mut measured {
        // Without it such a disk is refused by its VM process.
        disk.linked = disk.linked.take().filter(names_an_image);
    }
    measured
}

fn names_an_image(linked: &LinkedTo) -> bool {
    let is_path = linked.path.starts_with('/') && linked.path.len() <= PATH_LEN_MAX;
    let is_plain = !linked.path.chars().any(char::is_control);
    is_path && is_plain && linked.id.len() == PARENT_MARK_DIGITS
}

/// A host's list of its VMs.
pub fn vms(host: &HostName, mut vms: Vec<HostVm>) -> Result<Vec<HostVm>, NotTaken> {
    let names = vms.iter().map(|vm| &vm.spec.name);
    must_be_distinct(host, names, vms.len())?;
    for vm in &mut vms {
        if let Err(error) = check(&vm.spec) {
            let what = format!("VM {}: {error}", vm.spec.name);
            return Err(not_taken(host, shortened(what)));
        }
        if vm.spec.disks.len() > DISKS_MAX {
            vm.note = Some(too_many_disks(vm));
        }
        vm.note.iter_mut().for_each(sentence);
        activities(vm);
    }
    Ok(vms)
}

/// What disks do: of each that the VM has, once.
fn activities(vm: &mut HostVm) {
    let mut names: Vec<&str> = vm
        .spec
        .disks
        .iter()
        .map(|disk| disk.name.as_str())
        .collect();
    vm.disks.retain(|does| {
        let place = names.iter().position(|name| *name == does.disk);
        place.map(|place| names.swap_remove(place)).is_some()
    });
}

/// Refuses a description that no controller ever passed on. One with more disks than a VM may have now was once passed on:
/// it starts nowhere, and is no reason to hear nothing of its host's other VMs.
fn check(spec: &VmSpec) -> Result<(), InvalidVm> {
    if spec.disks.len() <= DISKS_MAX || spec.disks.len() > OLD_DISKS_MAX {
        return spec.check_bounds();
    }
    let mut part = spec.clone();
    let more = part.disks.split_off(DISKS_MAX);
    part.check()?;
    more.chunks(DISKS_MAX).try_for_each(|disks| {
        part.disks = disks.to_vec();
        part.check()
    })
}

fn too_many_disks(vm: &HostVm) -> String {
    let name = &vm.spec.name;
    let way = format!(
        "it has {} disks and starts nowhere until it has at most {DISKS_MAX}: write a description with fewer and run 'godwit vm edit {name} FILE'",
        vm.spec.disks.len()
    );
    match &vm.note {
        Some(note) => format!("{way}; {note}"),
        None => way,
    }
}

/// What a host says of itself. It bears the name under which it was enrolled, whatever it calls itself.
pub fn info(host: &HostName, mut info: HostInfo) -> Result<HostInfo, NotTaken> {
    instance(host, &info.instance)?;
    if let Some(length) = longest_word(&info).filter(|length| *length > WORD_LEN_MAX) {
        let what = format!("a word of {length} bytes, at most {WORD_LEN_MAX}");
        return Err(not_taken(host, what));
    }
    let under = info.cpu_models_under.values().map(Vec::len);
    let most_models = under.max().unwrap_or(0);
    let counts = [
        ("machine types", info.machine_types.len(), LISTED_MAX),
        ("machine aliases", info.machine_aliases.len(), LISTED_MAX),
        ("CPU models", info.cpu_models.len(), LISTED_MAX),
        ("CPU models under an accelerator", most_models, LISTED_MAX),
        ("port groups", info.port_groups.len(), LISTED_MAX),
        ("addresses", info.migration_addresses.len(), LISTED_MAX),
        ("damaged records", info.unread.len(), VMS_MAX),
    ];
    if let Some((what, count, most)) = counts.into_iter().find(|(_, count, most)| count > most) {
        return Err(not_taken(host, format!("{count} {what}, at most {most}")));
    }
    info.unread.values_mut().for_each(sentence);
    if let Some(certificate) = &mut info.certificate
        && let Some(problem) = &mut certificate.problem
    {
        sentence(problem);
    }
    info.name = host.clone();
    Ok(info)
}

fn longest_word(info: &HostInfo) -> Option<usize> {
    let words = [&info.version, &info.kernel, &info.qemu, &info.boot_id];
    let under = info.cpu_models_under.values().flatten();
    let certificate = info.certificate.iter().map(|said| &said.serial);
    let words = words.into_iter().chain(certificate);
    let models = info.machine_types.iter().chain(&info.cpu_models);
    let models = models.chain(under);
    let aliases = info.machine_aliases.iter();
    let words = words.chain(models);
    let words = words.chain(aliases.flat_map(|(alias, name)| [alias, name]));
    let words = words.chain(info.port_groups.values());
    words.map(String::len).max()
}

/// Which of its lives a host says that it is: every other host is told of it.
pub fn instance(host: &HostName, instance: &Instance) -> Result<(), NotTaken> {
    let ids = [
        ("machine id", &instance.machine_id),
        ("boot id", &instance.boot_id),
    ];
    match ids.into_iter().find(|(_, id)| id.len() > ID_LEN_MAX) {
        Some((what, id)) => {
            let what = format!("a {what} of {} bytes, at most {ID_LEN_MAX}", id.len());
            Err(not_taken(host, what))
        }
        None => Ok(()),
    }
}

/// All that a host has on record.
pub fn whole(host: &HostName, whole: WholeSurvey) -> Result<WholeSurvey, NotTaken> {
    instance(host, &whole.instance)?;
    let names = whole.records.iter().map(|record| &record.vm);
    must_be_distinct(host, names, whole.records.len())?;
    if whole.unread.len() > VMS_MAX {
        let what = format!("more than {VMS_MAX} damaged records");
        return Err(not_taken(host, what));
    }
    table(host, &whole.table)?;
    Ok(whole)
}

/// A host's table of the site.
fn table(host: &HostName, table: &SiteTable) -> Result<(), NotTaken> {
    if table.vms.len() > ROWS_MAX {
        let what = format!("{} VMs in its table, at most {ROWS_MAX}", table.vms.len());
        return Err(not_taken(host, what));
    }
    let mut machines = table.hosts.iter().map(|site| site.machine_id.len());
    if let Some(long) = machines.find(|long| *long > ID_LEN_MAX) {
        let what = format!("a machine id of {long} bytes in its table, at most {ID_LEN_MAX}");
        return Err(not_taken(host, what));
    }
    let hosts = table.hosts.len().max(table.removed.len());
    if hosts > HOSTS_MAX {
        let what = format!("{hosts} hosts in its table, at most {HOSTS_MAX}");
        return Err(not_taken(host, what));
    }
    let crowded = table.vms.iter();
    let crowded = crowded.filter(|(_, row)| row.may_hold.len() > HOSTS_MAX);
    match crowded.map(|(vm, row)| (vm, row.may_hold.len())).next() {
        Some((vm, named)) => {
            let what = format!("{named} hosts that may hold VM {vm}, at most {HOSTS_MAX}");
            Err(not_taken(host, what))
        }
        None => Ok(()),
    }
}

/// Names that this host brings and nobody used here before: `brought` is how many it brought since this start.
pub fn new_names(host: &HostName, brought: usize) -> Result<(), NotTaken> {
    match brought > NEW_NAMES_MAX {
        true => {
            let what = format!("that it may hold more than {NEW_NAMES_MAX} VMs that are new here");
            Err(not_taken(host, what))
        }
        false => Ok(()),
    }
}

/// Names that this host brings with its table and its records in a takeover, and that nobody used here before: `brought`
/// is how many it brought so since this start. A lost database may have known many.
pub fn names_of_a_takeover(host: &HostName, brought: usize) -> Result<(), NotTaken> {
    match brought > VMS_MAX {
        true => Err(not_taken(host, format!("more than {VMS_MAX} new VMs"))),
        false => Ok(()),
    }
}

fn must_be_distinct<'a>(
    host: &HostName,
    names: impl Iterator<Item = &'a VmName>,
    count: usize,
) -> Result<(), NotTaken> {
    if count > VMS_MAX {
        return Err(not_taken(host, format!("{count} VMs, at most {VMS_MAX}")));
    }
    let mut seen = BTreeSet::new();
    for name in names {
        if !seen.insert(name) {
            return Err(not_taken(host, format!("VM {name} twice")));
        }
    }
    Ok(())
}

/// A host's report, cut down to what the controller keeps of it.
pub fn report(mut report: MigrationReport) -> MigrationReport {
    report.iterations.truncate(ITERATIONS_MAX);
    report.disk_iterations.truncate(DISKS_MAX);
    for disk in &mut report.disk_iterations {
        sentence(&mut disk.disk);
        disk.iterations.truncate(DISK_ITERATIONS_MAX);
    }
    lines(&mut report.notes);
    report.events.truncate(LINES_MAX);
    for event in &mut report.events {
        sentence(&mut event.message);
    }
    report.reason.iter_mut().for_each(sentence);
    if let Some(prediction) = &mut report.prediction {
        sentence(&mut prediction.basis);
    }
    report
}

/// Lines that a host says of a check.
pub fn lines(lines: &mut Vec<String>) {
    lines.truncate(LINES_MAX);
    lines.iter_mut().for_each(sentence);
}

/// Refusals that a host says.
pub fn refusals(refusals: Vec<ApiError>) -> Vec<ApiError> {
    let taken = refusals.into_iter().take(LINES_MAX);
    taken.map(ApiError::bounded).collect()
}

fn sentence(text: &mut String) {
    cut(text, SENTENCE_LEN_MAX);
}

fn shortened(mut text: String) -> String {
    cut(&mut text, 512);
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_types::disk_activity::DiskActivity;
    use godwit_types::site::SiteHost;
    use godwit_types::site::{Instance, SiteVm};
    use godwit_types::vm::DiskSpec;

    fn told(table: SiteTable) -> Result<WholeSurvey, NotTaken> {
        let survey = WholeSurvey {
            instance: Instance::default(),
            table,
            records: Vec::new(),
            unread: BTreeSet::default(),
        };
        whole(&HostName::new("x").unwrap(), survey)
    }

    fn row(hosts: usize) -> SiteVm {
        let named = (0..hosts).map(|y| HostName::new(format!("y{y}")).unwrap());
        SiteVm {
            holder: None,
            held: Default::default(),
            may_hold: named.collect(),
            deleted: false,
            stamp: Default::default(),
        }
    }

    fn names(count: usize) -> impl Iterator<Item = VmName> {
        (0..count).map(|n| VmName::new(format!("v{n}")).unwrap())
    }

    #[test]
    fn what_a_disk_does_is_taken_once_and_of_disks_that_the_vm_has() {
        let mut spec = VmSpec::placeholder(&VmName::new("web").unwrap());
        spec.disks = ["root", "data"]
            .map(|name| DiskSpec::new(name, format!("/{name}")))
            .into();
        let does = |name: &str| DiskActivity {
            disk: name.into(),
            ..DiskActivity::default()
        };
        let all = ["root", "swap", "root", "data"].map(does);
        let said = serde_json::json!({
            "spec": spec, "state": "running", "generation": 1, "claim": {"claim": "no"},
            "migration": null, "accelerator": null, "vm_process_pid": null, "qemu_pid": null, "note": null,
            "disks": all,
        });
        let said = serde_json::from_value(said).unwrap();
        let taken = vms(&HostName::new("a").unwrap(), vec![said]).unwrap();
        assert_eq!(taken[0].disks, ["root", "data"].map(does));
    }

    #[test]
    fn a_table_that_no_agent_keeps_is_not_read_in_a_takeover() {
        let of = |count| SiteTable {
            vms: names(count).map(|vm| (vm, row(0))).collect(),
            ..SiteTable::default()
        };
        told(of(40_000)).unwrap();
        told(of(ROWS_MAX + 1)).unwrap_err();
        let crowded = SiteTable {
            vms: names(1).map(|vm| (vm, row(HOSTS_MAX + 1))).collect(),
            ..SiteTable::default()
        };
        let error = told(crowded).unwrap_err().to_string();
        assert!(error.contains("that may hold VM v0"), "{error}");
        let removed = SiteTable {
            removed: row(HOSTS_MAX + 1).may_hold,
            ..SiteTable::default()
        };
        told(removed).unwrap_err();
        let machine = |long: usize| SiteTable {
            hosts: vec![SiteHost {
                name: HostName::new("b").unwrap(),
                address: ([192, 0, 2, 1], 1).into(),
                serial: String::new(),
                counter: 1,
                machine_id: "m".repeat(long),
            }],
            ..SiteTable::default()
        };
        told(machine(ID_LEN_MAX)).unwrap();
        told(machine(ID_LEN_MAX + 1)).unwrap_err();
    }
}
