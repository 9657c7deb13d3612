//! The page beside the paper: each of its figures and tables with what is printed there, what was measured here, and why they differ.
//!
//! What the paper says is data (`paper.toml`). Pure: out of rows alone. Refuses a page without the two marks between which it
//! writes, and words of the file that it does not know; what was not measured is said to be so.

use super::plan::Way;
use super::promises::Group;
use super::row::{Results, Row};
use super::{methods, picture};
use crate::group::{Spread, in_order};
use crate::row::Measured as _;
use crate::table::{figures, machine_list};
use godwit_testkit::page::figure;
use godwit_testkit::page::html::Table;
use serde::Deserialize;
use serde_json::Value;
use std::sync::LazyLock;

/// What is between these two lines of a page is written anew.
const BEGIN: &str = "<!-- measured: begin -->";
const END: &str = "<!-- measured: end -->";

/// A picture that is on the page has a name of its own, since other pages show other runs.
const PICTURE: (&str, &str) = ("storage-", "paper-");

const ABOUT: &str = "Each of the paper's figures and tables, with what is printed there and what was measured here. Medians; in brackets the lowest and the highest run; \
    `1 run` where there is only one. `by division`: a quotient of two printed numbers. Where only a curve is drawn and no text gives a number, none was \
    read off it. Figure 1 draws the layers of a product and has no numbers. The paper's is incremental tracking without hot blocks left out, but for figures 2 and 3. Of snapshotting \
    all redo logs lie at the destination here; the paper's first one lies at the source.";

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Paper {
    exhibits: Vec<Exhibit>,
}

/// A figure or a table.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Exhibit {
    name: String,
    section: String,
    title: String,
    #[serde(default)]
    pictures: Vec<String>,
    #[serde(default)]
    table: Option<Also>,
    claims: Vec<Claim>,
    why: String,
}

/// A table of the bench that is shown whole.
#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Also {
    Passes,
    WriteTimes,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Claim {
    what: String,
    method: Method,
    paper: String,
    #[serde(default)]
    ours: Option<Ours>,
    /// What is so without measuring.
    #[serde(default)]
    here: Option<String>,
}

#[derive(Clone, Copy, PartialEq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Method {
    Mirror,
    /// Dirty block tracking in its first form,
    Dbt,
    Incremental,
    HotBlocks,
    Snapshots,
    /// A copy without a load, the fastest that there is.
    Offline,
    /// The load itself, whoever moves.
    Load,
}

/// Where our number comes from.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Ours {
    /// The scenario and the cell, with a blank between them.
    at: String,
    figure: Figure,
    #[serde(default)]
    over: Option<String>,
    #[serde(default)]
    over_method: Option<Method>,
    #[serde(default)]
    over_figure: Option<Figure>,
    #[serde(default)]
    divided_by: Option<f64>,
    #[serde(default)]
    told: Told,
}

#[derive(Clone, Copy, Default, PartialEq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Told {
    #[default]
    Value,
    Times,
    /// By how much more.
    Percent,
}

#[derive(Clone, Copy, PartialEq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Figure {
    /// How many of the moves ended.
    Ended,
    Total,
    OverBound,
    Stall,
    IopsBefore,
    Iops,
    /// What is lost of the load, in percent: in the whole move, in its first pass, and after it.
    Penalty,
    FirstPenalty,
    IteratingPenalty,
    Lost,
    OverEquation,
    BeforeWrite,
    BeforeVariance,
    Write,
    Variance,
    FirstWrite,
    FirstVariance,
    IteratingWrite,
    IteratingVariance,
    Passes,
    SecondPassMb,
    LaterMb,
    DeferredMb,
}

static PAPER: LazyLock<Paper> =
    LazyLock::new(|| toml::from_str(include_str!("paper.toml")).expect("a test reads paper.toml"));

