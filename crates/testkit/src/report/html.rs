//! The report as one self-contained page: no script, no font, no picture from elsewhere.
//!
//! Pure: out of the report alone. Refuses nothing; what was not measured is said to be so.

use serde_json::Value;

use super::pause;
use super::svg::{Band, Line, Scale, TimeChart};
use super::{Migration, Report};
use crate::load::series::Workload;
use crate::page::html::{Page, Table, legend};
use crate::page::{escape, figure};

pub fn page(report: &Report) -> String {
    let mut page = Page::new("Godwit: migration report");
    header(&mut page, report);
    tiles(&mut page, report);
    workload(&mut page, report);
    for (index, migration) in report.migrations.iter().enumerate() {
        migration_section(&mut page, report, migration, index);
    }
    figures(&mut page, report);
    footer(&mut page, report);
    page.end()
}

fn header(page: &mut Page, report: &Report) {
    let guest = &report.guest;
    page.heading(
        1,
        &format!("A running guest, moved {}", times(report.migrations.len())),
    );
    let about = format!(
        "{} MiB of memory, {} vCPU{}, run by {}. It wrote up to {} MiB/s while it was moved.",
        figure(guest.ram_mib as f64),
        guest.vcpus,
        if guest.vcpus == 1 { "" } else { "s" },
        accelerator(&guest.accelerator),
        figure(guest.dirty_mib_per_s)
    );
    page.paragraph("soft", &about);
    page.paragraph("soft", &made(report));
    if guest.accelerator.eq_ignore_ascii_case("tcg") {
        page.paragraph(
            "note",
            "This guest was **emulated** (TCG), which is 10 to 50 times slower than hardware and leaves less to compete with a \
             migration. Read operations and latencies as ratios, not as what hardware would give; both hosts shared one machine.",
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

fn tiles(page: &mut Page, report: &Report) {
    let mut tiles = String::new();
    let completed = report
        .migrations
        .iter()
        .filter(|migration| is_completed(migration))
        .count();
    let all = report.migrations.len();
    tile(
        &mut tiles,
        &format!("{completed} of {all}"),
        "migrations completed",
        Some(completed == all),
    );
    switchover_tile(&mut tiles, report);
    let workload = &report.workload;
    let lost = workload.connections_lost;
    tile(
        &mut tiles,
        &figure(lost as f64),
        "connections lost",
        Some(lost == 0),
    );
    let wrong = workload.lost_writes + workload.damaged_reads + workload.errors;
    let label = format!(
        "wrong answers of {} checked",
        figure(workload.verified_reads as f64)
    );
    tile(&mut tiles, &figure(wrong as f64), &label, Some(wrong == 0));
    match workload.recovered_after_s {
        Some(seconds) => {
            let label = "until back to 95 %, in steps of a second";
            tile(&mut tiles, &format!("{} s", figure(seconds)), label, None);
        }
        None => tile(&mut tiles, "never", "back to 95 % of before", Some(false)),
    }
    worst_tile(&mut tiles, workload);
    let verified = if report.ram_verified {
        "equal"
    } else {
        "not compared"
    };
    tile(
        &mut tiles,
        verified,
        "all that was acknowledged",
        report.ram_verified.then_some(true),
    );
    page.markup(&format!("<div class=\"tiles\">{tiles}</div>"));
}

fn switchover_tile(tiles: &mut String, report: &Report) {
    let joined = |number: fn(&Migration) -> Option<f64>| {
        let numbers = report.migrations.iter().filter_map(number);
        numbers.map(figure).collect::<Vec<_>>().join(" / ")
    };
    let targets = report
        .migrations
        .iter()
        .filter_map(|migration| migration.promise.as_ref());
    let met = targets
        .map(|target| target.kept)
        .reduce(|all, met| all && met);
    let mut label = match met {
        Some(true) => "ms switchover, within the target".to_owned(),
        Some(false) => "ms switchover, target missed".to_owned(),
        None => "ms switchover, without a target".to_owned(),
    };
    let silences = joined(|migration| migration.network_gap_ms);
    if !silences.is_empty() {
        label += &format!("; longest silence of a 1 ms ping {silences} ms");
    }
    tile(
        tiles,
        &joined(|migration| Some(migration.switchover_ms)),
        &label,
        met,
    );
}

/// The worst that the client saw.
fn worst_tile(tiles: &mut String, workload: &Workload) {
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
    tile(
        tiles,
        &format!("{} ms", figure(worst)),
        &label,
        (bad > 0).then_some(false),
    );
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

fn tile(tiles: &mut String, value: &str, label: &str, good: Option<bool>) {
    let class = good.map_or("", |good| if good { "good" } else { "bad" });
    let (value, label) = (escape(value), escape(label));
    *tiles +=
        &format!("<div class=\"tile\"><b class=\"{class}\">{value}</b><span>{label}</span></div>");
}

fn is_completed(migration: &Migration) -> bool {
    migration.outcome.as_deref() == Some("completed")
}

fn workload(page: &mut Page, report: &Report) {
    let workload = &report.workload;
    page.heading(2, "What the client saw");
    let about = format!(
        "{}. Sent at a fixed {} operations/s; the guest can serve {}. Latency counts from when an operation was meant to be \
         sent, so a pause weighs on everything that waited for it.",
        workload.name,
        figure(workload.rate_ops_per_s),
        figure(workload.max_ops_per_s)
    );
    page.paragraph("soft", &about);
    let bands: Vec<Band> = report.migrations.iter().filter_map(band).collect();
    let chart = |lines, unit, scale, height| {
        let (seconds, bands) = (workload.whole_seconds(), &bands[..]);
        TimeChart {
            seconds,
            lines,
            bands,
            unit,
            scale,
            height,
        }
        .draw()
    };
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
    let drawn = chart(&operations, "ops/s", Scale::Linear, 240.0);
    page.card("Operations answered in each second", &drawn);
    let key = |(name, colour): (&str, &str)| (colour.to_owned(), true, name.to_owned());
    let keys = [
        ("max", "grey"),
        ("99th percentile", "orange"),
        ("median", "blue"),
    ]
    .map(key);
    let drawn = legend(&keys) + &chart(&latencies, "ms", Scale::Logarithmic, 260.0);
    page.card("Latency in each second, logarithmic", &drawn);
}

fn band(migration: &Migration) -> Option<Band> {
    let label = format!("{} to {}", migration.from, migration.to);
    migration.window_s.map(|window| Band { window, label })
}

fn migration_section(page: &mut Page, report: &Report, migration: &Migration, index: usize) {
    let Migration {
        from,
        to,
        encryption,
        streams,
        id,
        ..
    } = migration;
    page.heading(2, &format!("Migration {}: {from} to {to}", index + 1));
    let disks = migration.other.get("disk_bytes").and_then(Value::as_f64);
    let disks = disks.filter(|&bytes| bytes > 0.0);
    let about = format!(
        "{}, encryption {encryption}, {streams} stream{}, {} s in all{}. Id {id}.",
        migration.outcome.as_deref().unwrap_or("not ended"),
        if *streams == 1 { "" } else { "s" },
        figure(migration.total_s),
        disks.map_or(String::new(), |bytes| {
            format!(", with {} MiB of its disks", figure(bytes / 1_048_576.0))
        })
    );
    page.paragraph("soft", &about);
    limit(page, report, migration);
    pause::section(page, report, migration);
    iterations(page, migration);
}

/// What limited it for most of its time, and what this machine gave.
fn limit(page: &mut Page, report: &Report, migration: &Migration) {
    let passes = migration.iterations.iter();
    let longest = passes.max_by(|a, b| a.seconds.total_cmp(&b.seconds));
    let Some(longest) = longest.filter(|pass| !pass.limited_by.is_empty()) else {
        return;
    };
    let mut told = format!(
        "Its longest pass took {} s, limited by **{}**.",
        figure(longest.seconds),
        longest.limited_by.replace('-', " ")
    );
    if let Some(touched) = report.made.first_touch_gb_per_s {
        let slow = if touched < 2.0 {
            ", which is slow and limits every move here (a hypervisor that takes back free memory does that)"
        } else {
            ""
        };
        told += &format!(
            " One thread touched fresh memory of this machine at {} GB/s before the run{slow}.",
            figure(touched)
        );
    }
    page.paragraph("", &told);
}

fn iterations(page: &mut Page, migration: &Migration) {
    let bytes = migration.iterations.iter().map(|iteration| iteration.bytes);
    let largest = bytes.max().unwrap_or(1).max(1);
    let head = [
        "Pass",
        "MiB",
        "Pages",
        "Zero pages",
        "Seconds",
        "Limited by",
    ];
    let mut table = Table::new(head);
    for (index, iteration) in migration.iterations.iter().enumerate() {
        table.row([
            (index + 1).to_string(),
            figure(iteration.bytes as f64 / 1_048_576.0),
            figure(iteration.pages_sent as f64),
            figure(iteration.zero_pages as f64),
            figure(iteration.seconds),
            iteration.limited_by.replace('-', " "),
        ]);
    }
    let share = |bytes: u64| bytes as f64 / largest as f64;
    let shares = migration
        .iterations
        .iter()
        .map(|iteration| Some(share(iteration.bytes)));
    page.card(
        "Iterations",
        &table.with_bars("Sent", shares.collect()).html("passes"),
    );
}

/// A title, where the figure stands in the JSON, and what it is divided by; of a list the length is shown.
type Figure = (&'static str, &'static str, f64);

const OF_MIGRATION: [Figure; 12] = [
    ("Total, s", "/total_s", 1.0),
    ("Switchover, ms", "/switchover_ms", 1.0),
    ("Target of the pause, ms", "/promise/max_downtime_ms", 1.0),
    ("Longest silence of a 1 ms ping, ms", "/network_gap_ms", 1.0),
    ("Guest clock fell behind, ms", "/guest_clock_lag_ms", 1.0),
    ("Throughput, GB/s", "/throughput_gb_per_s", 1.0),
    ("On the wire, MiB", "/bytes_on_wire", 1_048_576.0),
    ("Of disks, MiB", "/disk_bytes", 1_048_576.0),
    ("Iterations", "/iterations", 1.0),
    ("CPU at the source, s", "/cpu_source_s", 1.0),
    ("CPU at the destination, s", "/cpu_destination_s", 1.0),
    ("Guest wrote, MiB/s", "/dirty_mib_per_s", 1.0),
];

const OF_WORKLOAD: [(&str, &str); 12] = [
    ("Operations/s before", "/before_ops_per_s"),
    ("Operations/s during migrations", "/during_ops_per_s"),
    ("Operations/s after", "/after_ops_per_s"),
    ("Most the guest could serve, operations/s", "/max_ops_per_s"),
    ("Back to 95 % after, s", "/recovered_after_s"),
    ("Connections lost", "/connections_lost"),
    ("Answers checked", "/verified_reads"),
    ("Damaged answers", "/damaged_reads"),
    ("Acknowledged writes lost", "/lost_writes"),
    ("Error answers", "/errors"),
    ("Keys or rows", "/keys"),
    ("Filled in, s", "/fill_seconds"),
];

fn figures(page: &mut Page, report: &Report) {
    let told = |json: &Value, (_, at, unit): Figure, none: &str| {
        let found = json.pointer(at);
        let length = found
            .and_then(Value::as_array)
            .map(|list| list.len() as f64);
        let number = length.or_else(|| found?.as_f64());
        number.map_or(none.to_owned(), |number| figure(number / unit))
    };
    let json = serde_json::to_value(report).unwrap_or_default();
    let migrations = json["migrations"].as_array().into_iter().flatten();
    page.heading(2, "All figures");
    let moves = report.migrations.iter();
    let names = moves.map(|migration| format!("{} to {}", migration.from, migration.to));
    let mut table = Table::new(std::iter::once("Migration".to_owned()).chain(names));
    for row in OF_MIGRATION {
        let each = migrations
            .clone()
            .map(|json| told(json, row, "not measured"));
        table.row(std::iter::once(row.0.to_owned()).chain(each));
    }
    page.card("", &table.html(""));
    let mut table = Table::new(["Workload", ""]);
    for (title, at) in OF_WORKLOAD {
        let value = told(&json["workload"], (title, at, 1.0), "never");
        table.row([title.to_owned(), value]);
    }
    page.card("", &table.html(""));
}

fn footer(page: &mut Page, report: &Report) {
    page.markup("<footer>");
    let told = format!(
        "Operations and latencies were measured by a client outside the guest, with its own clock. Switchover is measured by the \
         source's clock from stop to the destination's word that the guest runs. CPU seconds are those of the VM processes, \
         without QEMU. The numbers behind this page are in report.json, schema {}.",
        report.schema
    );
    page.paragraph("", &told);
    page.markup("</footer>");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Iteration;

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
    fn a_move_tells_what_limited_it_and_what_the_machine_gave() {
        let pass = |seconds, limited_by: &str| Iteration {
            seconds,
            limited_by: limited_by.into(),
            ..Iteration::default()
        };
        let migration = Migration {
            iterations: vec![pass(2.5, "destination-cpu"), pass(0.2, "link")],
            ..Migration::default()
        };
        let mut report = Report {
            migrations: vec![migration],
            ..Report::default()
        };
        report.made.first_touch_gb_per_s = Some(0.3);
        let html = page(&report);
        let longest = "Its longest pass took 2.50 s, limited by <b>destination cpu</b>";
        assert!(html.contains(longest), "{html}");
        assert!(html.contains("at 0.30 GB/s before the run, which is slow"));
        report.made.first_touch_gb_per_s = Some(11.0);
        assert!(!page(&report).contains("which is slow"));
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
}
