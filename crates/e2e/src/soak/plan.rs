//! What a round does, worked out from a seed before it begins: which VM moves, what is broken, when and for how long.
//!
//! Pure. Owns the table of faults, and with it what each fault excuses: the one place of the soak's expectations. The
//! same seed and number give the same plan, whatever ran before; where each VM is at its beginning, the rounds before decide. Refuses: names of faults that are not in the table.

use std::collections::BTreeSet;

/// What a step does to the site.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Act {
    /// Ends a daemon or process as `kill -9` does.
    Kill(Part),
    /// Stops it for a while as `kill -STOP` does.
    Stop(Part),
    /// Cuts links of a host for a while.
    Cut(Cut),
    /// Leaves no room on the file system of a machine's state directory for a while.
    FillDisk(Place),
    /// Takes the power of one host for a while.
    PowerCut,
    /// Takes the power of all hosts at once, for a while.
    PowerCutAll,
    /// Puts an older copy of the controller's database back.
    OldDatabase,
    /// Puts an older copy of a host's state directory back while the host is off.
    OldHostState,
    /// The same, certainly of a host that the VM has left; a person takes the host out of the site then.
    OldLeftHost,
    /// Starts a copy of a host's disk on another machine.
    Clone,
    /// A person's ordinary command.
    Person(Order),
}

/// What can be killed or stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// The agent of a host.
    Agent,
    Controller,
    /// The VM process of a VM on a host.
    VmProcess,
    /// The QEMU of a VM on a host.
    Qemu,
}

/// Which links are cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Cut {
    Migration,
    Management,
    Both,
}

/// Whose disk is full.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    Host,
    Controller,
}

/// What a person does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Order {
    /// `vm start` of a VM that runs.
    Start,
    /// `vm start --on` another host than the one that has it.
    StartElsewhere,
    /// `vm stop`, which these guests do not hear.
    Stop,
    ForceStop,
    /// `vm stop --force`, then `vm start`.
    Restart,
    /// `vm migrate` while it may be moving already.
    Migrate(Method),
    /// `migration cancel` of what is under way.
    Cancel,
    /// `vm stop --force`, `vm delete`, `vm create`, `vm start`.
    Recreate,
    /// `vm move-disk` to the other datastore of its host.
    MoveDisk(Method),
    /// `vm snapshot create`, while there are fewer than are taken of one VM at most.
    TakeSnapshot,
    /// `vm snapshot delete` of one of those that there are.
    DeleteSnapshot,
    /// The holder's power goes; `host fenced`, then `vm start --on` another host; the power comes back.
    FenceHost,
    /// The holder's power goes; `vm resolve` gives the VM to another host; the power comes back.
    ResolveFenced,
    /// The holder's links are cut; a person says that it is off, starts the VM on another host, and keeps one copy.
    FalseWord,
    /// All power goes, the controller's too; one host comes back and `host boot-alone` is said there.
    BootAlone,
    /// A host's power goes; `host remove --confirm-unreachable`; it joins again with an empty disk.
    RemoveHost,
    /// A move whose destination's agent dies before it can report, then `vm start --on` a third host.
    StartWhileAway,
}

/// How disks are copied while their guests work with them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Method {
    Mirror,
    DirtyTracking,
    /// Refused of disks that have snapshots.
    Snapshot,
}

impl Method {
    /// What `--method` calls it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Mirror => "mirror",
            Self::DirtyTracking => "dirty-tracking",
            Self::Snapshot => "snapshot",
        }
    }
}

/// The group of faults about snapshots: with one of them, rounds begin with snapshots, too.
const SNAPSHOTS: &str = "snapshots";
/// The group of moves by other methods: with one of them, rounds' own moves go by each, too.
const METHODS: &str = "methods";

/// A row of the table.
#[derive(Debug)]
pub struct Fault {
    /// What `--only` and `--without` call it.
    pub name: &'static str,
    /// What `--only` and `--without` call it with its likes.
    pub group: &'static str,
    pub act: Act,
    /// How often it is drawn, beside the others.
    pub weight: u32,
    /// It takes the whole round's attention: a round has at most one of these.
    pub heavy: bool,
    /// A VM that this touched may stay down, shown as such, until a person acts.
    pub needs_person: bool,
}

const fn fault(name: &'static str, group: &'static str, act: Act, weight: u32) -> Fault {
    Fault {
        name,
        group,
        act,
        weight,
        heavy: false,
        needs_person: false,
    }
}

const fn heavy(name: &'static str, group: &'static str, act: Act, weight: u32) -> Fault {
    Fault {
        heavy: true,
        ..fault(name, group, act, weight)
    }
}

const fn for_a_person(name: &'static str, group: &'static str, act: Act, weight: u32) -> Fault {
    Fault {
        needs_person: true,
        ..heavy(name, group, act, weight)
    }
}

