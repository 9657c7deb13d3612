//! The results for people: our moves beside the best peer's, every judgement with its ratio and target, every cell, the losing
//! ones too, and the machine; as Markdown, and as one HTML page with the pictures that needs nothing else.
//!
//! Pure: out of the results alone. Text of others (sentences of failures) is escaped on the page.

use crate::group::{
    Group, STOP, SlowMemory, Spread, TOTAL, comparable, groups, is_encrypted, is_ours, is_qemu,
    place,
};
use crate::judge::{Line, Target, lines};
use crate::picture;
use crate::row::{Measured as _, Results, Row};
use godwit_testkit::page::escape;
use godwit_testkit::page::html::{Page, Table};
use serde_json::Value;

const TITLE: &str = "Moves of memory, measured";

const ABOUT: &str = "Godwit and QEMU's own migration in the same run, taking turns, on the same guests, between the same two test \
    hosts on one machine, so on the same cores; `docs/bench.md` says what the numbers are. Medians; in brackets the lowest and the \
    highest run; `(1 run)` where there is only one. A ratio is ours over the peer's: in s, ms and core-s/GB less is better, in GB/s \
    more. A pause of 50 ms is asked of every system. Guests with a Linux or a counter in them run under emulation.";

const NUMBERS: &str = "**s from the command** begins when the move is asked for, before the destination's QEMU is started, and ends at \
    the RESUME event there; preparation is part of it. **Switchover** is from the STOP event at the source to the RESUME event at the \
    destination. **GB/s** is the guest's memory over the time without preparation. **core-s/GB** is CPU of the hosts' processes, \
    without vCPUs, controller, command line and link emulator; what huge pages that are put back after the guest has arrived may cost \
    is in no figure. A peer is cut off at ten times our time. Where hosts have four cards QEMU uses one: it takes one address.";

struct Section {
    level: u8,
    title: String,
    about: String,
    table: Option<Table>,
}

impl Section {
    fn new(title: &str, about: &str, table: Table) -> Self {
        Self {
            level: 2,
            title: title.into(),
            about: about.into(),
            table: Some(table),
        }
    }
}

pub fn markdown(results: &Results) -> String {
    let mut text = format!("# {TITLE}\n");
    for about in abouts(results) {
        text += &format!("\n{about}\n");
    }
    for Section {
        level,
        title,
        about,
        table,
    } in sections(results)
    {
        text += &format!("\n{} {title}\n", "#".repeat(level.into()));
        for part in [about, table.map_or(String::new(), |table| table.markdown())] {
            if !part.is_empty() {
                text += &format!("\n{}\n", part.trim_end());
            }
        }
    }
    text + &machine_list(&results.machine)
}

/// The whole document as a page.
pub fn html(results: &Results) -> String {
    let mut page = Page::new(&format!("Godwit: {}", TITLE.to_lowercase()));
    page.heading(1, TITLE);
    for about in abouts(results) {
        page.paragraph("soft", &about);
    }
    for (
        index,
        Section {
            level,
            title,
            about,
            table,
        },
    ) in sections(results).into_iter().enumerate()
    {
        if index == 2 {
            page.heading(2, "Pictures");
            for (_, svg) in picture::files(results) {
                page.card("", &svg);
            }
        }
        page.heading(level, &title);
        if !about.is_empty() {
            page.paragraph("soft", &about);
        }
        if let Some(table) = table {
            page.card("", &table.html("wide"));
        }
    }
    machine_card(&mut page, &results.machine);
    page.end()
}

/// What it ran on, as the last section of a Markdown document.
pub(crate) fn machine_list(machine: &Value) -> String {
    let mut text = "\n## The machine\n\n".to_owned();
    for (name, value) in machine.as_object().into_iter().flatten() {
        let said = value
            .as_str()
            .map_or_else(|| value.to_string(), str::to_owned);
        text += &format!("- {}: {said}\n", name.replace('_', " "));
    }
    text
}

