//! Tables and lines for predictions, drains and loads.
//!
//! Part of [`Output`]. Owns nothing. Refuses: figures without what they rest on.

use crate::figures::{guest_speed, rate, seconds};
use crate::output::{Output, kebab};
use crate::plain;
use godwit_types::ApiError;
use godwit_types::control_api::HostView;
use godwit_types::drain::{DrainState, DrainStep, DrainView, DrainVm};
use godwit_types::forecast::{CannotKeep, Prediction};
use godwit_types::load::{HostLoad, HostTop, MigrationLoad};
use godwit_types::migration::Side;
use godwit_types::text::listed;

impl Output {
    /// What a migration is expected to be.
    pub fn prediction(&self, prediction: &Prediction) {
        self.line("");
        self.pairs(&[
            ("expected time", seconds(prediction.total_s)),
            (
                "expected pause",
                format!("{:.0} ms", prediction.downtime_ms),
            ),
            ("guest speed", guest_speed(prediction.guest_speed_percent)),
            ("throughput", rate(1e9 * prediction.throughput_gb_per_s)),
            (
                "guest dirties",
                format!("{:.1} MiB/s", prediction.dirty_mib_per_s),
            ),
            ("basis", prediction.basis.clone()),
        ]);
    }

    /// Targets that cannot be met.
    pub fn cannot_keep(&self, broken: &[CannotKeep]) {
        for one in broken {
            self.line(format!(
                "CANNOT MEET TARGET {}: {}",
                kebab(&one.promise),
                plain::sentence(&one.message)
            ));
        }
    }

    /// The emptying of a host.
    pub fn drain(&self, view: &DrainView) {
        self.line(drain_headline(view));
        if !view.plan.is_empty() && view.state != DrainState::Done {
            self.line(format!("Plan: {}.", plain::sentence(&view.plan)));
        }
        if view.vms.is_empty() {
            return;
        }
        self.line("");
        let rows = view.vms.iter().map(|vm| {
            vec![
                vm.vm.to_string(),
                kebab(&vm.step),
                vm.to.as_ref().map_or("-".into(), ToString::to_string),
                format!("{} MiB", vm.memory_mib),
                expected(vm),
                vm.migration
                    .as_ref()
                    .map_or("-".into(), ToString::to_string),
            ]
        });
        self.fitting_table(
            &["vm", "step", "to", "memory", "expected", "migration"],
            rows.collect(),
            &["to", "expected", "migration", "memory"],
        );
        for vm in view.vms.iter().filter(|vm| !vm.reasons.is_empty()) {
            self.line("");
            let verb = match vm.step {
                DrainStep::CannotMove => "cannot move",
                _ => "did not move at once",
            };
            self.line(format!("{} {verb}:", vm.vm));
            vm.reasons
                .iter()
                .for_each(|reason| self.line(reason_line(reason)));
        }
    }

    /// What hosts are busy with.
    pub fn top(&self, tops: &[HostTop]) {
        let rows = tops.iter().map(|top| match &top.load {
            Some(load) => host_row(load, top.draining),
            None => {
                let mut row = vec![top.host.to_string(), "unreachable".into()];
                row.resize(8, "-".into());
                row
            }
        });
        self.fitting_table(
            &[
                "host",
                "state",
                "cpus in use",
                "memory free",
                "interface",
                "in",
                "out",
                "speed",
            ],
            rows.collect(),
            &[
                "state",
                "out",
                "in",
                "interface",
                "memory free",
                "cpus in use",
                "speed",
            ],
        );
        let loads: Vec<&HostLoad> = tops.iter().filter_map(|top| top.load.as_ref()).collect();
        for load in &loads {
            for link in load.interfaces.iter().skip(1) {
                self.line(format!(
                    "{}: also {} in {} out {}",
                    load.host,
                    link.name,
                    rate(link.received_bytes_per_s),
                    rate(link.sent_bytes_per_s)
                ));
            }
        }
        self.line("");
        self.moves(&loads);
    }

    /// The migrations that hosts take part in, each side on a row of its own.
    fn moves(&self, loads: &[&HostLoad]) {
        let rows: Vec<Vec<String>> = loads
            .iter()
            .flat_map(|load| load.migrations.iter().map(|moving| move_row(load, moving)))
            .collect();
        if rows.is_empty() {
            self.line("No migration is under way.");
            return;
        }
        self.fitting_table(
            &[
                "migration",
                "vm",
                "host",
                "side",
                "phase",
                "done",
                "rate",
                "streams",
                "cpu",
                "busiest thread",
                "qemu",
                "guest",
                "left",
            ],
            rows,
            &[
                "left",
                "phase",
                "side",
                "guest",
                "migration",
                "cpu",
                "streams",
                "qemu",
                "busiest thread",
            ],
        );
    }
}

/// How far a drain is; what matters most comes first.
pub fn drain_parts(view: &DrainView) -> Vec<String> {
    let count = |step| view.vms.iter().filter(|vm| vm.step == step).count();
    let mut parts = vec![
        format!("{} moved", count(DrainStep::Moved)),
        format!("{} moving", count(DrainStep::Moving)),
        format!("{} waiting", count(DrainStep::Waiting)),
    ];
    let staying = count(DrainStep::CannotMove);
    if staying > 0 {
        parts.push(format!("{staying} cannot move"));
    }
    if let Some(eta_s) = view.eta_s.filter(|eta_s| *eta_s > 0.0) {
        parts.push(format!("about {} left", seconds(eta_s)));
    }
    parts
}