/// All that can happen.
pub static FAULTS: [Fault; 39] = [
    fault("kill-agent", "kills", Act::Kill(Part::Agent), 4),
    fault("kill-controller", "kills", Act::Kill(Part::Controller), 4),
    fault("kill-vm-process", "kills", Act::Kill(Part::VmProcess), 4),
    fault("kill-qemu", "kills", Act::Kill(Part::Qemu), 4),
    fault("stop-agent", "stops", Act::Stop(Part::Agent), 3),
    fault("stop-controller", "stops", Act::Stop(Part::Controller), 2),
    fault("stop-vm-process", "stops", Act::Stop(Part::VmProcess), 3),
    fault("stop-qemu", "stops", Act::Stop(Part::Qemu), 3),
    fault("cut-migration", "cuts", Act::Cut(Cut::Migration), 3),
    fault("cut-management", "cuts", Act::Cut(Cut::Management), 3),
    fault("cut-both", "cuts", Act::Cut(Cut::Both), 3),
    fault("full-disk", "disks", Act::FillDisk(Place::Host), 3),
    fault(
        "full-controller",
        "disks",
        Act::FillDisk(Place::Controller),
        2,
    ),
    heavy("power-host", "power", Act::PowerCut, 4),
    heavy("power-all", "power", Act::PowerCutAll, 2),
    heavy("old-database", "old-copies", Act::OldDatabase, 3),
    for_a_person("old-host-state", "old-copies", Act::OldHostState, 2),
    heavy("old-left-host", "old-copies", Act::OldLeftHost, 3),
    heavy("clone", "old-copies", Act::Clone, 3),
    fault("start", "commands", Act::Person(Order::Start), 2),
    fault(
        "start-elsewhere",
        "commands",
        Act::Person(Order::StartElsewhere),
        3,
    ),
    fault("stop", "commands", Act::Person(Order::Stop), 1),
    fault("force-stop", "commands", Act::Person(Order::ForceStop), 2),
    fault("restart", "commands", Act::Person(Order::Restart), 2),
    fault(
        "migrate",
        "commands",
        Act::Person(Order::Migrate(Method::Mirror)),
        3,
    ),
    fault("cancel", "commands", Act::Person(Order::Cancel), 3),
    fault(
        "move-disk",
        "commands",
        Act::Person(Order::MoveDisk(Method::Mirror)),
        3,
    ),
    heavy("recreate", "commands", Act::Person(Order::Recreate), 2),
    heavy("false-word", "operator", Act::Person(Order::FalseWord), 3),
    heavy("boot-alone", "operator", Act::Person(Order::BootAlone), 2),
    heavy("fence-host", "operator", Act::Person(Order::FenceHost), 3),
    heavy(
        "resolve-fenced",
        "operator",
        Act::Person(Order::ResolveFenced),
        3,
    ),
    heavy("remove-host", "operator", Act::Person(Order::RemoveHost), 2),
    heavy(
        "start-while-away",
        "operator",
        Act::Person(Order::StartWhileAway),
        3,
    ),
    fault(
        "take-snapshot",
        SNAPSHOTS,
        Act::Person(Order::TakeSnapshot),
        4,
    ),
    fault(
        "delete-snapshot",
        SNAPSHOTS,
        Act::Person(Order::DeleteSnapshot),
        4,
    ),
    fault(
        "migrate-dirty",
        METHODS,
        Act::Person(Order::Migrate(Method::DirtyTracking)),
        2,
    ),
    fault(
        "move-disk-dirty",
        METHODS,
        Act::Person(Order::MoveDisk(Method::DirtyTracking)),
        2,
    ),
    fault(
        "move-disk-logs",
        METHODS,
        Act::Person(Order::MoveDisk(Method::Snapshot)),
        3,
    ),
];

/// A host by what it is to a VM when the step happens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// The one that had the VM when the round began.
    Holder,
    /// The one that the round's move goes to.
    Destination,
    Third,
}

/// One thing that happens in a round.
#[derive(Debug, Clone, Copy)]
pub struct Step {
    /// When, from the round's begin.
    pub at_ms: u64,
    /// How long, for what passes.
    pub for_ms: u64,
    pub fault: &'static Fault,
    /// Which VM, by number.
    pub vm: usize,
    pub role: Role,
}

#[derive(Debug, Clone)]
pub struct Round {
    /// From 1 on.
    pub number: u32,
    /// VM whose move is under way while things happen, by number.
    pub vm: usize,
    /// Which of the other hosts it moves to.
    pub destination: usize,
    /// Cap of that move, Mb/s: so slow that there is time to break it; none is full speed.
    pub cap_mbit: Option<u64>,
    /// Whether the VM's disk, where it has one, moves to the other datastore of its host in the place of that.
    pub in_place: bool,
    /// How that copies the disk.
    pub method: Method,
    /// How many snapshots of the disk are taken before it moves.
    pub snapshots: usize,
    /// What happens, in order of time.
    pub steps: Vec<Step>,
}

