//! What the seeds of the site simulator have exercised.
//!
//! Owned by a run, summed over runs. Refuses: nothing.

use super::faults::SiteFault;
use super::jobs::Kind;
use super::model::Exempt;
use godwit_ownership::{Ending, EventKind, StateName};
use godwit_site::{Judged, News, Refusal};
use godwit_types::named;
use std::collections::BTreeMap;

named! {
    /// What became of a disk that only one host has, or of what was written to one.
    pub enum DiskCase {
        Whole => "copies of disks that were whole at their destination",
        Arrived => "copies that became their host's with the holding",
        Settled => "copies that got their name from a successor",
        CameWaits => "copies that wait for their source's word after a migration that failed",
        AskedAgain => "times a source was asked again whether it has the disk",
        EmptyRemoved => "copies removed into which nothing had come",
        PartRemoved => "copies removed that were not whole, by their source's word",
        WholeRemoved => "whole copies removed by their source's word",
        KeptGivenUp => "copies kept by a person's word that their source is gone",
        KeptAnew => "copies kept, since the VM came anew",
        KeptAtStart => "copies kept, since the VM was started there without its source",
        KeptUsed => "kept copies that a person went on from",
        WaitingUsed => "copies that waited for a word, and that a person went on from",
        AnewTooEarly => "VMs that came anew refused, since their source was asked just then",
        SaidHasDisk => "times a source said that it has the disk",
        SaidMoved => "times it said so of one that had moved on its host since",
        SaidWentOn => "times it said so of one that went on with a later migration",
        SaidPutBack => "times it said so of a copy that was put back, which nobody tells from the disk",
        NotAlong => "times it did not, since it knows of no such disk that is there still",
        LookFailed => "times it did not, since the image could not be read",
        LookNotThere => "times it did not, since no image was there",
        LookAnother => "times it did not, since another image was there",
        LookOlder => "times it did not, since an older copy was there",
        FormerRemoved => "former images removed once the handover was confirmed",
        FormerLeft => "former images left alone, since another file has their name",
        NameTaken => "copies refused, since a file has their name",
        NotThere => "starts refused, since the image is not on that host",
        Refused => "images of one host refused for what they say",
        ElsewhereRefused => "starts refused away from the host that wrote the disk",
        LetGo => "images of one host let go by a person",
        Provided => "images that a person brought or made",
        LostUnflushed => "images that lost with their host's power what was not flushed",
        SharedLostUnflushed => "shared images that lost with a host's power what was not flushed",
        NameLost => "names of copies that a power cut took back",
        MoveBegun => "disks that began to move on their host",
        MoveNotClean => "moves of a disk refused, since an earlier one is not settled",
        PlaceTaken => "moves of a disk refused, since a file has the name",
        MoveCancelled => "moves of a disk called off",
        MoveFailed => "moves of a disk that ended without a change",
        SecondLeftOut => "second images that did not keep up, and were filled again",
        EndedInCopying => "moves of a disk that ended with their process while it was copied",
        EndedEqual => "moves of a disk that ended with their process once both images were equal",
        EndedInSwitch => "moves of a disk that ended with their process between the record and the change",
        SwitchNotWritten => "changes of a disk's image that could not be written, or nobody knows",
        WentBack => "changes of a disk's image that were taken back",
        Switched => "disks that went on with their second image",
        Followed => "descriptions that followed a disk which moved on its host",
        LeftRemoved => "former images of disks that moved on their host removed",
        LeftIsAnother => "other files in the place of a former image left alone",
        CopyRemoved => "half-made second images removed",
        CopyForgotten => "second images left alone, since they may be the disk by now",
        MovedSinceRefused => "starts refused, since the disk moved after the state directory was copied",
        OlderStateOverruled => "older state directories overruled by what a guest has",
        SecondTakenByOldState => "second images taken for the disk by a state directory from before their move",
        DescribedAnew => "disks that a person described in their place",
        PlaceCopied => "places of disks that a controller copied from the holder",
        LostForGood => "guests that go on with less, since a host is lost or by a person's word",
    }
}

/// What became of images, as a run tells it.
const OF_IMAGES: [&str; 8] = [
    "images opened",
    "images refused, since they are in use",
    "images refused for what they say",
    "images opened by a host that could not know that they are older",
    "images let go by a person",
    "images refused, since who has them cannot be read",
    "images refused, since who has them cannot be written",
    "times a controller heard what the holder of an image knows of it",
];

