//! What is promised of our moves: `promises.toml`, and what has to be so in every cell.
//!
//! Pure. Refuses every word of the file that it does not know, and to judge what was not measured: such a line is left out.

use crate::group::{
    COST_DESTINATION, COST_SOURCE, Group, RATE, STOP, Spread, TOTAL, is_encrypted, is_ours, place,
};
use crate::judge::{Line, Target};
use crate::row::{Measured as _, Row};
use serde::Deserialize;
use std::sync::LazyLock;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Book {
    promises: Vec<Written>,
    dearest: Vec<Dearest>,
}

/// A promise as it stands in the file: a line for each of `ours`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    at: Vec<String>,
    #[serde(default)]
    except: Vec<String>,
    what: String,
    figure: Figure,
    ours: Vec<String>,
    #[serde(default)]
    run: Run,
    peer: Option<String>,
    #[serde(default)]
    target: Target,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Dearest {
    what: String,
    figure: Figure,
    emulated: bool,
    below: f64,
}

#[derive(Clone, PartialEq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Figure {
    Rate,
    Total,
    Stop,
    CpuSource,
    CpuDestination,
    /// Of the larger VM process of both hosts.
    VmProcessMib,
    GuestAlive,
    /// A number of the details, by its name there.
    Detail(String),
}

/// Which run a promise is held against.
#[derive(Clone, Copy, PartialEq, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Run {
    #[default]
    Median,
    Least,
    Most,
}

/// Rows that a promise speaks of.
#[derive(Clone, Default)]
pub(crate) struct Chosen {
    /// How the system's name begins.
    pub system: String,
    pub encrypted: Option<bool>,
    pub prepared: Option<bool>,
    /// Another cell of the scenario than the promise's own.
    pub cell: Option<String>,
}

/// A promise about one kind of our moves.
pub(crate) struct Promise {
    at: Vec<String>,
    except: Vec<String>,
    pub what: String,
    pub figure: Figure,
    pub ours: Chosen,
    pub run: Run,
    pub peer: Option<Chosen>,
    pub target: Target,
}

static BOOK: LazyLock<Book> = LazyLock::new(|| {
    toml::from_str(include_str!("promises.toml")).expect("a test reads promises.toml")
});
static ALL: LazyLock<Vec<Promise>> = LazyLock::new(|| {
    let read = BOOK
        .promises
        .iter()
        .map(Written::read)
        .collect::<Result<Vec<_>, _>>();
    read.expect("a test reads promises.toml")
        .into_iter()
        .flatten()
        .collect()
});

/// All promises of cells, in the order of the file.
pub(crate) fn all() -> &'static [Promise] {
    &ALL
}

impl Written {
    fn read(&self) -> Result<Vec<Promise>, String> {
        let one = |kind: &String| {
            let (secrecy, memory) = kind
                .split_once(' ')
                .ok_or(format!("'{kind}' are not two words"))?;
            let told = |text: &str| text.replace("{kind}", secrecy).replace("{memory}", memory);
            let peer = self.peer.as_deref().map(|text| Chosen::read(&told(text)));
            Ok(Promise {
                at: self.at.clone(),
                except: self.except.clone(),
                what: told(&self.what),
                figure: self.figure.clone(),
                ours: Chosen::read(&format!("godwit {kind}"))?,
                run: self.run,
                peer: peer.transpose()?,
                target: self.target,
            })
        };
        self.ours.iter().map(one).collect()
    }
}

impl Chosen {
    fn read(text: &str) -> Result<Self, String> {
        let (text, cell) = text
            .split_once(" at ")
            .map_or((text, None), |(text, cell)| (text, Some(cell)));
        let mut words = text.split(' ');
        let mut chosen = Self {
            system: words.next().unwrap_or_default().into(),
            cell: cell.map(str::to_owned),
            ..Self::default()
        };
        for word in words {
            match word {
                "plain" | "encrypted" => chosen.encrypted = Some(word == "encrypted"),
                "cold" | "prepared" => chosen.prepared = Some(word == "prepared"),
                _ => return Err(format!("'{word}' in '{text}' says nothing about a row")),
            }
        }
        Ok(chosen)
    }

    pub fn fits(&self, row: &Row) -> bool {
        row.system.starts_with(&self.system)
            && self
                .encrypted
                .is_none_or(|encrypted| is_encrypted(row) == encrypted)
            && self
                .prepared
                .is_none_or(|prepared| (row.destination == "prepared") == prepared)
    }
}

impl Promise {
    pub fn is_at(&self, scenario: &str, cell: &str) -> bool {
        let place = format!("{scenario} {cell}");
        let any = |patterns: &[String]| patterns.iter().any(|pattern| fits(pattern, &place));
        any(&self.at) && !any(&self.except)
    }
}