/// Where a fault may strike; moves begin at 0.
const FIRST_MS: u64 = 100;
/// The round's last fault begins before this.
const LAST_MS: u64 = 3_500;
/// Shortest and longest time of what passes by itself.
const LASTS_MS: (u64, u64) = (300, 4_000);

/// The faults that may be drawn.
pub fn choose(only: &[String], without: &[String]) -> Result<Vec<&'static Fault>, String> {
    let known: BTreeSet<&str> = FAULTS
        .iter()
        .flat_map(|fault| [fault.name, fault.group])
        .chain(["all"])
        .collect();
    for name in only.iter().chain(without) {
        if !known.contains(name.as_str()) {
            let all: Vec<&str> = known.into_iter().collect();
            return Err(format!("no fault '{name}'; there are: {}", all.join(", ")));
        }
    }
    let is_in = |list: &[String], fault: &Fault| {
        let mut list = list.iter();
        list.any(|name| name == fault.name || name == fault.group || name == "all")
    };
    let wanted = |fault: &&Fault| (only.is_empty() || is_in(only, fault)) && !is_in(without, fault);
    Ok(FAULTS.iter().filter(wanted).collect())
}

impl Round {
    /// The plan of a round: the same for the same seed, number, faults and sizes.
    pub fn plan(seed: u64, number: u32, faults: &[&'static Fault], vms: usize) -> Self {
        let mut dice = Dice::new(seed, number);
        let vm = dice.below(vms);
        let destination = dice.below(2);
        let cap_mbit = [None, Some(100), Some(300)][dice.below(3)];
        let count = if faults.is_empty() {
            0
        } else {
            1 + dice.below(3)
        };
        let mut steps: Vec<Step> = Vec::new();
        for _ in 0..count {
            let heavy_allowed = !steps.iter().any(|step| step.fault.heavy);
            let step = dice.step(faults, heavy_allowed, vm, vms);
            let again = |old: &Step, new: &Step| old.fault.name == new.fault.name;
            steps.extend(step.filter(|step| !steps.iter().any(|old| again(old, step))));
        }
        steps.sort_by_key(|step| step.at_ms);
        let in_place = dice.below(3) == 0;
        // Drawn last: without them a plan is what it was before there were these.
        let snapshots = [0, 0, 1, 2][dice.below(4)];
        let method = [
            Method::Mirror,
            Method::Mirror,
            Method::DirtyTracking,
            Method::Snapshot,
        ][dice.below(4)];
        let may = |group: &str| faults.iter().any(|fault| fault.group == group);
        Self {
            number,
            vm,
            destination,
            cap_mbit,
            in_place,
            method: if may(METHODS) { method } else { Method::Mirror },
            snapshots: if may(SNAPSHOTS) { snapshots } else { 0 },
            steps,
        }
    }
}

impl std::fmt::Display for Round {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let what = |step: &Step| {
            let fault = match step.fault.act {
                Act::Person(_) => step.fault.name.to_owned(),
                _ => format!("{}@{:?}", step.fault.name, step.role).to_lowercase(),
            };
            match step.vm == self.vm {
                true => fault,
                false => format!("{fault} of another VM"),
            }
        };
        let names: Vec<String> = self.steps.iter().map(what).collect();
        let names = if names.is_empty() {
            "nothing".to_owned()
        } else {
            names.join(" + ")
        };
        if self.snapshots > 0 {
            write!(f, "snapshots: {}, ", self.snapshots)?;
        }
        if self.method != Method::Mirror {
            write!(f, "by {}, ", self.method.name())?;
        }
        write!(f, "{names}")
    }
}

/// A small generator of numbers, SplitMix64: a plan depends on nothing else.
struct Dice(u64);