/// A page with what lies between its marks written anew, and the pictures that it shows.
pub fn page(
    before: &str,
    results: &Results,
    pictures_at: &str,
) -> Result<(String, Vec<(String, String)>), String> {
    let none = || format!("the page has no lines '{BEGIN}' and '{END}', in this order");
    let (head, rest) = before.split_once(BEGIN).ok_or_else(none)?;
    let (_, tail) = rest.split_once(END).ok_or_else(none)?;
    let pictures = pictures(results);
    let text = measured(results, &pictures, pictures_at);
    Ok((format!("{head}{BEGIN}\n\n{text}\n{END}{tail}"), pictures))
}

/// Those that an exhibit names and that the rows have.
fn pictures(results: &Results) -> Vec<(String, String)> {
    let named = |name: &String| {
        let mut exhibits = PAPER.exhibits.iter();
        exhibits.any(|exhibit| exhibit.pictures.contains(name))
    };
    let all = picture::files(results).into_iter();
    let shown = all.filter(|(name, _)| named(name));
    shown.map(|(name, svg)| (here(&name), svg)).collect()
}

fn here(name: &str) -> String {
    name.replacen(PICTURE.0, PICTURE.1, 1)
}

fn measured(results: &Results, pictures: &[(String, String)], pictures_at: &str) -> String {
    let rows = &results.rows;
    let groups = in_order(rows);
    let mut text = format!("{ABOUT}\n\n{}\n", runs(rows));
    for exhibit in &PAPER.exhibits {
        let Exhibit {
            name,
            section,
            title,
            why,
            ..
        } = exhibit;
        text += &format!("\n### {name} (section {section}): {title}\n\n");
        let mut table = Table::new(["what", "method", "the paper", "here"]);
        for claim in &exhibit.claims {
            let method = claim.method.name();
            table.row([&*claim.what, method, &claim.paper, &told(claim, &groups)]);
        }
        text += &table.markdown();
        text += &format!("\n{}\n", why.trim());
        for picture in &exhibit.pictures {
            let picture = here(picture);
            if pictures.iter().any(|(name, _)| *name == picture) {
                text += &format!(
                    "\n<img src=\"{pictures_at}/{picture}\" width=\"760\" alt=\"{name}, as measured here: {title}\">\n"
                );
            }
        }
        if let Some(table) = exhibit.table.and_then(|table| table.of(rows)) {
            text += &format!("\n{}", table.markdown());
        }
    }
    let machine = machine_list(&results.machine);
    text + &machine.replacen("## The machine", "### The machine", 1)
}

/// What was run, how often, and what became of it.
fn runs(rows: &[Row]) -> String {
    let count = |is: &dyn Fn(&Row) -> bool| rows.iter().filter(|row| is(row)).count();
    let gave_up = count(&|row| row.outcome.starts_with("gave up"));
    let completed = count(&|row| row.completed());
    let lost: u64 = rows.iter().filter_map(|row| row.acked_writes_lost).sum();
    let unequal = count(&|row| row.disks_equal == Some(false));
    let shares: Vec<f64> = rows
        .iter()
        .filter_map(|row| row.detail("stolen_share"))
        .collect();
    let stolen = Spread::of(&shares).map_or(String::new(), |spread| {
        format!(
            " The hypervisor took {:.1} % of all cores' time in the median, {:.1} % at most.",
            spread.median * 100.0,
            spread.most * 100.0
        )
    });
    format!(
        "{} runs: {completed} completed, {gave_up} gave up, {} ended in another way. Acknowledged writes that were lost: {lost}; destinations that \
         were not equal: {unequal}.{stolen}",
        rows.len(),
        rows.len() - completed - gave_up,
    )
}

impl Also {
    fn of(self, rows: &[Row]) -> Option<Table> {
        let of = |scenarios: &[&str]| -> Vec<Row> {
            let chosen = rows
                .iter()
                .filter(|row| scenarios.contains(&row.scenario.as_str()));
            chosen.cloned().collect()
        };
        match self {
            Self::Passes => methods::passes(&of(&["iterations"])),
            Self::WriteTimes => methods::write_times(&of(&["latency", "double"])),
        }
    }
}

