//! What a monitoring system reads: this controller's facts in the text format of Prometheus, version 0.0.4.
//!
//! Owns the sums of the migrations that ended since this controller started. Asks no host: a scrape costs what the lists
//! cost, and tells what hosts said at the last poll. Refuses: figures of a host that does not answer as if they were of now.

mod page;

use crate::app::App;
use crate::site;
use crate::state::{HostEntry, State};
use godwit_rpc::pki::now_unix_s;
use godwit_types::HostName;
use godwit_types::control_api::VmView;
use godwit_types::disk_activity::DiskWork;
use godwit_types::host::HostInfo;
use godwit_types::migration::{MigrationReport, Outcome};
use godwit_types::version::VERSION;
use page::{Kind, Page, Sample, sample};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The content type of the text.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// No migration counts for more seconds than this, whatever its host said.
const SECONDS_MAX: f64 = 1e9;
/// No migration counts for more bytes than this: a tebibyte of memory, sent a thousand times.
const BYTES_MAX: u64 = 1 << 50;

const OUTCOMES: [Outcome; 3] = [Outcome::Completed, Outcome::Cancelled, Outcome::Failed];

/// The sums of one outcome.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Sums {
    count: u64,
    total_s: f64,
    downtime_s: f64,
    bytes: u64,
}

/// The migrations that ended since this controller started, in the order of [`OUTCOMES`].
#[derive(Debug, Default)]
pub struct Ended(Mutex<[Sums; OUTCOMES.len()]>);

impl Ended {
    fn sums(&self) -> MutexGuard<'_, [Sums; OUTCOMES.len()]> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a migration whose end was stored.
    pub fn count(&self, report: &MigrationReport) {
        let place = |outcome| OUTCOMES.iter().position(|known| *known == outcome);
        let mut sums = self.sums();
        let Some(sums) = report.outcome.and_then(place).and_then(|i| sums.get_mut(i)) else {
            return;
        };
        // These figures are a host's own words; what is no number counts as 0.
        let seconds = |said: f64| match said.is_nan() {
            true => 0.0,
            false => said.clamp(0.0, SECONDS_MAX),
        };
        sums.count += 1;
        sums.total_s += seconds(report.total_s);
        sums.downtime_s += seconds(report.switchover_ms / 1000.0);
        sums.bytes = sums
            .bytes
            .saturating_add(report.bytes_on_wire.min(BYTES_MAX));
    }
}

/// Everything that is told, as of now.
pub fn text(app: &App) -> String {
    let now = now_unix_s();
    let mut page = Page::default();
    controller(&mut page, app, now);
    hosts(&mut page, app, now);
    let views = app.state().vm_views(now);
    vms(&mut page, &views);
    disks(&mut page, &views);
    under_way(&mut page, &app.all_live());
    let sums = *app.ended.sums();
    ended(&mut page, &sums);
    page.into_text()
}

fn controller(page: &mut Page, app: &App, now: i64) {
    let site = site::view(app);
    page.family(
        "godwit_build_info",
        Kind::Gauge,
        "The version of this controller; always 1.",
        [sample(&[("version", VERSION)], 1.0)],
    );
    page.one(
        "godwit_in_charge",
        "Whether this controller may start and move VMs (1), or works on an old copy of its database or was replaced (0).",
        f64::from(site.in_charge),
    );
    page.one(
        "godwit_alarms",
        "What a person must know: the number of sentences that 'godwit site show' lists.",
        site.sentences.len() as f64,
    );
    page.one(
        "godwit_controller_certificate_remaining_seconds",
        "Until the controller's own certificate ends; negative once it has.",
        left(app.identity.holder().dates().ends_unix_s, now),
    );
    page.one(
        "godwit_authority_certificate_remaining_seconds",
        "Until the certificate of the site's authority ends; negative once it has.",
        left(app.authority.dates().ends_unix_s, now),
    );
}

fn left(ends_unix_s: i64, now: i64) -> f64 {
    ends_unix_s.saturating_sub(now) as f64
}

fn mib(said: u64) -> f64 {
    said as f64 * f64::from(1 << 20)
}