impl Dice {
    fn new(seed: u64, number: u32) -> Self {
        let mut dice = Self(seed ^ u64::from(number).wrapping_mul(0xd134_2543_de82_ef95));
        dice.next();
        dice
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end.max(1) as u64) as usize
    }

    fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.next() % (high - low)
    }

    fn step(
        &mut self,
        faults: &[&'static Fault],
        heavy_allowed: bool,
        moving: usize,
        vms: usize,
    ) -> Option<Step> {
        let fault = self.draw(faults, heavy_allowed)?;
        // Most faults are about the VM that moves.
        let vm = if self.below(4) == 0 {
            self.below(vms)
        } else {
            moving
        };
        let role = [
            Role::Holder,
            Role::Destination,
            Role::Holder,
            Role::Destination,
            Role::Third,
        ][self.below(5)];
        Some(Step {
            at_ms: self.between(FIRST_MS, LAST_MS),
            for_ms: self.between(LASTS_MS.0, LASTS_MS.1),
            fault,
            vm,
            role,
        })
    }

    fn draw(&mut self, faults: &[&'static Fault], heavy_allowed: bool) -> Option<&'static Fault> {
        let allowed = || faults.iter().filter(|fault| heavy_allowed || !fault.heavy);
        let total: u32 = allowed().map(|fault| fault.weight).sum();
        let mut left = self.below(total as usize) as u32;
        for fault in allowed() {
            if left < fault.weight {
                return Some(fault);
            }
            left -= fault.weight;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> Vec<&'static Fault> {
        choose(&[], &[]).unwrap()
    }

    #[test]
    fn a_seed_and_a_number_give_one_plan() {
        for number in 1..50 {
            let [one, two] = [(); 2].map(|()| format!("{:?}", Round::plan(7, number, &all(), 3)));
            assert_eq!(one, two);
        }
        let of = |seed, number| format!("{:?}", Round::plan(seed, number, &all(), 3).steps);
        assert_ne!(of(7, 1), of(8, 1));
        assert_ne!(of(7, 1), of(7, 2));
    }

    #[test]
    fn every_fault_comes_up_and_a_round_has_one_heavy_one() {
        let mut seen = BTreeSet::new();
        for number in 0..2000 {
            let round = Round::plan(1, number, &all(), 3);
            assert!(!round.steps.is_empty() && round.steps.len() <= 3);
            assert!(round.steps.iter().filter(|step| step.fault.heavy).count() <= 1);
            assert!(round.steps.is_sorted_by_key(|step| step.at_ms));
            seen.extend(round.steps.iter().map(|step| step.fault.name));
        }
        assert_eq!(seen.len(), FAULTS.len());
    }

    #[test]
    fn faults_are_left_out_by_name_and_by_group() {
        let names = |only: &[&str], without: &[&str]| {
            let owned =
                |list: &[&str]| list.iter().map(|one| (*one).to_owned()).collect::<Vec<_>>();
            choose(&owned(only), &owned(without))
                .map(|faults| faults.iter().map(|fault| fault.name).collect::<Vec<_>>())
        };
        assert_eq!(
            names(&["old-copies"], &["old-database"]).unwrap(),
            ["old-host-state", "old-left-host", "clone"]
        );
        assert!(!names(&[], &["kills"]).unwrap().contains(&"kill-qemu"));
        assert!(names(&[], &["all"]).unwrap().is_empty());
        assert!(
            names(&["kill-everything"], &[])
                .unwrap_err()
                .contains("kill-agent")
        );
        assert!(Round::plan(1, 1, &[], 3).steps.is_empty());
    }

    #[test]
    fn a_plan_without_snapshots_and_methods_has_none_of_them_and_with_them_most_moves_are_as_before()
     {
        let without = choose(&[], &[SNAPSHOTS.into(), METHODS.into()]).unwrap();
        assert_eq!(without.len(), FAULTS.len() - 5);
        let rounds = 400;
        let (mut mirrored, mut with_snapshots, mut logs_to_a_host) = (0, 0, 0);
        for number in 0..rounds {
            let old = Round::plan(3, number, &without, 3);
            assert_eq!((old.method, old.snapshots), (Method::Mirror, 0));
            let new = Round::plan(3, number, &all(), 3);
            logs_to_a_host += u32::from(!new.in_place && new.method == Method::Snapshot);
            mirrored += u32::from(new.method == Method::Mirror);
            with_snapshots += u32::from(new.snapshots > 0);
        }
        assert!(mirrored * 3 > rounds, "{mirrored} of {rounds}");
        assert!(logs_to_a_host > 0);
        assert!(with_snapshots * 4 > rounds, "{with_snapshots} of {rounds}");
    }

    #[test]
    fn a_step_about_another_vm_than_the_one_that_moves_says_so() {
        let is_one = |round: &Round| {
            let mut steps = round.steps.iter().filter(|step| step.vm != round.vm);
            steps.any(|step| step.fault.name == "kill-agent" && step.role == Role::Holder)
        };
        let mut rounds = (1..1000).map(|number| Round::plan(4242, number, &all(), 3));
        let round = rounds.find(is_one).unwrap();
        let told = round.to_string();
        let names: Vec<&str> = told.split(" + ").collect();
        assert_eq!(names.len(), round.steps.len());
        for (name, step) in names.iter().zip(&round.steps) {
            let is_marked = name.ends_with("of another VM");
            assert_eq!(is_marked, step.vm != round.vm, "{told}");
        }
        assert!(told.contains("kill-agent@holder of another VM"), "{told}");
    }
}