/// Counts over any number of seeds.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SiteCoverage {
    /// How often each fault struck.
    pub faults: BTreeMap<SiteFault, u64>,
    /// How often each fault struck while a VM was in each state at some host.
    pub struck: BTreeMap<(StateName, SiteFault), u64>,
    /// How often each event reached a core in each state.
    pub pairs: BTreeMap<(StateName, EventKind), u64>,
    /// Migrations begun, completed, taken back, failed or cancelled.
    pub migrations: [u64; 4],
    /// Times a VM was in doubt.
    pub doubts: u64,
    pub surveys: u64,
    pub grants: u64,
    /// Off holders asked to let a VM go.
    pub releases: u64,
    /// Hosts told that another was granted since what they gave away.
    pub overtaken: u64,
    /// Rounds of questions before a boot, and answers to them.
    pub questions: u64,
    /// Answers to these questions.
    pub answers: u64,
    /// Words of a controller that hosts refused.
    pub stale: u64,
    /// Migrations whose report was written.
    pub reports: u64,
    /// Looks at a controller that knew to be restored from an old copy.
    pub restored: u64,
    pub takeovers: u64,
    /// Looks at a VM that several hosts held.
    pub twice: u64,
    /// Answers that a host was removed.
    pub removed_answers: u64,
    /// A person's word at a host, against which somebody who answered spoke.
    pub refused_words: u64,
    /// What was refused, by kind.
    pub refusals: BTreeMap<&'static str, u64>,
    /// What a host judged of its own VMs.
    pub judged: BTreeMap<&'static str, u64>,
    /// What controllers told people.
    pub news: BTreeMap<&'static str, u64>,
    pub jobs: BTreeMap<&'static str, u64>,
    /// VMs that were not judged, by ground.
    pub exempt: BTreeMap<Exempt, u64>,
    /// VMs that were judged to the end.
    pub judged_vms: u64,
    /// What became of images, in the order of [`OF_IMAGES`].
    pub images: [u64; 8],
    pub disks: BTreeMap<DiskCase, u64>,
    /// What guests were told is durable.
    pub flushes: u64,
    pub steps: u64,
}

fn bump<K: Ord>(counts: &mut BTreeMap<K, u64>, key: K) {
    *counts.entry(key).or_default() += 1;
}

fn sum<K: Ord + Clone>(mine: &mut BTreeMap<K, u64>, theirs: &BTreeMap<K, u64>) {
    for (key, n) in theirs {
        *mine.entry(key.clone()).or_default() += n;
    }
}

impl SiteCoverage {
    pub(crate) fn pair(&mut self, state: StateName, event: EventKind) {
        bump(&mut self.pairs, (state, event));
    }

    pub(crate) fn ended(&mut self, was_source: bool, outcome: Ending) {
        if was_source {
            let slot = match outcome {
                Ending::Completed => 1,
                Ending::Refused => 2,
                Ending::Cancelled | Ending::Failed => 3,
            };
            self.migrations[slot] += 1;
        }
    }

    pub(crate) fn refusal(&mut self, refusal: &Refusal) {
        let name = match refusal {
            Refusal::Silent { .. } => "a host is silent",
            Refusal::Stranger { .. } => "a host is unknown",
            Refusal::Held { .. } => "a host holds it",
            Refusal::HandingOver { .. } => "a handover has not ended",
            Refusal::GiftKept(_) => "a gift is older than what is held",
            Refusal::Twice { .. } => "several hosts hold it",
            Refusal::Stale { .. } => "something happened meanwhile",
            Refusal::Exhausted { .. } => "no generation is left",
            Refusal::Restored { .. } => "the database is an old copy",
            Refusal::Answers { .. } => "a host that is said to be off answers",
            Refusal::MayRun { .. } => "a silent host may run VMs",
            Refusal::HoldsVms { .. } => "a host holds VMs",
            Refusal::UnknownHost { .. } => "no such host",
            Refusal::NotItself { .. } => "a host is not itself",
            _ => "something else",
        };
        bump(&mut self.refusals, name);
    }

    pub(crate) fn judged(&mut self, judged: &Judged) {
        let name = match judged {
            Judged::Boot => "boots",
            Judged::Wait(_) => "waits",
            Judged::Never(_) => "does not boot",
            Judged::Yield(_) => "gives way",
        };
        bump(&mut self.judged, name);
    }

    pub(crate) fn news(&mut self, news: &News) {
        let name = match news {
            News::RestoredCopy { .. } => "the database is an old copy",
            News::FencedAnswered {
                was_never_off: true,
                ..
            } => "a host said to be off was never off",
            News::FencedAnswered { .. } => "a host said to be off answers",
            News::NotItself { .. } => "a host is not itself",
            News::Stranger { .. } => "a record names an unknown host",
            News::Replaced { .. } => "another controller has taken over",
            News::Impossible { .. } => "a host tells an impossible word",
            News::Held { .. } => "another host holds a VM",
        };
        bump(&mut self.news, name);
    }

    pub(crate) fn job(&mut self, kind: &Kind) {
        let name = match kind {
            Kind::Create { .. } => "create",
            Kind::Start { .. } => "start",
            Kind::Stop => "stop",
            Kind::Pause => "pause",
            Kind::Delete => "delete",
            Kind::Move { .. } => "migrate",
            Kind::MoveDisk => "move the disk",
            Kind::Clean { .. } => "let a host leave the set",
            Kind::End { .. } => "end a copy",
        };
        bump(&mut self.jobs, name);
    }