/// Whether a text is like a pattern in which `*` stands for anything.
fn fits(pattern: &str, text: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == text,
        Some((head, "")) => text.starts_with(head),
        Some((head, tail)) => text
            .strip_prefix(head)
            .is_some_and(|rest| rest.char_indices().any(|(at, _)| fits(tail, &rest[at..]))),
    }
}

impl Figure {
    pub fn of(&self, row: &Row) -> Option<f64> {
        match self {
            Self::Rate => RATE(row),
            Self::Total => TOTAL(row),
            Self::Stop => STOP(row),
            Self::CpuSource => COST_SOURCE(row),
            Self::CpuDestination => COST_DESTINATION(row),
            Self::VmProcessMib => vm_process_mib(row),
            Self::GuestAlive => row
                .details
                .get("guest_alive")?
                .as_bool()
                .map(|alive| f64::from(u8::from(alive))),
            Self::Detail(name) => row.detail(name),
        }
    }
}

/// Promises that hold everywhere: the worst cell is shown. What must never happen is looked for in all rows, costs in those
/// that are compared.
pub(crate) fn of_all(groups: &[Group], compared: &[Group]) -> Vec<Line> {
    let everywhere = |what: String, ours, target| Line {
        cell: "every cell".into(),
        what,
        ours,
        peer: None,
        note: String::new(),
        target,
    };
    let ours = || groups.iter().filter(|group| is_ours(group.head()));
    let mut found = Vec::new();
    for dearest in &BOOK.dearest {
        let chosen = compared.iter().filter(|group| {
            let row = group.head();
            is_ours(row) && is_encrypted(row) && row.link_gbps.is_some() == dearest.emulated
        });
        let costs = chosen.filter_map(|group| {
            let spread = group.spread(|row| Some(dearest.figure.of(row)? / volume(row)))?;
            Some((spread, named(group.head())))
        });
        if let Some((worst, name)) = costs.max_by(|one, two| one.0.median.total_cmp(&two.0.median))
        {
            let what = format!("{}; the dearest: {name}", dearest.what);
            found.push(everywhere(what, Some(worst), Target::Below(dearest.below)));
        }
    }
    let tried = |row: &&Row| !row.outcome.starts_with("skipped");
    for group in ours() {
        if group.rows.iter().all(|row| !row.completed()) && group.rows.iter().any(tried) {
            let what = format!(
                "runs that ended: {} {}",
                named(group.head()),
                group.head().encryption
            );
            let none = Spread::of(&vec![0.0; group.rows.len()]);
            found.push(everywhere(what, none, Target::Above(1.0)));
        }
    }
    let rows: Vec<&Row> = ours()
        .flat_map(|group| group.rows.iter().copied())
        .collect();
    let ended: Vec<bool> = rows
        .iter()
        .copied()
        .filter(|row| tried(row))
        .map(Row::completed)
        .collect();
    let equal: Vec<bool> = rows.iter().filter_map(|row| row.ram_equal).collect();
    for (what, all) in [
        ("part of our runs that came to their end", ended),
        ("part of our runs whose memory was equal", equal),
    ] {
        found.push(everywhere(what.into(), part(&all), Target::Above(1.0)));
    }
    found
}

/// A guest that writes has more sent than it has memory; costs are then for what was sent.
fn volume(row: &Row) -> f64 {
    let sent = row.details["report"]["bytes_on_wire"]
        .as_f64()
        .unwrap_or(0.0);
    (sent / (row.ram_gib * 1_073_741_824.0)).max(1.0)
}

fn named(row: &Row) -> String {
    let (scenario, cell) = place(row);
    format!("{scenario} {cell} {}", row.destination)
}

fn part(all: &[bool]) -> Option<Spread> {
    let true_ones = all.iter().filter(|one| **one).count();
    let part = Spread::of(&[true_ones as f64 / all.len() as f64])?;
    (!all.is_empty()).then_some(Spread {
        runs: all.len(),
        ..part
    })
}