/// The same of a page.
pub(crate) fn machine_card(page: &mut Page, machine: &Value) {
    page.heading(2, "The machine");
    let machine = serde_json::to_string_pretty(machine).unwrap_or_default();
    page.card("", &format!("<pre>{}</pre>", escape(&machine)));
}

fn abouts(results: &Results) -> Vec<String> {
    let told = [
        ABOUT.to_owned(),
        NUMBERS.to_owned(),
        disturbance(&results.rows),
        memory(&results.rows),
    ];
    told.into_iter().filter(|text| !text.is_empty()).collect()
}

fn sections(results: &Results) -> Vec<Section> {
    let groups = groups(&results.rows);
    let compared = comparable(&groups);
    let mut sections = vec![moves(&compared), comparisons(&lines(&results.rows))];
    sections.extend(parts(&groups));
    let slow = SlowMemory::among(&results.rows);
    sections.extend(everything(&groups, &compared, &slow));
    sections
}

/// What the hypervisor took while it was measured, where that is known.
fn disturbance(rows: &[Row]) -> String {
    let shares: Vec<f64> = rows
        .iter()
        .filter_map(|row| row.detail("stolen_share"))
        .collect();
    let Some(Spread { median, most, .. }) = Spread::of(&shares) else {
        return String::new();
    };
    let again: f64 = rows
        .iter()
        .filter_map(|row| row.detail("disturbed_before"))
        .fold(0.0, |all, one| all + one);
    format!(
        "In {} of {} rows it is known what the hypervisor below took of all cores' time: {:.1} % in the median, {:.1} % at most. \
         {again:.0} runs were made again since it took more than a tenth.",
        shares.len(),
        rows.len(),
        median * 100.0,
        most * 100.0
    )
}

/// How fast memory came right before the moves, and what follows from it; nothing where it was not measured.
fn memory(rows: &[Row]) -> String {
    let speeds: Vec<f64> = rows
        .iter()
        .filter_map(|row| row.first_touch_gb_per_s)
        .collect();
    let Some(Spread {
        median,
        least,
        most,
        ..
    }) = Spread::of(&speeds)
    else {
        return String::new();
    };
    let slow = SlowMemory::among(rows);
    let left_out = match rows.iter().filter(|row| slow.has(row)).count() {
        0 => "No row met less than a quarter of the best of its call.".to_owned(),
        count => format!(
            "**{count} of {} rows** met less than a quarter of the best of their call, as where a hypervisor takes free memory back: they \
             are marked in the tables and left out of ratios and pictures, ours and the peers' alike.",
            rows.len()
        ),
    };
    format!(
        "Right before each move, whoever's it was, as much memory as its destination needs was touched and given back, and then 256 MiB \
         of free memory were touched by all cores: at {median:.1} GB/s in the median, {least:.1} to {most:.1}. {left_out}"
    )
}

/// Every move of ours beside the best peer of the same kind.
fn moves(groups: &[Group]) -> Section {
    let mut table = Table::new([
        "scenario",
        "cell",
        "Godwit",
        "s from the command",
        "best peer",
        "ratio",
        "ms switchover",
        "best peer",
        "ratio",
    ]);
    let moved = |group: &&Group| is_ours(group.head()) && group.median(TOTAL).is_some();
    for group in groups.iter().filter(moved) {
        let row = group.head();
        let kind = if is_encrypted(row) {
            "encrypted"
        } else {
            "plain"
        };
        let prepared = if row.destination == "prepared" {
            ", prepared"
        } else {
            ""
        };
        let mut shown = vec![
            row.scenario.clone(),
            row.cell.clone(),
            format!("{kind}{prepared}"),
        ];
        for number in [TOTAL, STOP] {
            let ours = group.spread(number);
            let peer = best_peer(groups, row, number);
            let both = ours.zip(peer.as_ref());
            let ratio = both.map(|(ours, (peer, _))| ours.median / peer.median);
            let named = |(spread, name): (Spread, String)| format!("{} {name}", counted(spread));
            shown.push(ours.map_or("-".into(), counted));
            shown.push(peer.map_or_else(|| no_peer(groups, row), named));
            shown.push(two_digits(ratio));
        }
        table.row(shown);
    }
    let about = "The best peer is that of the same cell with the same encryption, into memory of the same kind where there is one.";
    Section::new("Every scenario", about, table)
}