impl Method {
    fn name(self) -> &'static str {
        match self {
            Self::Mirror => "IO mirroring",
            Self::Dbt => "dirty block tracking",
            Self::Incremental => "incremental",
            Self::HotBlocks => "incremental, hot blocks left out",
            Self::Snapshots => "snapshotting",
            Self::Offline => "offline",
            Self::Load => "the load",
        }
    }

    fn has(self, row: &Row) -> bool {
        let way = match self {
            Self::Mirror | Self::Load => Way::Mirror,
            Self::Dbt => Way::PLAIN,
            Self::Incremental => Way::INCREMENTAL,
            Self::HotBlocks => Way::TRACKING,
            Self::Snapshots => Way::Snapshot,
            Self::Offline => return row.system == "offline",
        };
        row.system == "godwit" && row.method == way.name()
    }

    /// The runs in a cell; of several systems those of the fastest.
    fn group<'a, 'b>(self, at: &str, groups: &'b [Group<'a>]) -> Option<&'b Group<'a>> {
        let of_cell = groups.iter().filter(|group| {
            let row = group.head();
            self.has(row) && format!("{} {}", row.scenario, row.cell) == at
        });
        let time = |group: &Group| group.median(|row| row.total_s).unwrap_or(f64::INFINITY);
        of_cell.min_by(|one, other| time(one).total_cmp(&time(other)))
    }
}

/// What stands in our column.
fn told(claim: &Claim, groups: &[Group]) -> String {
    if let Some(here) = &claim.here {
        return here.clone();
    }
    let Some(ours) = &claim.ours else {
        return "no such method".into();
    };
    let Some(group) = claim.method.group(&ours.at, groups) else {
        return "not measured".into();
    };
    if ours.figure == Figure::Ended {
        let done = group.rows.iter().filter(|row| row.completed()).count();
        return format!("{done} of {}", group.rows.len());
    }
    let Some(spread) = ours.figure.spread(group) else {
        return without(group);
    };
    let said = match ours.told {
        Told::Value => ours.figure.with_unit(figures(spread)),
        Told::Times | Told::Percent => match ours.base(claim.method, groups) {
            Some(base) if base > 0.0 => {
                let ratio = spread.median / base / ours.divided_by.unwrap_or(1.0);
                ours.told.ratio(ratio)
            }
            _ => return "not measured: there is nothing to hold it against".into(),
        },
    };
    let once = if spread.runs == 1 { ", 1 run" } else { "" };
    // Of a method that ends or gives up by chance both are told.
    let gave_up = group.rows.iter().filter(|row| gave_up(row)).count();
    let ended = match gave_up {
        0 => String::new(),
        all if all == group.rows.len() => ", gave up".into(),
        some => format!(", {some} of {} gave up", group.rows.len()),
    };
    format!("{said}{once}{ended}")
}

/// Why a group has no such number.
fn without(group: &Group) -> String {
    let mut rows = group.rows.iter();
    let Some(first) = rows.find(|row| !row.completed()) else {
        return "not measured".into();
    };
    match first.detail("tried_s") {
        Some(tried_s) => format!("gave up after {} s", figure(tried_s)),
        None if gave_up(first) => "gave up".into(),
        None => format!(
            "none: {}",
            first.outcome.chars().take(60).collect::<String>()
        ),
    }
}

fn gave_up(row: &Row) -> bool {
    row.outcome.starts_with("gave up")
}

impl Told {
    fn ratio(self, ratio: f64) -> String {
        match self {
            Self::Percent => format!("{:+.1} %", (ratio - 1.0) * 100.0),
            Self::Times | Self::Value => format!("{ratio:.2} times"),
        }
    }
}