fn drain_headline(view: &DrainView) -> String {
    let host = &view.host;
    let staying = view.staying().count();
    let stay = match staying {
        0 => String::new(),
        1 => "; 1 VM cannot move and stays as it is: do what its reason says, then drain again"
            .to_owned(),
        count => format!(
            "; {count} VMs cannot move and stay as they are: do what their reasons say, then drain again"
        ),
    };
    match view.state {
        DrainState::Planned => {
            let eta = view
                .eta_s
                .map_or_else(String::new, |eta_s| format!(" in about {}", seconds(eta_s)));
            let moving = view.vms.iter().filter(|vm| vm.step == DrainStep::Waiting);
            format!(
                "Host {host} would be emptied of {}{eta}{stay}",
                vms(moving.count())
            )
        }
        DrainState::Draining => format!("Host {host}: {}", drain_parts(view).join(", ")),
        DrainState::Done => format!(
            "Host {host}: {} moved, nothing is left to move{stay}; it takes no VMs until 'godwit host undrain {host}'",
            vms(view
                .vms
                .iter()
                .filter(|vm| vm.step == DrainStep::Moved)
                .count())
        ),
        DrainState::Stopped => {
            format!("Host {host} is not emptied any further and takes VMs again")
        }
    }
}

/// The VMs that a host holds, those that are off marked.
pub fn vms_of(host: &HostView) -> String {
    listed(host.vms.iter().map(|vm| match host.vms_off.contains(vm) {
        true => format!("{vm} (off)"),
        false => vm.to_string(),
    }))
}

fn vms(count: usize) -> String {
    match count {
        1 => "1 VM".to_owned(),
        count => format!("{count} VMs"),
    }
}

fn expected(vm: &DrainVm) -> String {
    match (&vm.prediction, vm.percent) {
        (_, Some(percent)) => format!("{percent:.0} % done"),
        (Some(prediction), None) => seconds(prediction.total_s),
        (None, None) => "-".into(),
    }
}

fn reason_line(reason: &ApiError) -> String {
    format!("  - {}", plain::sentence(&reason.message))
}

fn host_row(load: &HostLoad, draining: bool) -> Vec<String> {
    let link = load.interfaces.first();
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".into());
    vec![
        load.host.to_string(),
        if draining { "draining" } else { "connected" }.into(),
        format!("{:.0} % of {}", load.cpu_percent, load.cpus),
        format!("{} of {} MiB", load.memory_free_mib, load.memory_total_mib),
        or_dash(link.map(|link| link.name.clone())),
        or_dash(link.map(|link| rate(link.received_bytes_per_s))),
        or_dash(link.map(|link| rate(link.sent_bytes_per_s))),
        or_dash(link.and_then(|link| Some(format!("{} Mb/s", link.speed_mbit_per_s?)))),
    ]
}

fn move_row(load: &HostLoad, moving: &MigrationLoad) -> Vec<String> {
    let source = moving.side == Side::Source;
    let at_source = |text: String| if source { text } else { "-".into() };
    vec![
        moving.id.to_string(),
        moving.vm.to_string(),
        load.host.to_string(),
        kebab(&moving.side),
        kebab(&moving.phase),
        at_source(format!("{:.0} %", moving.percent)),
        rate(moving.bytes_per_s),
        moving.streams.to_string(),
        format!("{:.0} %", moving.cpu_percent),
        format!(
            "{} {:.0} %",
            moving.busiest_thread, moving.busiest_thread_percent
        ),
        format!("{:.0} %", moving.hypervisor_cpu_percent),
        at_source(guest_speed(moving.guest_speed_percent)),
        moving.eta_s.map_or("-".into(), seconds),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_types::drain::DrainRequest;
    use godwit_types::{HostName, VmName};

    fn vm(name: &str, step: DrainStep) -> DrainVm {
        DrainVm {
            step,
            ..DrainVm::waiting(VmName::new(name).unwrap(), 64)
        }
    }

    fn view(state: DrainState, vms: Vec<DrainVm>) -> DrainView {
        DrainView {
            host: HostName::new("b").unwrap(),
            state,
            began_unix_s: 0,
            request: DrainRequest::default(),
            vms,
            at_once: 2,
            plan: String::new(),
            eta_s: Some(150.0),
        }
    }

    #[test]
    fn one_vm_is_not_called_1_vms() {
        let planned = view(DrainState::Planned, vec![vm("one", DrainStep::Waiting)]);
        let headline = drain_headline(&planned);
        assert_eq!(headline, "Host b would be emptied of 1 VM in about 2.5 min");
    }

    #[test]
    fn a_drain_says_how_far_it_is_and_who_stays() {
        let vms = vec![
            vm("one", DrainStep::Moved),
            vm("two", DrainStep::Moving),
            vm("three", DrainStep::CannotMove),
        ];
        let draining = view(DrainState::Draining, vms.clone());
        assert_eq!(
            drain_parts(&draining).join(", "),
            "1 moved, 1 moving, 0 waiting, 1 cannot move, about 2.5 min left"
        );
        let done = drain_headline(&view(DrainState::Done, vms));
        assert!(
            done.contains("1 VM cannot move and stays as it is: do what"),
            "{done}"
        );
        assert!(done.contains("godwit host undrain b"), "{done}");
    }
}
