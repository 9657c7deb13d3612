//! What can be measured: guests, networks, systems, and the cells that `cells.toml` makes of them.
//!
//! Pure. Refuses: names of scenarios and cells that there are not, a choice that leaves nothing, and in the table every
//! word that it does not know.

use crate::row::Row;
use crate::system::System;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::sync::LazyLock;

const RUNS_CLAIMED: u32 = 5;
const RUNS_OTHER: u32 = 2;
/// A peer is cut off at so many times our time.
pub const CUT_OFF_FACTOR: f64 = 10.0;

#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Guest {
    /// Nothing; its memory is as the firmware left it.
    Fresh,
    /// Nothing; its memory is full of random data.
    Idle,
    /// Steps a byte of every page of its first part over and over; the rest is random data.
    Counter {
        /// Size of that part.
        mib: u32,
        /// Pages' worth it steps; none: as fast as it can; 0: not at all.
        #[serde(default)]
        mib_per_s: Option<f64>,
        /// Whether a second vCPU reads the same pages for ever.
        #[serde(default)]
        reader: bool,
    },
    /// Linux with Redis under a client's load.
    Redis {
        data_mib: u32,
        /// Share of operations that write.
        set_percent: u32,
        /// Operations a second; none: half of what the guest can serve.
        ops_per_s: Option<f64>,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Network {
    /// Rate; none: not shaped.
    pub gbps: Option<f64>,
    pub rtt_ms: f64,
    /// Loss in each direction.
    pub loss_pct: f64,
    /// IPv6 instead of IPv4.
    pub six: bool,
    /// Network cards of a host; each has a link like this of its own.
    pub cards: u8,
    /// All cards lie in one subnet, rather than in one each.
    pub one_subnet: bool,
}

impl Default for Network {
    fn default() -> Self {
        Self {
            gbps: None,
            rtt_ms: 0.0,
            loss_pct: 0.0,
            six: false,
            cards: 1,
            one_subnet: false,
        }
    }
}

impl Network {
    /// Whether the link emulator is needed.
    pub fn shaped(&self) -> bool {
        self.gbps.is_some() || self.rtt_ms > 0.0 || self.loss_pct > 0.0 || self.cards > 1
    }
}

/// What happens in a run of a cell.
#[derive(Debug, Clone, Copy, PartialEq, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Course {
    #[default]
    Move,
    /// A guest is moved, and its report is asked for the estimate at a tenth of the way.
    Estimated,
    /// So many guests are moved at the same time; a row each.
    AtOnce(u32),
    /// The link is cut for so many seconds in the middle of the first pass.
    Cut(f64),
    /// The move is cancelled in the middle, and the guest looked at afterwards.
    Cancelled,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cell {
    pub scenario: String,
    /// What is special about it.
    pub name: String,
    pub guest: Guest,
    pub ram_mib: u32,
    #[serde(default = "one")]
    pub vcpus: u32,
    #[serde(default)]
    pub network: Network,
    #[serde(default)]
    pub course: Course,
    /// Whether a ratio is claimed from it.
    #[serde(default)]
    pub claimed: bool,
    /// Times each system runs; 0: what is usual.
    #[serde(default)]
    pub runs: u32,
    /// The systems, ours first, since peers are cut off by its time.
    pub systems: Vec<System>,
}

fn one() -> u32 {
    1
}

impl Cell {
    /// A small cell for a guest by itself.
    pub fn alone(guest: Guest) -> Self {
        Self {
            scenario: "hot".into(),
            name: "alone".into(),
            guest,
            ram_mib: 128,
            vcpus: 1,
            network: Network::default(),
            course: Course::Move,
            claimed: false,
            runs: 1,
            systems: Vec::new(),
        }
    }

    /// A row of this cell with nothing measured yet.
    pub fn row(&self, system: &System, run: u32) -> Row {
        let network = &self.network;
        Row {
            scenario: self.scenario.clone(),
            cell: self.name.clone(),
            system: system.name().into(),
            config: system.config(),
            destination: system.destination().into(),
            encryption: system.encryption().into(),
            streams: match system {
                System::Qemu(way) => way.channels.unwrap_or(1),
                System::Iperf { streams } => *streams,
                _ => 0,
            },
            ram_gib: f64::from(self.ram_mib) / 1024.0,
            vcpus: self.vcpus,
            link_gbps: network.gbps,
            rtt_ms: network.rtt_ms,
            loss_pct: network.loss_pct,
            run,
            ..Row::default()
        }
    }

    /// The systems in the order in which they run in a repetition, from 1: to and fro, since what ran just before leaves its
    /// memory behind. Ours come first in the first one.
    pub fn turn(&self, repetition: u32) -> Vec<&System> {
        let mut systems: Vec<&System> = self.systems.iter().collect();
        if repetition.is_multiple_of(2) {
            systems.reverse();
        }
        systems
    }

    /// Rows of one run of one system.
    pub fn rows_a_run(&self) -> u32 {
        match self.course {
            Course::AtOnce(moves) => moves,
            _ => 1,
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    scenarios: Vec<String>,
    sets: BTreeMap<String, Vec<String>>,
    quick: Vec<Group>,
    whole: Vec<Group>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Group {
    scenario: String,
    #[serde(default)]
    common: toml::Table,
    cells: Vec<toml::Table>,
}

static TABLE: LazyLock<Table> =
    LazyLock::new(|| toml::from_str(include_str!("cells.toml")).expect("a test reads cells.toml"));

/// All scenarios, in the order of tables and pictures.
pub fn scenarios() -> &'static [String] {
    &TABLE.scenarios
}

impl Table {
    fn cells(&self, groups: &[Group]) -> Result<Vec<Cell>, String> {
        let mut cells = Vec::new();
        for group in groups {
            for own in &group.cells {
                let mut cell = group.common.clone();
                cell.extend(own.clone());
                cell.insert("scenario".into(), group.scenario.clone().into());
                let systems = self.systems(cell.get("systems"))?;
                cell.insert("systems".into(), systems.into());
                let read = cell
                    .try_into()
                    .map_err(|error| format!("{}: {error}", group.scenario))?;
                cells.push(read);
            }
        }
        Ok(cells)
    }

    /// The systems of a cell, each written out.
    fn systems(&self, listed: Option<&toml::Value>) -> Result<Vec<String>, String> {
        let listed = listed
            .and_then(toml::Value::as_array)
            .ok_or("a cell has no list of systems")?;
        let mut systems = Vec::new();
        for word in listed {
            let word = word.as_str().ok_or("a system is no text")?;
            match self.sets.get(word) {
                Some(set) => systems.extend(set.iter().flat_map(|text| alternatives(text))),
                None => systems.extend(alternatives(word)),
            }
        }
        Ok(systems)
    }
}

/// All texts that a text with `(a|b)` in it stands for, the leftmost varying fastest.
fn alternatives(text: &str) -> Vec<String> {
    let inside = text
        .rsplit_once('(')
        .and_then(|(before, rest)| Some((before, rest.split_once(')')?)));
    let Some((before, (choices, after))) = inside else {
        return vec![text.to_owned()];
    };
    let each = choices
        .split('|')
        .map(|choice| format!("{before}{choice}{after}"));
    each.flat_map(|text| alternatives(&text)).collect()
}

/// What to choose from the table.
#[derive(Debug, Clone, Default)]
pub struct Choice {
    /// Only these scenarios; all when empty.
    pub scenarios: Vec<String>,
    pub quick: bool,
    pub runs: Option<u32>,
    /// Only cells of these names, or whose names begin so where none has the name; all when empty.
    pub cells: Vec<String>,
    /// Only systems whose description ([`System::described`]) has one of these in it; all when empty.
    pub systems: Vec<String>,
}

pub fn cells(choice: &Choice) -> Result<Vec<Cell>, String> {
    if let Some(name) = choice
        .scenarios
        .iter()
        .find(|name| !scenarios().contains(name))
    {
        let known = scenarios().join(", ");
        return Err(format!("there is no scenario '{name}'; there are: {known}"));
    }
    let groups = if choice.quick {
        &TABLE.quick
    } else {
        &TABLE.whole
    };
    let mut cells = TABLE.cells(groups)?;
    cells.retain(|cell| choice.scenarios.is_empty() || choice.scenarios.contains(&cell.scenario));
    narrow(&mut cells, choice)?;
    for cell in &mut cells {
        let usual = if cell.claimed && !choice.quick {
            RUNS_CLAIMED
        } else {
            RUNS_OTHER
        };
        let usual = if cell.runs > 0 { cell.runs } else { usual };
        cell.runs = choice.runs.unwrap_or(usual);
    }
    Ok(cells)
}

/// Leaves the cells and systems that were asked for by name.
fn narrow(cells: &mut Vec<Cell>, choice: &Choice) -> Result<(), String> {
    let mut wanted = Vec::new();
    for name in &choice.cells {
        let exact = cells.iter().any(|cell| cell.name == *name);
        let fits = |cell: &&Cell| cell.name == *name || !exact && cell.name.starts_with(name);
        let found = cells.iter().filter(fits);
        let before = wanted.len();
        wanted.extend(found.map(|cell| (cell.scenario.clone(), cell.name.clone())));
        if wanted.len() == before {
            let known: Vec<_> = cells.iter().map(|cell| cell.name.as_str()).collect();
            let known = known.join(" ");
            return Err(format!(
                "no cell has or begins with the name '{name}'; there are: {known}"
            ));
        }
    }
    let place = |cell: &Cell| (cell.scenario.clone(), cell.name.clone());
    cells.retain(|cell| wanted.is_empty() || wanted.contains(&place(cell)));
    for cell in &mut *cells {
        cell.systems.retain(|system| {
            let about = system.described();
            choice.systems.is_empty() || choice.systems.iter().any(|text| about.contains(text))
        });
    }
    cells.retain(|cell| !cell.systems.is_empty());
    if cells.is_empty() {
        return Err("no system of these cells has that in its description".into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::estimate::estimate_s;

    fn all() -> Vec<Cell> {
        cells(&Choice::default()).unwrap()
    }

    #[test]
    fn every_scenario_has_cells_in_the_whole_set() {
        for name in scenarios() {
            assert!(all().iter().any(|cell| cell.scenario == *name), "{name}");
        }
    }

    #[test]
    fn the_quick_set_has_one_cell_each_with_a_peer_and_fits_eight_minutes() {
        let choice = Choice {
            quick: true,
            ..Choice::default()
        };
        let cells = cells(&choice).unwrap();
        let names: Vec<_> = cells.iter().map(|cell| cell.scenario.as_str()).collect();
        assert_eq!(names, ["idle", "zero", "redis", "hot", "distance"]);
        for cell in &cells {
            let peer = |system: &System| matches!(system, System::Qemu(_));
            assert!(cell.systems.iter().any(peer), "{}", cell.scenario);
        }
        assert!(estimate_s(&cells) < 480.0, "{} s", estimate_s(&cells));
    }

    #[test]
    fn the_whole_set_fits_three_hours() {
        assert!(estimate_s(&all()) < 10_800.0, "{} s", estimate_s(&all()));
    }

    #[test]
    fn our_system_comes_first_in_every_cell_since_peers_are_cut_off_by_it() {
        for cell in all() {
            assert_eq!(
                cell.systems[0].name(),
                "godwit",
                "{} {}",
                cell.scenario,
                cell.name
            );
        }
    }

    #[test]
    fn turns_go_to_and_fro_and_every_system_has_one() {
        let cell = &all()[0];
        let (first, second) = (cell.turn(1), cell.turn(2));
        assert_eq!(first, cell.systems.iter().collect::<Vec<_>>());
        assert_eq!(second.last(), first.first());
        assert_eq!(second.iter().rev().copied().collect::<Vec<_>>(), first);
        assert_eq!(cell.turn(3), first);
    }

    #[test]
    fn claimed_cells_run_five_times_and_others_at_most_twice_unless_told() {
        for cell in all() {
            let usual = if cell.claimed { 5..=5 } else { 1..=2 };
            assert!(
                usual.contains(&cell.runs),
                "{} {}",
                cell.scenario,
                cell.name
            );
        }
        let choice = Choice {
            runs: Some(3),
            ..Choice::default()
        };
        assert!(cells(&choice).unwrap().iter().all(|cell| cell.runs == 3));
    }

    #[test]
    fn no_system_stands_twice_in_a_cell() {
        for cell in all() {
            for (index, system) in cell.systems.iter().enumerate() {
                let rest = &cell.systems[index + 1..];
                assert!(
                    !rest.contains(system),
                    "{} {}: {system:?}",
                    cell.scenario,
                    cell.name
                );
            }
        }
    }

    #[test]
    fn a_cell_is_chosen_by_its_name_and_by_its_beginning_where_none_has_it() {
        let chosen = |name: &str| {
            let choice = Choice {
                cells: vec![name.into()],
                ..Choice::default()
            };
            let cells = cells(&choice)?;
            Ok::<_, String>(cells.into_iter().map(|cell| cell.name).collect::<Vec<_>>())
        };
        assert_eq!(chosen("ram=8").unwrap(), ["ram=8"]);
        assert_eq!(
            chosen("ram=8,rtt").unwrap(),
            ["ram=8,rtt=0.5", "ram=8,rtt=150"]
        );
        assert!(chosen("nothing").unwrap_err().contains("cut=30"));
    }

    #[test]
    fn systems_are_chosen_by_a_part_of_what_they_are() {
        let choice = |text: &str| Choice {
            scenarios: vec!["idle".into()],
            systems: vec![text.into()],
            ..Choice::default()
        };
        let ours = cells(&choice("godwit")).unwrap();
        assert!(ours.iter().all(|cell| cell.systems.len() <= 4));
        let tls = cells(&choice("qemu-10.0 multifd-2,ram=anonymous tls prepared")).unwrap();
        assert_eq!((tls.len(), tls[0].systems.len()), (1, 1));
        assert!(cells(&choice("no such thing")).is_err());
    }

    #[test]
    fn an_unknown_scenario_is_refused_with_those_there_are() {
        let choice = Choice {
            scenarios: vec!["idel".into()],
            ..Choice::default()
        };
        assert!(cells(&choice).unwrap_err().contains("idle"));
    }

    #[test]
    fn a_word_that_the_table_does_not_know_is_refused() {
        let read = |text: &str| {
            let table: Table = toml::from_str(text).map_err(|error| error.to_string())?;
            table.cells(&table.whole)
        };
        let good = "scenarios = []\nquick = []\n[sets]\nours = [\"godwit default none cold\"]\n[[whole]]\nscenario = \"idle\"\n\
                    cells = [{ name = \"x\", guest = \"idle\", ram_mib = 1, systems = [\"ours\"] }]";
        assert_eq!(
            read(good).unwrap()[0].systems[0].described(),
            "godwit default none cold"
        );
        for (from, to) in [
            ("\"ours\"] }", "\"hours\"] }"),
            ("default none", "default nine"),
            ("guest = \"idle\"", "guest = \"idol\""),
            ("ram_mib", "ram_mb"),
            ("scenario =", "scenaria ="),
        ] {
            assert!(
                good.contains(from) && read(&good.replace(from, to)).is_err(),
                "{to}"
            );
        }
    }

    #[test]
    fn every_system_is_written_as_it_is_read() {
        let choices = [true, false].map(|quick| Choice {
            quick,
            ..Choice::default()
        });
        for system in choices
            .iter()
            .flat_map(|choice| cells(choice).unwrap())
            .flat_map(|cell| cell.systems)
        {
            assert_eq!(System::try_from(system.described()), Ok(system));
        }
        assert_eq!(
            alternatives("a (b|c) (d|e)"),
            ["a b d", "a c d", "a b e", "a c e"]
        );
    }
}