impl Ours {
    /// The median that ours is held against.
    fn base(&self, method: Method, groups: &[Group]) -> Option<f64> {
        let at = self.over.as_ref().unwrap_or(&self.at);
        let group = self.over_method.unwrap_or(method).group(at, groups)?;
        let figure = self.over_figure.unwrap_or(self.figure);
        Some(figure.spread(group)?.median)
    }
}

impl Figure {
    /// Of all runs that have it: those that gave up have what was seen until then.
    fn spread(self, group: &Group) -> Option<Spread> {
        let numbers = group.rows.iter().filter_map(|row| self.of(row));
        Spread::of(&numbers.collect::<Vec<_>>())
    }

    fn of(self, row: &Row) -> Option<f64> {
        match self {
            Self::Ended => None,
            Self::Total => row.total_s,
            Self::OverBound => row.over_bound_pct(),
            Self::Stall => row.switch_stall_ms,
            Self::IopsBefore => row.iops_before,
            Self::Iops => row.iops_during,
            Self::Penalty => lost_pct(row, row.iops_during),
            Self::FirstPenalty => lost_pct(row, row.detail("first_pass_iops")),
            Self::IteratingPenalty => lost_pct(row, row.detail("iterating_iops")),
            Self::Lost => picture::lost_s(row),
            Self::OverEquation => Some(row.iops_during? / row.detail("equation_1_iops")?),
            Self::BeforeWrite => row.detail("before_write_mean_ms"),
            Self::BeforeVariance => row.detail("before_write_variance"),
            Self::Write => row.write_latency_ms,
            Self::Variance => row.write_latency_variance,
            Self::FirstWrite => row.detail("first_pass_write_mean_ms"),
            Self::FirstVariance => row.detail("first_pass_write_variance"),
            Self::IteratingWrite => row.detail("iterating_write_mean_ms"),
            Self::IteratingVariance => row.detail("iterating_write_variance"),
            Self::Passes => Some(passes(row)?.len() as f64),
            Self::SecondPassMb => {
                let second = passes(row)?.get(1)?;
                Some(second.get("copied_bytes")?.as_f64()? / 1e6)
            }
            Self::LaterMb => {
                let later = passes(row)?.iter().skip(1);
                Some(
                    later
                        .filter_map(|pass| megabytes(pass, "copied_bytes"))
                        .sum(),
                )
            }
            Self::DeferredMb => {
                let put_off = passes(row)?.iter();
                let put_off = put_off.filter_map(|pass| megabytes(pass, "deferred_bytes"));
                Some(put_off.fold(0.0, f64::max))
            }
        }
    }

    fn with_unit(self, number: String) -> String {
        let unit = match self {
            Self::Total | Self::Lost => " s",
            Self::Stall
            | Self::BeforeWrite
            | Self::Write
            | Self::FirstWrite
            | Self::IteratingWrite => " ms",
            Self::OverBound | Self::Penalty | Self::FirstPenalty | Self::IteratingPenalty => " %",
            Self::IopsBefore | Self::Iops => " a second",
            Self::SecondPassMb | Self::LaterMb | Self::DeferredMb => " MB",
            Self::Ended
            | Self::OverEquation
            | Self::BeforeVariance
            | Self::Variance
            | Self::FirstVariance
            | Self::IteratingVariance
            | Self::Passes => "",
        };
        number + unit
    }
}

fn lost_pct(row: &Row, iops: Option<f64>) -> Option<f64> {
    Some((1.0 - iops? / row.iops_before?) * 100.0)
}

fn passes(row: &Row) -> Option<&Vec<Value>> {
    row.details.get("iterations")?.as_array()
}