fn two_digits(ratio: Option<f64>) -> String {
    ratio.map_or("-".into(), |ratio| format!("{ratio:.2}"))
}

fn best_peer(
    groups: &[Group],
    ours: &Row,
    number: fn(&Row) -> Option<f64>,
) -> Option<(Spread, String)> {
    let alike = |row: &Row| {
        let same_secrecy = is_encrypted(row) == is_encrypted(ours);
        is_qemu(row) && same_secrecy && place(row) == place(ours)
    };
    let least = |same_memory: bool| {
        let fits = groups.iter().filter(|group| {
            let row = group.head();
            alike(row) && (!same_memory || row.destination == ours.destination)
        });
        let found = fits.filter_map(|group| Some((group.spread(number)?, group.full_name())));
        found.min_by(|one, two| one.0.median.total_cmp(&two.0.median))
    };
    least(true).or_else(|| least(false))
}

/// Why there is no peer's figure.
fn no_peer(groups: &[Group], ours: &Row) -> String {
    let here = |group: &&Group| {
        let row = group.head();
        is_qemu(row) && row.scenario == ours.scenario && row.cell == ours.cell
    };
    let cut = groups.iter().filter(here).any(Group::cut_off);
    if cut { "cut off at 10 x ours" } else { "-" }.to_owned()
}

/// What the switchovers of the base cell are made of.
fn parts(groups: &[Group]) -> Option<Section> {
    const NAMES: [&str; 8] = [
        "stop_ms",
        "last_blocks_ms",
        "last_pages_ms",
        "device_save_ms",
        "transfer_ms",
        "device_load_ms",
        "permit_ms",
        "resume_ms",
    ];
    let named = |row: &Row, name: &str| row.details["report"]["switchover_parts_ms"][name].as_f64();
    let is_shown = |group: &&Group| {
        let row = group.head();
        let chosen = matches!(
            place(row),
            ("idle", "base") | ("redis", "set=50" | "set=100")
        );
        is_ours(row) && chosen
    };
    let present = |name: &&str| {
        groups
            .iter()
            .any(|group| group.rows.iter().any(|row| named(row, name).is_some()))
    };
    let present: Vec<&str> = NAMES.into_iter().filter(present).collect();
    let titles = present
        .iter()
        .map(|name| name.trim_end_matches("_ms").replace('_', " "));
    let mut table = Table::new(["cell", "kind"].map(String::from).into_iter().chain(titles));
    for group in groups.iter().filter(is_shown) {
        let row = group.head();
        let place = [
            format!("{} {}", row.scenario, row.cell),
            format!("{} {}", row.encryption, row.destination),
        ];
        let times = present.iter().map(|name| {
            group
                .spread(|row| named(row, name))
                .map_or("-".into(), figures)
        });
        table.row(place.into_iter().chain(times));
    }
    let some = !present.is_empty() && !table.is_empty();
    some.then(|| {
        Section::new(
            "Parts of the switchover, ms",
            "By the product's own report.",
            table,
        )
    })
}

fn comparisons(lines: &[Line]) -> Section {
    let mut table = Table::new(["cell", "what", "Godwit", "peer", "ratio", "target", ""]);
    for line in lines {
        let peer = match &line.peer {
            Some((spread, name)) => format!("{} {name}", counted(*spread)),
            None if line.note.is_empty() => "-".into(),
            None => line.note.clone(),
        };
        let ours = line.ours.map_or("-".into(), counted);
        let verdict = match line.reached() {
            Some(true) => "reached",
            Some(false) => "**missed**",
            None => "",
        };
        let (ratio, target) = (two_digits(line.ratio()), target(line.target));
        table.row([
            &line.cell, &line.what, &ours, &peer, &ratio, &target, verdict,
        ]);
    }
    Section::new("Against the targets", "", table)
}