fn hosts(page: &mut Page, app: &App, now: i64) {
    let state = app.state();
    let mut of_each = |name, help, value: &dyn Fn(&HostName, &HostEntry) -> Option<f64>| {
        let samples = state.hosts.iter().filter_map(|(host, entry)| {
            Some(sample(&[("host", host.as_str())], value(host, entry)?))
        });
        page.family(name, Kind::Gauge, help, samples);
    };
    let yes = |is: bool| Some(f64::from(is));
    of_each(
        "godwit_host_up",
        "Whether the host's agent answers.",
        &|_, entry| yes(entry.is_connected()),
    );
    of_each(
        "godwit_host_silent_seconds",
        "Since the host was heard last; 0 while it answers.",
        &|_, entry| Some(entry.silent_s(now).unwrap_or(0) as f64),
    );
    of_each(
        "godwit_host_draining",
        "Whether the host is being emptied, or was, and takes no VMs.",
        &|host, _| yes(app.drains.is_draining(host)),
    );
    of_each(
        "godwit_host_fenced",
        "Whether a person said that the host is off.",
        &|host, _| yes(state.book.is_fenced(host)),
    );
    of_each(
        "godwit_host_memory_total_bytes",
        "Memory of a host that answers.",
        &|_, entry| Some(mib(answering(entry)?.memory_total_mib)),
    );
    of_each(
        "godwit_host_memory_free_bytes",
        "Memory that a new guest could have on a host that answers.",
        &|_, entry| Some(mib(answering(entry)?.memory_free_mib)),
    );
    of_each(
        "godwit_host_cpus",
        "Cores of a host that answers.",
        &|_, entry| Some(f64::from(answering(entry)?.cpus)),
    );
    of_each(
        "godwit_host_certificate_remaining_seconds",
        "Until the certificate ends that the host named last; negative once it has.",
        &|_, entry| {
            let certificate = entry.info.as_ref()?.certificate.as_ref()?;
            Some(left(certificate.dates.ends_unix_s, now))
        },
    );
    versions(page, &state);
}

fn versions(page: &mut Page, state: &State) {
    let samples = state.hosts.iter().filter_map(|(host, entry)| {
        let version = answering(entry)?.version.as_str();
        Some(sample(
            &[("host", host.as_str()), ("version", version)],
            1.0,
        ))
    });
    page.family(
        "godwit_host_info",
        Kind::Gauge,
        "The version of the agent of a host that answers; always 1.",
        samples,
    );
}

/// What a host says of itself, while it answers.
fn answering(entry: &HostEntry) -> Option<&HostInfo> {
    entry.info.as_ref().filter(|_| entry.is_connected())
}

fn vms(page: &mut Page, views: &[VmView]) {
    let of = |view: &VmView| {
        let host = view.host.as_ref().map_or("", HostName::as_str).to_owned();
        [("vm", view.spec.name.to_string()), ("host", host)]
    };
    page.family(
        "godwit_vm_state",
        Kind::Gauge,
        "The state of each VM and the host that holds it, as 'godwit vm list' shows them; always 1.",
        views.iter().map(|view| {
            let mut labels = of(view).to_vec();
            labels.push(("state", view.state.to_string()));
            Sample::new(labels, 1.0)
        }),
    );
    page.family(
        "godwit_vm_memory_bytes",
        Kind::Gauge,
        "Memory of each VM as it is described, whether or not it is on.",
        views
            .iter()
            .map(|view| Sample::new(of(view).to_vec(), mib(view.spec.memory_mib))),
    );
    page.family(
        "godwit_vm_vcpus",
        Kind::Gauge,
        "Virtual CPUs of each VM as it is described, whether or not it is on.",
        views
            .iter()
            .map(|view| Sample::new(of(view).to_vec(), f64::from(view.spec.vcpus))),
    );
}

/// What hosts that answer say of their VMs' disks.
fn disks(page: &mut Page, views: &[VmView]) {
    let mut of_each = |name, help, value: &dyn Fn(&DiskWork) -> f64| {
        let disks = views
            .iter()
            .flat_map(|view| view.disks.iter().map(move |disk| (view, disk)));
        let samples = disks.flat_map(|(view, disk)| {
            disk.kinds().map(|(kind, work)| {
                let labels = [
                    ("vm", view.spec.name.as_str()),
                    ("disk", disk.disk.as_str()),
                    ("kind", kind),
                ];
                sample(&labels, value(work))
            })
        });
        page.family(name, Kind::Counter, help, samples);
    };
    of_each(
        "godwit_vm_disk_requests_total",
        "Requests of a disk that ended since its VM process began to serve it.",
        &|work| work.requests as f64,
    );
    of_each(
        "godwit_vm_disk_bytes_total",
        "What those requests read, wrote or erased.",
        &|work| work.bytes as f64,
    );
    of_each(
        "godwit_vm_disk_seconds_total",
        "How long those requests took, all together.",
        &|work| work.seconds.max(0.0),
    );
    of_each(
        "godwit_vm_disk_failed_total",
        "Those requests that failed.",
        &|work| work.failed as f64,
    );
}

fn under_way(page: &mut Page, live: &[MigrationReport]) {
    page.one(
        "godwit_migrations_running",
        "Migrations that have not ended, those in doubt included.",
        live.len() as f64,
    );
    let doubt = live
        .iter()
        .filter(|report| report.outcome == Some(Outcome::InDoubt));
    page.one(
        "godwit_migrations_in_doubt",
        "Migrations of which only the host that does not answer knows who runs the VM.",
        doubt.count() as f64,
    );
    let mut of_each = |name, help, value: &dyn Fn(&MigrationReport) -> f64| {
        let samples = live.iter().map(|report| {
            let labels = [
                ("vm", report.vm.as_str()),
                ("from", report.from.as_str()),
                ("to", report.to.as_str()),
            ];
            sample(&labels, value(report))
        });
        page.family(name, Kind::Gauge, help, samples);
    };
    of_each(
        "godwit_migration_done_ratio",
        "How much has gone of what has to go, from 0 to 1, of a migration that has not ended.",
        &|report| report.done_percent / 100.0,
    );
    of_each(
        "godwit_migration_wire_bytes_per_second",
        "What the data channels of a migration that has not ended carry.",
        &|report| report.wire_bytes_per_s,
    );
    of_each(
        "godwit_migration_wire_bytes",
        "What the data channels of a migration that has not ended have carried.",
        &|report| report.bytes_on_wire as f64,
    );
    of_each(
        "godwit_migration_remaining_bytes",
        "Guest memory that is still to be sent of a migration that has not ended.",
        &|report| report.remaining_bytes as f64,
    );
}