    /// Adds another run's counts.
    pub fn add(&mut self, other: &Self) {
        sum(&mut self.faults, &other.faults);
        sum(&mut self.struck, &other.struck);
        sum(&mut self.pairs, &other.pairs);
        sum(&mut self.refusals, &other.refusals);
        sum(&mut self.judged, &other.judged);
        sum(&mut self.news, &other.news);
        sum(&mut self.jobs, &other.jobs);
        sum(&mut self.exempt, &other.exempt);
        sum(&mut self.disks, &other.disks);
        for (mine, theirs) in self.migrations.iter_mut().zip(other.migrations) {
            *mine += theirs;
        }
        for (mine, theirs) in self.images.iter_mut().zip(other.images) {
            *mine += theirs;
        }
        let counts = [
            (&mut self.doubts, other.doubts),
            (&mut self.surveys, other.surveys),
            (&mut self.grants, other.grants),
            (&mut self.releases, other.releases),
            (&mut self.overtaken, other.overtaken),
            (&mut self.questions, other.questions),
            (&mut self.answers, other.answers),
            (&mut self.stale, other.stale),
            (&mut self.reports, other.reports),
            (&mut self.restored, other.restored),
            (&mut self.takeovers, other.takeovers),
            (&mut self.twice, other.twice),
            (&mut self.removed_answers, other.removed_answers),
            (&mut self.refused_words, other.refused_words),
            (&mut self.judged_vms, other.judged_vms),
            (&mut self.steps, other.steps),
            (&mut self.flushes, other.flushes),
        ];
        for (mine, theirs) in counts {
            *mine += theirs;
        }
    }

    /// The cases of disks that were never reached.
    pub fn missing(&self) -> Vec<DiskCase> {
        let all = DiskCase::ALL.iter().copied();
        all.filter(|case| !self.disks.contains_key(case)).collect()
    }

    /// The report of a run, line by line.
    pub fn lines(&self) -> Vec<String> {
        let mut lines = Vec::new();
        let mut line = |n: u64, what: String| lines.push(format!("{n:>10}  {what}"));
        for fault in SiteFault::ALL {
            let times = self.faults.get(fault).copied().unwrap_or(0);
            line(times, fault.name().to_owned());
        }
        let [begun, completed, taken_back, failed] = self.migrations;
        line(
            begun,
            format!(
                "migrations begun: {completed} completed, {taken_back} taken back after a refusal, {failed} failed or cancelled"
            ),
        );
        line(self.reports, "migrations whose end was written".into());
        line(self.doubts, "times in doubt".into());
        line(self.surveys, "surveys".into());
        line(self.grants, "grants".into());
        line(self.releases, "off holders asked to let a VM go".into());
        line(
            self.overtaken,
            "times a host was told to give up an overtaken gift".into(),
        );
        line(self.questions, "rounds of questions before a boot".into());
        line(self.answers, "answers to them".into());
        line(self.removed_answers, "of them 'removed'".into());
        line(
            self.refused_words,
            "people's words refused at a host".into(),
        );
        line(self.stale, "stale words of a controller refused".into());
        line(self.takeovers, "takeovers of a restored controller".into());
        line(self.twice, "looks at a VM that several hosts held".into());
        let named = [
            ("asked", &self.jobs),
            ("refused", &self.refusals),
            ("judged", &self.judged),
            ("told", &self.news),
        ];
        for (what, counts) in named {
            for (name, n) in counts {
                line(*n, format!("{what}: {name}"));
            }
        }
        for (n, what) in self.images.into_iter().zip(OF_IMAGES) {
            line(n, what.into());
        }
        line(self.flushes, "flushes acknowledged to guests".into());
        for (n, what) in self.of_disks() {
            line(n, what.into());
        }
        line(self.judged_vms, "VMs judged to the end".into());
        for why in Exempt::ALL {
            let n = self.exempt.get(&why).copied().unwrap_or(0);
            line(n, format!("VMs not judged: {}", why.name()));
        }
        line(self.pairs.len() as u64, "pairs of state and event".into());
        line(self.struck.len() as u64, "pairs of state and fault".into());
        line(self.steps, "steps".into());
        lines
    }

    fn of_disks(&self) -> impl Iterator<Item = (u64, &'static str)> {
        let times = |case| self.disks.get(case).copied().unwrap_or(0);
        DiskCase::ALL
            .iter()
            .map(move |case| (times(case), case.name()))
    }

    /// Every fault, with how often it struck in each state.
    pub fn table(&self) -> Vec<String> {
        let mut lines = Vec::new();
        for fault in SiteFault::ALL {
            let states = StateName::ALL.iter().map(|state| {
                let n = self.struck.get(&(*state, *fault)).copied().unwrap_or(0);
                format!("{}={n}", state.name())
            });
            let states: Vec<String> = states.collect();
            lines.push(format!("{}: {}", fault.name(), states.join(" ")));
        }
        lines
    }
}