fn target(target: Target) -> String {
    match target {
        Target::AtLeast(ratio) => format!("ratio at least {ratio}"),
        Target::AtMost(ratio) => format!("ratio at most {ratio}"),
        Target::MoreByAtMost(more) => format!("at most {more} more"),
        Target::Below(most) => format!("at most {most}"),
        Target::Above(least) => format!("at least {least}"),
        Target::None => "-".into(),
    }
}

/// A median with its spread, and whether it is of a single run.
fn counted(spread: Spread) -> String {
    let single = if spread.runs == 1 { " (1 run)" } else { "" };
    figures(spread) + single
}

/// A median with its spread.
pub fn figures(spread: Spread) -> String {
    let digits = match spread.median {
        median if median < 1.0 => 3,
        median if median < 10.0 => 2,
        _ => 1,
    };
    let Spread {
        median,
        least,
        most,
        ..
    } = spread;
    if least == most {
        return format!("{median:.digits$}");
    }
    format!("{median:.digits$} ({least:.digits$}..{most:.digits$})")
}

/// A number's title, and how a row has it.
type Column = (&'static str, fn(&Row) -> Option<f64>);

const COLUMNS: [Column; 9] = [
    ("s from the command", |row| row.total_s),
    ("of these prepared", |row| {
        (row.prepare_s > 0.0).then_some(row.prepare_s)
    }),
    ("switchover ms", |row| row.switchover_ms),
    ("GB/s", |row| row.throughput_gb_per_s),
    ("core-s/GB source", |row| row.cpu_source_s_per_gb),
    ("core-s/GB destination", |row| row.cpu_destination_s_per_gb),
    ("guest speed", |row| row.guest_speed_during),
    ("memory MiB", |row| row.peak_rss_mib),
    ("first touch GB/s", |row| row.first_touch_gb_per_s),
];

fn everything(groups: &[Group], compared: &[Group], slow: &SlowMemory) -> Vec<Section> {
    let before = ["cell", "system", "destination", "encryption", "runs"];
    let titles = before.into_iter().chain(COLUMNS.map(|(title, _)| title));
    let titles: Vec<&str> = titles.chain(["RAM equal", "also", "outcome"]).collect();
    let mut sections = vec![Section {
        level: 2,
        title: "Every cell".into(),
        about: String::new(),
        table: None,
    }];
    for scenario in groups.chunk_by(|one, two| one.head().scenario == two.head().scenario) {
        let mut table = Table::new(titles.clone());
        for group in scenario {
            table.row(one(group, compared, slow));
        }
        let title = scenario[0].head().scenario.clone();
        sections.push(Section {
            level: 3,
            title,
            about: String::new(),
            table: Some(table),
        });
    }
    sections
}

fn one(group: &Group, compared: &[Group], slow: &SlowMemory) -> Vec<String> {
    let row = group.head();
    let runs = group.rows.len();
    let same = |other: &&Group| other.head().is_like(row);
    let beside = compared.iter().find(same).map_or(0, |same| same.rows.len());
    let slow = group.rows.iter().filter(|row| slow.has(row)).count();
    let mut told = runs.to_string();
    if slow > 0 {
        told += &format!(", {slow} on slow memory");
    }
    if beside + slow != runs {
        told += &format!(", {beside} of them beside ours");
    }
    let equal = match group.equal() {
        Some(true) => "yes",
        Some(false) => "**no**",
        None => "-",
    };
    let mut shown = vec![
        row.cell.clone(),
        group.name(),
        row.destination.clone(),
        row.encryption.clone(),
        told,
    ];
    shown.extend(COLUMNS.map(|(_, number)| group.spread(number).map_or("-".into(), figures)));
    shown.extend([equal.into(), also(group), group.outcome()]);
    shown
}

/// What a cell was made for and no column shows.
fn also(group: &Group) -> String {
    let named = [
        ("jain_index", "Jain index"),
        ("eta_at_tenth_error", "estimate at a tenth off by"),
        ("guest_speed_after_10_s", "guest's speed 10 s after"),
        ("guest_speed_after", "60 s after"),
        ("write_share", "written of what could be"),
        ("read_share", "read of before"),
        ("first_pass_ratio", "first pass over later ones"),
    ];
    let mut found = Vec::new();
    for (name, title) in named {
        let spread = group.spread(|row| row.detail(name));
        found.extend(spread.map(|spread| format!("{title} {}", figures(spread))));
    }
    if found.is_empty() {
        return "-".into();
    }
    found.join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_losing_cells_and_those_left_out_are_in_the_table() {
        let row = |system: &str, rate: Option<f64>, outcome: &str| Row {
            total_s: None,
            throughput_gb_per_s: rate,
            outcome: outcome.into(),
            ..Row::sample(system, "none", "cold")
        };
        let rows = [
            row("godwit", Some(1.0), "completed"),
            row("qemu-7.2", Some(4.0), "completed"),
            row("qemu-10.0", None, "skipped: not here"),
        ];
        let text = markdown(&Results {
            machine: serde_json::json!({"cores": 2}),
            rows: rows.to_vec(),
        });
        assert!(text.contains("- cores: 2"), "{text}");
        assert!(text.contains("**missed**"), "{text}");
        assert!(text.contains("skipped: not here"), "{text}");
        assert!(!text.contains("beside ours"), "{text}");
    }

    #[test]
    fn a_peer_of_another_call_is_shown_and_said_to_be_so() {
        let row = |system: &str, total_s: f64, call_unix_s: u64| Row {
            total_s: Some(total_s),
            call_unix_s,
            ..Row::sample(system, "none", "cold")
        };
        let text = markdown(&Results {
            rows: vec![
                row("godwit", 2.0, 1),
                row("qemu-7.2", 4.0, 1),
                row("qemu-7.2", 1.0, 2),
            ],
            ..Results::default()
        });
        assert!(text.contains("| 2, 1 of them beside ours |"), "{text}");
        assert!(!text.contains("hypervisor below took"), "{text}");
        assert!(text.contains("| 4.00 (1 run) qemu-7.2"), "{text}");
    }

    #[test]
    fn rows_on_slow_memory_are_marked_and_the_page_says_that_they_are_left_out() {
        let row = |system: &str, touched: f64| Row {
            first_touch_gb_per_s: Some(touched),
            ..Row::sample(system, "none", "cold")
        };
        let mut results = Results {
            rows: vec![row("godwit", 8.0), row("godwit", 0.3), row("qemu-7.2", 6.0)],
            ..Results::default()
        };
        for text in [markdown(&results), html(&results)] {
            assert!(
                text.contains("2, 1 on slow memory") && !text.contains("beside ours"),
                "{text}"
            );
            assert!(
                text.contains("left out of ratios") && text.contains("1 of 3 rows"),
                "{text}"
            );
            assert!(
                text.contains("at 6.0 GB/s in the median, 0.3 to 8.0"),
                "{text}"
            );
        }
        results.rows.remove(1);
        assert!(markdown(&results).contains("No row met less than a quarter"));
    }

    #[test]
    fn what_the_hypervisor_took_is_told() {
        let row = |stolen: f64, disturbed: u32| Row {
            details: serde_json::json!({"stolen_share": stolen, "disturbed_before": disturbed}),
            ..Row::default()
        };
        let text = disturbance(&[row(0.01, 0), row(0.02, 2), row(0.12, 1), Row::default()]);
        assert!(text.contains("In 3 of 4 rows"), "{text}");
        assert!(
            text.contains("2.0 % in the median, 12.0 % at most. 3 runs"),
            "{text}"
        );
    }

    #[test]
    fn markup_in_a_failure_is_text_on_the_page() {
        let row = Row {
            scenario: "idle".into(),
            outcome: "failed: <script>".into(),
            ..Row::default()
        };
        let page = html(&Results {
            rows: vec![row],
            ..Results::default()
        });
        assert!(page.contains("failed: &lt;script&gt;") && !page.contains("<script>"));
    }
}