fn ended(page: &mut Page, sums: &[Sums]) {
    let mut of_each = |name, help, value: &dyn Fn(&Sums) -> f64| {
        let samples = OUTCOMES.iter().zip(sums).map(|(outcome, sums)| {
            Sample::new(vec![("outcome", outcome.to_string())], value(sums))
        });
        page.family(name, Kind::Counter, help, samples);
    };
    of_each(
        "godwit_migrations_ended_total",
        "Migrations that ended since this controller started.",
        &|sums| sums.count as f64,
    );
    of_each(
        "godwit_migrations_duration_seconds_total",
        "How long the migrations took that ended since this controller started.",
        &|sums| sums.total_s,
    );
    of_each(
        "godwit_migrations_downtime_seconds_total",
        "How long no vCPU ran in the switchovers of the migrations that ended since this controller started.",
        &|sums| sums.downtime_s,
    );
    of_each(
        "godwit_migrations_wire_bytes_total",
        "What the data channels carried in the migrations that ended since this controller started.",
        &|sums| sums.bytes as f64,
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_types::migration::Side;

    /// A report as a host could have sent it.
    fn report(outcome: Outcome, total_s: f64, switchover_ms: f64) -> MigrationReport {
        let spec = serde_json::json!({
            "id": "m1", "vm": "web", "generation": 2,
            "source": {"host": "a", "address": "10.0.0.1:1"},
            "destination": {"host": "b", "address": "10.0.0.2:1"},
            "secret": {"key": "", "nonce": ""}, "cipher": "none", "max_downtime_ms": 50,
            "deadline_s": null, "max_bandwidth_mbit_per_s": null, "source_addresses": [],
        });
        let spec = serde_json::from_value(spec).unwrap();
        let mut report = MigrationReport::begun(&spec, Side::Source, 64, 0);
        (report.total_s, report.switchover_ms) = (total_s, switchover_ms);
        report.outcome = Some(outcome);
        report.bytes_on_wire = u64::MAX;
        report
    }

    #[test]
    fn what_each_disk_did_is_told_by_kind() {
        let work = |requests| serde_json::json!({"requests": requests, "bytes": 512, "failed": 1, "seconds": 0.25});
        let spec = godwit_types::VmSpec::placeholder(&godwit_types::VmName::new("web").unwrap());
        let view: VmView = serde_json::from_value(serde_json::json!({
            "spec": spec, "state": "running", "host": "a", "generation": 1,
            "disks": [{
                "disk": "root", "reads": work(2), "writes": work(3), "flushes": work(4), "erasures": work(5),
                "rate": {"reads": 0.0, "read_bytes": 0.0, "writes": 0.0, "written_bytes": 0.0},
            }],
        }))
        .unwrap();
        let mut page = Page::default();
        disks(&mut page, &[view]);
        let text = page.into_text();
        for (kind, requests) in [("read", 2), ("write", 3), ("flush", 4), ("erase", 5)] {
            let of = format!("{{vm=\"web\",disk=\"root\",kind=\"{kind}\"}}");
            for (name, value) in [
                ("requests", requests.to_string()),
                ("bytes", "512".to_owned()),
                ("failed", "1".to_owned()),
                ("seconds", "0.25".to_owned()),
            ] {
                let line = format!("godwit_vm_disk_{name}_total{of} {value}\n");
                assert!(text.contains(&line), "{line} is not in {text}");
            }
        }
    }

    #[test]
    fn sums_only_rise_whatever_a_host_says() {
        let sums = Ended::default();
        sums.count(&report(Outcome::Completed, 2.0, 250.0));
        let first = sums.sums()[0];
        assert_eq!(
            (first.count, first.total_s, first.downtime_s),
            (1, 2.0, 0.25)
        );
        for lie in [f64::NAN, f64::NEG_INFINITY, -5.0] {
            sums.count(&report(Outcome::Completed, lie, lie));
        }
        sums.count(&report(Outcome::Completed, f64::MAX, f64::INFINITY));
        let then = sums.sums()[0];
        assert_eq!(then.count, 5);
        assert_eq!(
            (then.total_s, then.downtime_s, then.bytes),
            (2.0 + SECONDS_MAX, 0.25 + SECONDS_MAX, 5 * BYTES_MAX)
        );
        sums.count(&report(Outcome::InDoubt, 1.0, 1.0));
        assert_eq!(sums.sums()[1..], [Sums::default(); 2]);
    }
}