/// The larger VM process of both hosts.
fn vm_process_mib(row: &Row) -> Option<f64> {
    let hosts = row.details.get("rss_mib_by_process")?.as_array()?;
    let processes = hosts.iter().filter_map(|host| host.as_array()).flatten();
    let ours = processes.filter(|pair| pair[0] == "godwit vm-process");
    ours.filter_map(|pair| pair[1].as_f64()).reduce(f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::judge::lines;
    use serde_json::json;

    fn row(scenario: &str, cell: &str, details: serde_json::Value) -> Row {
        Row {
            scenario: scenario.into(),
            cell: cell.into(),
            ram_gib: 1.0,
            ram_equal: Some(true),
            total_s: None,
            details,
            ..Row::sample("godwit", "aes-256-gcm", "cold")
        }
    }

    fn reached(rows: &[Row], what: &str) -> Option<bool> {
        let lines = lines(rows);
        let mut found = lines.iter().filter(|line| line.what.contains(what));
        let line = found.next()?;
        assert!(found.next().is_none(), "two lines: {what}");
        line.reached()
    }

    #[test]
    fn each_promise_is_judged_from_its_cell() {
        let moves = json!({"jain_index": 0.99, "guest_alive": true});
        let processes = json!([
            [["godwit vm-process", 13.0], ["qemu", 90.0]],
            [["godwit vm-process", 70.0]]
        ]);
        let mut far = row("distance", "ram=8,rtt=150", json!({}));
        far.throughput_gb_per_s = Some(0.114);
        let rows = [
            row("link", "moves=4", moves),
            row("link", "gbps=1,ram=2", json!({"eta_at_tenth_error": 0.2})),
            row("hot", "cancelled", json!({"guest_speed_after": 0.99})),
            row(
                "hot",
                "rate=2",
                json!({"write_share": 0.6, "first_pass_ratio": 0.95}),
            ),
            row("hot", "rate=2,reader", json!({"read_share": 0.93})),
            row("idle", "ram=4", json!({"rss_mib_by_process": processes})),
            far,
        ];
        assert_eq!(reached(&rows, "Jain"), Some(true));
        assert_eq!(reached(&rows, "all guests alive"), Some(true));
        assert_eq!(reached(&rows, "estimate at a tenth"), Some(false));
        assert_eq!(reached(&rows, "after a cancelled"), Some(true));
        assert_eq!(reached(&rows, "what the guest writes"), Some(false));
        assert_eq!(reached(&rows, "first pass"), Some(true));
        assert_eq!(reached(&rows, "only reads"), Some(true));
        assert_eq!(reached(&rows, "MiB of the VM process"), Some(false));
        assert_eq!(reached(&rows, "of a link of 1 Gb/s"), Some(true));
        assert_eq!(reached(&rows, "nothing of the kind"), None);
    }

    #[test]
    fn one_run_that_did_not_end_or_was_not_equal_is_told() {
        let good = row("idle", "base", json!({}));
        assert_eq!(
            reached(std::slice::from_ref(&good), "came to their end"),
            Some(true)
        );
        let mut bad = good.clone();
        bad.outcome = "failed: no".into();
        bad.ram_equal = Some(false);
        assert_eq!(
            reached(&[good.clone(), bad.clone()], "came to their end"),
            Some(false)
        );
        assert_eq!(reached(&[good, bad], "memory was equal"), Some(false));
    }

    #[test]
    fn the_cost_of_a_guest_that_writes_is_for_what_was_sent() {
        let sent = 2.0 * 1_073_741_824.0;
        let mut hot = row("hot", "rate=2", json!({"report": {"bytes_on_wire": sent}}));
        hot.cpu_source_s_per_gb = Some(2.0);
        let lines = lines(&[hot]);
        let worst = lines
            .iter()
            .find(|line| line.what.contains("hot rate=2 cold"));
        assert_eq!(worst.unwrap().ours.unwrap().median, 1.0);
    }

    #[test]
    fn a_word_that_the_promises_do_not_know_is_refused() {
        let good = "dearest = []\npromises = [{ at = [\"idle *\"], what = \"{kind}\", figure = \"rate\", ours = [\"plain cold\"], \
                    peer = \"qemu {kind} at ram=1\", target = { below = 1.0 } }]";
        let read = |text: &str| {
            let book: Book = toml::from_str(text).map_err(|error| error.to_string())?;
            book.promises
                .iter()
                .map(Written::read)
                .collect::<Result<Vec<_>, _>>()
        };
        let promise = read(good).unwrap().remove(0).remove(0);
        assert_eq!(
            (promise.what.as_str(), promise.peer.unwrap().cell.as_deref()),
            ("plain", Some("ram=1"))
        );
        for (from, to) in [
            ("plain cold", "plain cool"),
            ("qemu {kind}", "qemu {kind} fast"),
            ("\"rate\"", "\"rites\""),
            ("below", "beneath"),
            ("what =", "whit ="),
        ] {
            assert!(
                good.contains(from) && read(&good.replace(from, to)).is_err(),
                "{to}"
            );
        }
        assert!(
            fits("hot rate=2*", "hot rate=2,reader")
                && fits("* moves=4", "link moves=4")
                && fits("*", "")
        );
        assert!(
            !fits("hot rate=2", "hot rate=2,reader")
                && !fits("distance *loss=0.1", "distance rtt=5,loss=0.01")
        );
    }

    #[test]
    fn every_promise_fits_a_cell_that_is_measured() {
        let cells = crate::plan::cells(&crate::plan::Choice::default()).unwrap();
        for promise in all() {
            assert!(
                cells
                    .iter()
                    .any(|cell| promise.is_at(&cell.scenario, &cell.name)),
                "{}",
                promise.what
            );
        }
    }
}