fn megabytes(pass: &Value, name: &str) -> Option<f64> {
    Some(pass.get(name)?.as_f64()? / 1e6)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::storage::plan::{Set, System};
    use crate::storage::sets;
    use serde_json::json;

    fn row(cell: &str, method: &str, total_s: Option<f64>) -> Row {
        Row {
            scenario: "oio".into(),
            cell: cell.into(),
            system: "godwit".into(),
            method: method.into(),
            total_s,
            iops_before: Some(100.0),
            iops_during: Some(60.0),
            outcome: match total_s {
                Some(_) => "completed".into(),
                None => "gave up: too much is written".into(),
            },
            details: json!({"tried_s": 41.2}),
            ..Row::default()
        }
    }

    fn written(rows: Vec<Row>) -> String {
        let results = Results {
            machine: Value::Null,
            rows,
        };
        let before = format!("# A page\n\n{BEGIN}\nold\n{END}\n\nmore\n");
        page(&before, &results, "pictures").unwrap().0
    }

    #[test]
    fn every_number_of_ours_has_a_cell_and_a_method_that_is_measured_there() {
        let cells = sets::of(Set::Whole);
        let is_measured = |at: &str, method: Method| {
            let mut of_name = cells
                .iter()
                .filter(|cell| format!("{} {}", cell.scenario, cell.name) == at);
            of_name.any(|cell| {
                let mut systems = cell.systems.iter();
                systems.any(|system| {
                    let is_offline = method == Method::Offline && *system == System::DataMover;
                    is_offline || method.has(&cell.row(*system, 1))
                })
            })
        };
        for exhibit in &PAPER.exhibits {
            for claim in &exhibit.claims {
                let Some(ours) = &claim.ours else { continue };
                let place = format!("{}: {}", exhibit.name, claim.what);
                assert!(is_measured(&ours.at, claim.method), "{place}");
                let over = ours.over.as_ref().unwrap_or(&ours.at);
                let method = ours.over_method.unwrap_or(claim.method);
                assert!(is_measured(over, method), "{place}");
                let is_ratio = ours.told != Told::Value;
                let is_over =
                    ours.over.is_some() || ours.over_method.is_some() || ours.over_figure.is_some();
                assert_eq!(is_ratio, is_over, "{place}");
                assert!(claim.here.is_none(), "{place}");
            }
        }
    }

    #[test]
    fn what_was_measured_stands_beside_the_papers_and_what_was_not_is_told() {
        let text = written(vec![
            row("oio=2", "mirror", Some(6.0)),
            row("oio=32", "mirror", Some(8.0)),
            row("oio=32", "dirty-tracking plain", None),
            row("oio=2", "snapshot", Some(6.0)),
            row("oio=32", "snapshot", Some(9.0)),
        ]);
        let has = |line: &str| assert!(text.contains(line), "{line}: {text}");
        assert!(text.starts_with("# A page") && text.ends_with("\nmore\n"));
        assert!(!text.contains("\nold\n"));
        has(
            "| duration at 32 outstanding IOs over that at 2 | IO mirroring | 11.8 % more at most | +33.3 %, 1 run |",
        );
        has("| duration at 2 | incremental | no number | not measured |");
        has(
            "| moves that end at 32 (text, section 3.4) | dirty block tracking | all, after a downtime above 28 s | 0 of 1 |",
        );
        has("| at 32 | dirty block tracking | above 28 s | gave up after 41.2 s |");
        has("| at 32 | IO mirroring | less again; below both kinds of tracking | 40.0 %, 1 run |");
        has("dirty block tracking | more than at 16 | 40.0 %, 1 run, gave up |");
        has(
            "| duration at 32 outstanding IOs over that at 2 | snapshotting | 1.4x | 1.50 times, 1 run |",
        );
        has("| snapshotting | 85 % | not measured |");
        has("5 runs: 4 completed, 1 gave up, 0 ended in another way.");
        has("<img src=\"pictures/paper-oio-duration.svg\"");
        assert!(!text.contains("paper-size-duration"), "{text}");
    }

    #[test]
    fn a_page_without_its_marks_is_refused() {
        let refused = page("# A page", &Results::default(), "pictures").unwrap_err();
        assert!(refused.contains("no lines"), "{refused}");
        let turned = format!("{END}\n{BEGIN}");
        assert!(page(&turned, &Results::default(), "pictures").is_err());
    }
}
