//! The report as one self-contained page: no script, no font, no picture from elsewhere.

use std::fmt::Write;

use serde_json::Value;

use super::svg::{Band, Line, Part, Scale, TimeChart, escape, figure, stacked_bar};
use super::{Migration, Report};
use crate::load::series::Workload;

/// The whole page.
pub fn page(report: &Report) -> String {
    let mut html = String::from("<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\">");
    html.push_str("<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">");
    html.push_str("<title>Godwit: migration report</title><style>");
    html.push_str(include_str!("style.css"));
    html.push_str("</style></head><body><main>");
    header(&mut html, report);
    tiles(&mut html, report);
    workload(&mut html, report);
    for (index, migration) in report.migrations.iter().enumerate() {
        migration_section(&mut html, report, migration, index);
    }
    figures(&mut html, report);
    footer(&mut html, report);
    html + "</main></body></html>\n"
}

fn header(html: &mut String, report: &Report) {
    let guest = &report.guest;
    let _ = write!(
        html,
        "<h1>A running guest, moved {}</h1><p class=\"soft\">{} MiB of memory, {} vCPU{}, run by {}. It wrote up to {} MiB/s \
         while it was moved.</p>",
        times(report.migrations.len()),
        figure(guest.ram_mib as f64),
        guest.vcpus,
        if guest.vcpus == 1 { "" } else { "s" },
        escape(&accelerator(&guest.accelerator)),
        figure(guest.dirty_mib_per_s)
    );
    let _ = write!(html, "<p class=\"soft\">{}</p>", escape(&made(report)));
    if guest.accelerator.eq_ignore_ascii_case("tcg") {
        html.push_str(
            "<p class=\"note\">This guest was <b>emulated</b> (TCG), which is 10 to 50 times slower than hardware and leaves less \
             to compete with a migration. Read operations and latencies as ratios, not as what hardware would give; both hosts \
             shared one machine.</p>",
        );
    }
}

fn times(count: usize) -> String {
    match count {
        1 => "once".to_owned(),
        2 => "twice".to_owned(),
        count => format!("{count} times"),
    }
}

fn accelerator(name: &str) -> String {
    match name.to_ascii_lowercase().as_str() {
        "kvm" => "KVM (hardware)".to_owned(),
        "tcg" => "TCG (emulation)".to_owned(),
        "" => "an unknown accelerator".to_owned(),
        other => other.to_owned(),
    }
}

fn tiles(html: &mut String, report: &Report) {
    html.push_str("<div class=\"tiles\">");
    let completed = report
        .migrations
        .iter()
        .filter(|migration| is_completed(migration))
        .count();
    let all = report.migrations.len();
    tile(
        html,
        &format!("{completed} of {all}"),
        "migrations completed",
        Some(completed == all),
    );
    let pauses: Vec<String> = report
        .migrations
        .iter()
        .map(|migration| figure(migration.switchover_ms))
        .collect();
    let targets = report
        .migrations
        .iter()
        .filter_map(|migration| migration.promise.as_ref());
    let met = targets
        .map(|target| target.kept)
        .reduce(|all, met| all && met);
    let label = match met {
        Some(true) => "ms switchover, within the target",
        Some(false) => "ms switchover, target missed",
        None => "ms switchover, without a target",
    };
    let silences: Vec<String> = report
        .migrations
        .iter()
        .filter_map(|migration| migration.network_gap_ms)
        .map(figure)
        .collect();
    let label = match silences.is_empty() {
        true => label.to_owned(),
        false => format!(
            "{label}; longest silence of a 1 ms ping {} ms",
            silences.join(" / ")
        ),
    };
    tile(html, &pauses.join(" / "), &label, met);
    let workload = &report.workload;
    let lost = workload.connections_lost;
    tile(
        html,
        &figure(lost as f64),
        "connections lost",
        Some(lost == 0),
    );
    let wrong = workload.lost_writes + workload.damaged_reads + workload.errors;
    let label = format!(
        "wrong answers of {} checked",
        figure(workload.verified_reads as f64)
    );
    tile(html, &figure(wrong as f64), &label, Some(wrong == 0));
    match workload.recovered_after_s {
        Some(seconds) => tile(
            html,
            &format!("{} s", figure(seconds)),
            "until back to 95 %, in steps of a second",
            None,
        ),
        None => tile(html, "never", "back to 95 % of before", Some(false)),
    }
    worst_tile(html, workload);
    let verified = if report.ram_verified {
        "equal"
    } else {
        "not compared"
    };
    tile(
        html,
        verified,
        "every value read back",
        report.ram_verified.then_some(true),
    );
    html.push_str("</div>");
}

/// The worst that the client saw.
fn worst_tile(html: &mut String, workload: &Workload) {
    let (Some(before), Some(worst), Some(bad)) = (
        workload.median_before_ms,
        workload.worst_median_ms,
        workload.seconds_above_10x,
    ) else {
        return;
    };
    let label = format!(
        "median latency of the worst second, {} ms before; {bad} s above ten times that",
        figure(before)
    );
    let good = if bad > 0 { Some(false) } else { None };
    tile(html, &format!("{} ms", figure(worst)), &label, good);
}

/// The day and time of the run, UTC, and on what it was made.
fn made(report: &Report) -> String {
    let made = &report.made;
    let mut parts = Vec::new();
    if report.workload.started_unix_ms > 0 {
        parts.push(moment(report.workload.started_unix_ms / 1000));
    }
    let known = [
        ("Godwit", &made.godwit),
        ("QEMU", &made.qemu),
        ("Linux", &made.kernel),
    ];
    let known = known.iter().filter(|(_, version)| !version.is_empty());
    parts.extend(known.map(|(name, version)| format!("{name} {version}")));
    if !made.command.is_empty() {
        parts.push(made.command.clone());
    }
    parts.join(" \u{b7} ")
}

/// A moment by the calendar, UTC.
fn moment(unix_s: u64) -> String {
    let at = i64::try_from(unix_s).map(jiff::Timestamp::from_second);
    match at {
        Ok(Ok(at)) => at.strftime("%Y-%m-%d %H:%M UTC").to_string(),
        _ => "-".to_owned(),
    }
}

fn tile(html: &mut String, value: &str, label: &str, good: Option<bool>) {
    let class = good.map_or("", |good| if good { "good" } else { "bad" });
    let _ = write!(
        html,
        "<div class=\"tile\"><b class=\"{class}\">{}</b><span>{}</span></div>",
        escape(value),
        escape(label)
    );
}

fn is_completed(migration: &Migration) -> bool {
    migration.outcome.as_deref() == Some("completed")
}

fn workload(html: &mut String, report: &Report) {
    let workload = &report.workload;
    let (rate, most) = (
        figure(workload.rate_ops_per_s),
        figure(workload.max_ops_per_s),
    );
    let _ = write!(
        html,
        "<h2>What the client saw</h2><p class=\"soft\">{}. Sent at a fixed {rate} operations/s; the guest can serve {most}. Latency \
         counts from when an operation was meant to be sent, so a pause weighs on everything that waited for it.</p>",
        escape(&workload.name),
    );
    let bands: Vec<Band> = report.migrations.iter().filter_map(band).collect();
    let operations = [Line {
        name: "operations",
        class: "blue",
        value: |second| second.ops as f64,
    }];
    let latencies = [
        Line {
            name: "max",
            class: "grey",
            value: |second| second.max_ms,
        },
        Line {
            name: "p99",
            class: "orange",
            value: |second| second.p99_ms,
        },
        Line {
            name: "p50",
            class: "blue",
            value: |second| second.p50_ms,
        },
    ];
    let seconds = workload.whole_seconds();
    let chart = |lines, unit, scale, height| {
        TimeChart {
            seconds,
            lines,
            bands: &bands,
            unit,
            scale,
            height,
        }
        .draw()
    };
    html.push_str("<div class=\"card\"><h3>Operations answered in each second</h3>");
    html.push_str(&chart(&operations, "ops/s", Scale::Linear, 240.0));
    html.push_str("</div><div class=\"card\"><h3>Latency in each second, logarithmic</h3><ul class=\"legend\">");
    for (name, colour) in [
        ("max", "grey"),
        ("99th percentile", "orange"),
        ("median", "blue"),
    ] {
        let _ = write!(
            html,
            "<li><i class=\"key\" style=\"background:var(--{colour})\"></i>{name}</li>"
        );
    }
    html.push_str("</ul>");
    html.push_str(&chart(&latencies, "ms", Scale::Logarithmic, 260.0));
    html.push_str("</div>");
}

fn band(migration: &Migration) -> Option<Band> {
    let label = format!("{} to {}", migration.from, migration.to);
    migration.window_s.map(|window| Band { window, label })
}

fn migration_section(html: &mut String, report: &Report, migration: &Migration, index: usize) {
    let _ = write!(
        html,
        "<h2>Migration {}: {} to {}</h2><p class=\"soft\">{}, encryption {}, {} stream{}, {} s in all. Id {}.</p>",
        index + 1,
        escape(&migration.from),
        escape(&migration.to),
        escape(migration.outcome.as_deref().unwrap_or("not ended")),
        escape(&migration.encryption),
        migration.streams,
        if migration.streams == 1 { "" } else { "s" },
        figure(migration.total_s),
        escape(&migration.id)
    );
    limit(html, report, migration);
    switchover(html, report, migration);
    iterations(html, migration);
}

/// What limited it for most of its time, and what this machine gave.
fn limit(html: &mut String, report: &Report, migration: &Migration) {
    let longest = migration
        .iterations
        .iter()
        .max_by(|a, b| a.seconds.total_cmp(&b.seconds));
    let Some(longest) = longest.filter(|pass| !pass.limited_by.is_empty()) else {
        return;
    };
    let _ = write!(
        html,
        "<p>Its longest pass took {} s, limited by <b>{}</b>.",
        figure(longest.seconds),
        escape(&longest.limited_by.replace('-', " "))
    );
    if let Some(touched) = report.made.first_touch_gb_per_s {
        let slow = if touched < 2.0 {
            ", which is slow and limits every move here (a hypervisor that takes back free memory does that)"
        } else {
            ""
        };
        let _ = write!(
            html,
            " One thread touched fresh memory of this machine at {} GB/s before the run{slow}.",
            figure(touched)
        );
    }
    html.push_str("</p>");
}

fn switchover(html: &mut String, report: &Report, migration: &Migration) {
    let promise = migration.promise.as_ref();
    let verdict = match promise {
        Some(promise) if promise.kept => " <span class=\"good\">target met</span>",
        Some(_) => " <span class=\"bad\">target missed</span>",
        None => "",
    };
    let _ = write!(
        html,
        "<div class=\"card\"><h3>Switchover: {} ms in which no vCPU ran anywhere{verdict}</h3>",
        figure(migration.switchover_ms)
    );
    let parts = parts(migration);
    // One axis for all migrations, so that their bars can be compared.
    let reach = |migration: &Migration| {
        let promised = migration
            .promise
            .as_ref()
            .map_or(0.0, |promise| promise.max_downtime_ms);
        migration.switchover_ms.max(promised)
    };
    let longest = report.migrations.iter().map(reach).fold(1.0, f64::max);
    html.push_str(&stacked_bar(
        &parts,
        longest,
        promise.map(|promise| promise.max_downtime_ms),
    ));
    html.push_str("<ul class=\"legend\">");
    for (index, part) in parts.iter().enumerate() {
        let (name, value) = (escape(&part.name), figure(part.value_ms));
        let _ = write!(
            html,
            "<li><i style=\"background:var(--part{})\"></i>{name} {value} ms</li>",
            index % 6
        );
    }
    html.push_str("</ul></div>");
}

/// Names of the parts in the order in which they happen.
const PARTS: [(&str, &str); 6] = [
    ("stop_ms", "stop"),
    ("last_pages_ms", "last pages"),
    ("device_save_ms", "save device state"),
    ("device_load_ms", "load device state"),
    ("permit_ms", "hand over the right to run"),
    ("resume_ms", "resume"),
];

/// Known parts in their order, then whatever else was reported.
fn parts(migration: &Migration) -> Vec<Part> {
    let given = &migration.switchover_parts_ms;
    let known = PARTS
        .iter()
        .filter_map(|(key, name)| given.get(*key).map(|value| (name.to_string(), value)));
    let unknown = given
        .iter()
        .filter(|(key, _)| PARTS.iter().all(|(known, _)| known != key));
    let unknown =
        unknown.map(|(key, value)| (key.trim_end_matches("_ms").replace(['_', '-'], " "), value));
    let part = |(name, value): (String, &Value)| {
        Some(Part {
            name,
            value_ms: value.as_f64()?.max(0.0),
        })
    };
    known.chain(unknown).filter_map(part).collect()
}

fn iterations(html: &mut String, migration: &Migration) {
    html.push_str(
        "<div class=\"card\"><h3>Iterations</h3><table class=\"passes\"><thead><tr><th>Pass</th><th style=\"text-align:left\">Sent</th><th>MiB</th>\
         <th>Pages</th><th>Zero pages</th><th>Seconds</th><th style=\"text-align:left\">Limited by</th></tr></thead><tbody>",
    );
    let largest = migration
        .iterations
        .iter()
        .map(|iteration| iteration.bytes)
        .max()
        .unwrap_or(1)
        .max(1);
    for (index, iteration) in migration.iterations.iter().enumerate() {
        let share = iteration.bytes as f64 / largest as f64 * 100.0;
        let _ = write!(
            html,
            "<tr><td>{}</td><td class=\"bars\"><span class=\"bar\" style=\"width:{share:.1}%\"></span></td><td>{}</td><td>{}</td>\
             <td>{}</td><td>{}</td><td class=\"left\">{}</td></tr>",
            index + 1,
            figure(iteration.bytes as f64 / 1_048_576.0),
            figure(iteration.pages_sent as f64),
            figure(iteration.zero_pages as f64),
            figure(iteration.seconds),
            escape(&iteration.limited_by.replace('-', " "))
        );
    }
    html.push_str("</tbody></table></div>");
}

/// A row of the table of all figures: name, unit, and how to read it from a migration.
type Row = (&'static str, fn(&Migration) -> Option<f64>);

const ROWS: [Row; 11] = [
    ("Total, s", |migration| Some(migration.total_s)),
    ("Switchover, ms", |migration| Some(migration.switchover_ms)),
    ("Target of the pause, ms", |migration| {
        migration
            .promise
            .as_ref()
            .map(|promise| promise.max_downtime_ms)
    }),
    ("Longest silence of a 1 ms ping, ms", |migration| {
        migration.network_gap_ms
    }),
    ("Guest clock fell behind, ms", |migration| {
        migration.guest_clock_lag_ms
    }),
    ("Throughput, GB/s", |migration| {
        Some(migration.throughput_gb_per_s)
    }),
    ("On the wire, MiB", |migration| {
        Some(migration.bytes_on_wire as f64 / 1_048_576.0)
    }),
    ("Iterations", |migration| {
        Some(migration.iterations.len() as f64)
    }),
    ("CPU at the source, s", |migration| {
        Some(migration.cpu_source_s)
    }),
    ("CPU at the destination, s", |migration| {
        Some(migration.cpu_destination_s)
    }),
    ("Guest wrote, MiB/s", |migration| {
        migration
            .other
            .get("dirty_mib_per_s")
            .and_then(Value::as_f64)
    }),
];

fn figures(html: &mut String, report: &Report) {
    html.push_str("<h2>All figures</h2><div class=\"card\"><table><thead><tr><th>Migration</th>");
    for migration in &report.migrations {
        let _ = write!(
            html,
            "<th>{} to {}</th>",
            escape(&migration.from),
            escape(&migration.to)
        );
    }
    html.push_str("</tr></thead><tbody>");
    for (name, read) in ROWS {
        let _ = write!(html, "<tr><td>{name}</td>");
        for migration in &report.migrations {
            let _ = write!(
                html,
                "<td>{}</td>",
                read(migration).map_or("not measured".to_owned(), figure)
            );
        }
        html.push_str("</tr>");
    }
    html.push_str("</tbody></table></div><div class=\"card\"><table><thead><tr><th>Workload</th><th></th></tr></thead><tbody>");
    for (name, value) in workload_rows(report) {
        let _ = write!(html, "<tr><td>{name}</td><td>{value}</td></tr>");
    }
    html.push_str("</tbody></table></div>");
}

fn workload_rows(report: &Report) -> Vec<(&'static str, String)> {
    let workload = &report.workload;
    let count = |value: u64| figure(value as f64);
    vec![
        ("Operations/s before", figure(workload.before_ops_per_s)),
        (
            "Operations/s during migrations",
            figure(workload.during_ops_per_s),
        ),
        ("Operations/s after", figure(workload.after_ops_per_s)),
        (
            "Most the guest could serve, operations/s",
            figure(workload.max_ops_per_s),
        ),
        (
            "Back to 95 % after, s",
            workload
                .recovered_after_s
                .map_or("never".to_owned(), figure),
        ),
        ("Connections lost", count(workload.connections_lost)),
        (
            "Reads checked byte for byte",
            count(workload.verified_reads),
        ),
        ("Damaged reads", count(workload.damaged_reads)),
        ("Acknowledged writes lost", count(workload.lost_writes)),
        ("Error answers", count(workload.errors)),
        ("Keys", count(workload.keys)),
        ("Filled in, s", figure(workload.fill_seconds)),
    ]
}

fn footer(html: &mut String, report: &Report) {
    let _ = write!(
        html,
        "<footer><p>Operations and latencies were measured by a client outside the guest, with its own clock. Switchover is \
         measured by the source's clock from stop to the destination's word that the guest runs. CPU seconds are those of the VM \
         processes, without QEMU. The numbers behind this page are in report.json, schema {}.</p></footer>",
        report.schema
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_stands_alone_and_shows_no_foreign_markup() {
        let migration = Migration {
            from: "<img src=x>".into(),
            id: "\"><script>".into(),
            ..Migration::default()
        };
        let report = Report {
            migrations: vec![migration],
            ..Report::default()
        };
        let html = page(&report);
        assert!(!html.contains("<img") && !html.contains("<script"));
        for outside in ["http:", "https:", "url(", "@import"] {
            assert!(!html.contains(outside), "{outside}");
        }
    }

    #[test]
    fn an_empty_report_is_still_a_page() {
        let html = page(&Report::default());
        assert!(html.contains("0 of 0") && html.ends_with("</html>\n"));
    }

    #[test]
    fn the_tiles_tell_the_worst_as_well() {
        let migration = Migration {
            switchover_ms: 21.6,
            network_gap_ms: Some(106.0),
            ..Migration::default()
        };
        let mut report = Report {
            migrations: vec![migration],
            ..Report::default()
        };
        let second = |t: u32, ops: u64, p50_ms: f64| crate::load::series::Second {
            t,
            ops,
            p50_ms,
            ..Default::default()
        };
        let medians = [5.0, 5.0, 5.0, 1662.0, 600.0, 6.0, 9000.0];
        let seconds = (0..).zip(medians).map(|(t, ms)| second(t, 100, ms));
        report.workload.seconds = seconds.collect();
        let window = |from_s, to_s| crate::load::series::Window { from_s, to_s };
        report.workload.judge(&[window(3.2, 4.0)]);
        let html = page(&report);
        assert!(html.contains("longest silence of a 1 ms ping 106 ms"));
        assert!(
            html.contains(
                "median latency of the worst second, 5 ms before; 2 s above ten times that"
            )
        );
        // The last second is no whole one, and is not shown.
        assert!(!html.contains("9,000") && report.workload.worst_median_ms == Some(1662.0));
    }

    #[test]
    fn a_page_says_when_and_on_what_it_was_made() {
        let mut report = Report::default();
        report.workload.started_unix_ms = 1_709_210_096_000;
        report.made.godwit = "0.1.0".into();
        report.made.command = "make demo".into();
        assert_eq!(
            made(&report),
            "2024-02-29 12:34 UTC \u{b7} Godwit 0.1.0 \u{b7} make demo"
        );
        assert_eq!(moment(0), "1970-01-01 00:00 UTC");
        assert_eq!(moment(4_102_444_799), "2099-12-31 23:59 UTC");
    }

    #[test]
    fn emulation_is_said_at_the_top() {
        let mut report = Report::default();
        report.guest.accelerator = "tcg".into();
        assert!(page(&report).contains("emulated"));
        report.guest.accelerator = "kvm".into();
        assert!(!page(&report).contains("emulated"));
    }

    #[test]
    fn parts_keep_their_order_and_unknown_ones_follow() {
        let mut migration = Migration::default();
        for (name, value) in [("resume_ms", 1.0), ("a_new_part_ms", 3.0), ("stop_ms", 2.0)] {
            migration
                .switchover_parts_ms
                .insert(name.into(), value.into());
        }
        let names: Vec<String> = parts(&migration)
            .into_iter()
            .map(|part| part.name)
            .collect();
        assert_eq!(names, ["stop", "resume", "a new part"]);
    }
}
