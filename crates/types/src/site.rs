//! What the controller, the hosts and the simulator say to each other about a whole site: which host may hold which
//! VM, in the order of the controller's words.
//!
//! Pure data; what follows from it is decided by crate `site`. Refuses: nothing.

use crate::certificate::CertificateDates;
use crate::control_api::HostState;
use crate::ids::{Generation, HostName, VmName};
use crate::image::KnownImage;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::SocketAddr;
use utoipa::ToSchema;

/// Header of every command of a controller: its [`Stamp`] as text.
pub const STAMP_HEADER: &str = "godwit-stamp";

/// The place of a word of the controller among all its words. A restored database has a lower one than the hosts, and
/// takes a new epoch before it grants anything.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    Hash,
    PartialOrd,
    Ord,
    Default,
    Serialize,
    Deserialize,
    ToSchema,
)]
pub struct Stamp {
    /// Rises when a restored database takes over.
    pub epoch: u64,
    /// Rises with every grant, survey and change of the table, within an epoch.
    pub number: u64,
}

impl Stamp {
    /// Whether it is before every word that a controller says.
    pub fn is_before_all(&self) -> bool {
        *self == Self::default()
    }
}

impl fmt::Display for Stamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.epoch, self.number)
    }
}

impl std::str::FromStr for Stamp {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let (epoch, number) = text.split_once('.').ok_or(())?;
        let digits = |part: &str| match part.bytes().all(|byte| byte.is_ascii_digit()) {
            true => part.parse().map_err(|_| ()),
            false => Err(()),
        };
        Ok(Self {
            epoch: digits(epoch)?,
            number: digits(number)?,
        })
    }
}

/// What a host's durable record of a VM says, in one word.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(tag = "claim", rename_all = "kebab-case")]
pub enum Claim {
    /// Nothing of the VM is held or awaited here.
    #[default]
    No,
    /// The VM is being received; nothing is promised.
    Receiving { from: HostName },
    /// This host alone may run the VM.
    Holds {
        generation: Generation,
        /// Whether the guest should run (or be paused), rather than be off.
        on: bool,
    },
    /// The VM was given away; the other host has not answered yet.
    Gave {
        generation: Generation,
        /// The host that may take it.
        to: HostName,
    },
    /// Everything is loaded and promised; only the source knows whether it gave.
    Promised {
        /// The generation that would be taken.
        generation: Generation,
        from: HostName,
    },
    /// The VM was given away and has arrived.
    Moved {
        generation: Generation,
        /// The host that took it.
        to: HostName,
    },
}

impl Claim {
    /// Whether the host might run the VM now or after an answer that is on its way.
    pub fn may_hold(&self) -> bool {
        matches!(
            self,
            Self::Holds { .. } | Self::Gave { .. } | Self::Promised { .. }
        )
    }

    /// The generation under which the host may run the VM.
    pub fn held(&self) -> Option<Generation> {
        match self {
            Self::Holds { generation, .. } => Some(*generation),
            _ => None,
        }
    }

    /// The generation and the host that the VM went to, as far as this host knows.
    pub fn went(&self) -> Option<(Generation, &HostName)> {
        match self {
            Self::Gave { generation, to } | Self::Moved { generation, to } => {
                Some((*generation, to))
            }
            _ => None,
        }
    }

    /// The other host that the record names.
    pub fn other(&self) -> Option<&HostName> {
        match self {
            Self::Receiving { from } | Self::Promised { from, .. } => Some(from),
            Self::Gave { to, .. } | Self::Moved { to, .. } => Some(to),
            Self::No | Self::Holds { .. } => None,
        }
    }
}

/// Asks a host whether it may hold a VM; a no binds: the host refuses older grants and permissions from then on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SurveyRequest {
    /// A generation above every one that the controller knows.
    pub level: Generation,
}

/// Tells a host that gave a VM away, and was not answered, that the VM went on without it: another host was let hold it, or
/// it was deleted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GiftOvertaken {
    /// The newest generation under which it was held.
    pub by: Generation,
    /// A person gives up the guest that stands there, too.
    pub with_guest: bool,
}

/// What the durable record of one VM answers to a survey.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordAnswer {
    /// The highest generation that the host has ever seen; the level asked for, when it holds nothing.
    pub highest: Generation,
    /// What the record says.
    pub claim: Claim,
}

/// A host's durable answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SurveyAnswer {
    /// The highest generation that the host has ever seen; the level asked for, when it holds nothing.
    pub highest: Generation,
    /// What its record says.
    pub claim: Claim,
    /// Whether a guest of it may be there: a QEMU or a VM process of it lives, or nobody can tell.
    pub may_live: bool,
    /// Which of the host's lives answers.
    pub instance: Instance,
    /// What it knows of the controller's words.
    pub knows: SiteHeard,
    /// What this host knows of the images on shared storage of a VM that it holds.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub images: Vec<KnownImage>,
}

/// One record of a host, as it tells it to other hosts and to a controller.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordSaid {
    pub vm: VmName,
    /// The highest generation that the host has ever seen.
    pub highest: Generation,
    /// What the record says.
    pub claim: Claim,
    /// Whether a guest of it may be there: a QEMU or a VM process of it lives, or nobody can tell.
    #[serde(default = "yes")]
    pub may_live: bool,
    /// What this host knows of the images on shared storage of a VM that it holds.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub images: Vec<KnownImage>,
}

impl RecordSaid {
    /// Every generation that the record names.
    pub fn generations(&self) -> impl Iterator<Item = Generation> {
        let named = match &self.claim {
            Claim::Holds { generation, .. }
            | Claim::Gave { generation, .. }
            | Claim::Promised { generation, .. }
            | Claim::Moved { generation, .. } => Some(*generation),
            Claim::No | Claim::Receiving { .. } => None,
        };
        [self.highest].into_iter().chain(named)
    }
}

fn yes() -> bool {
    true
}

/// Which of a host's lives speaks: a copy of its disk on another machine, or put back on the same one, differs.
#[derive(
    Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize, ToSchema,
)]
pub struct Instance {
    /// Counts the starts of the agent, in its state directory. A lower one than was heard before shows an old copy.
    pub counter: u64,
    /// Changes at each boot of the host.
    pub boot_id: String,
    /// The machine's own id.
    pub machine_id: String,
}

/// What the controller holds of the life of a host that speaks.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize,
)]
#[serde(rename_all = "kebab-case")]
pub enum Standing {
    /// It is the host that was enrolled, in its newest life.
    #[default]
    Known,
    /// Its name was removed from the site.
    Removed,
    /// Another life with the same certificate answers, too.
    SecondInstance,
    /// Its state directory is an older copy of one that was heard before.
    OldCopy,
}

impl fmt::Display for Standing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Known => "known",
            Self::Removed => "removed",
            Self::SecondInstance => "second-instance",
            Self::OldCopy => "old-copy",
        })
    }
}

/// A host in the site's table.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SiteHost {
    pub name: HostName,
    /// Where its agent listens.
    pub address: SocketAddr,
    /// Serial number of its certificate, lower-case hex.
    pub serial: String,
    /// The highest counter of its lives that was heard.
    pub counter: u64,
    /// The machine's own id; empty before it was heard.
    #[serde(default)]
    pub machine_id: String,
}

/// A VM in the site's table.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SiteVm {
    /// Who held it last, as far as the controller knows.
    pub holder: Option<HostName>,
    pub held: Generation,
    /// Every host that may hold it.
    pub may_hold: BTreeSet<HostName>,
    /// Whether it was deleted.
    pub deleted: bool,
    /// When the controller wrote this.
    pub stamp: Stamp,
}

/// The site's table, as a host keeps it: what it knows while the controller is away.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SiteTable {
    /// The newest word of a controller that this host has heard.
    pub stamp: Stamp,
    /// Up to which word the table is complete.
    pub complete: Stamp,
    /// Hosts that are enrolled.
    pub hosts: Vec<SiteHost>,
    /// The word as of which `hosts` is so; tables of earlier builds do not say it.
    #[serde(default, skip_serializing_if = "Stamp::is_before_all")]
    pub hosts_at: Stamp,
    /// Whether the site ever had a second host.
    pub had_second: bool,
    /// Hosts that were removed.
    pub removed: BTreeSet<HostName>,
    pub vms: BTreeMap<VmName, SiteVm>,
}

/// What the controller adds to a host's table.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SiteUpdate {
    /// Up to which word the host's table was complete; another one is answered with what it is.
    pub since: Stamp,
    /// The controller's newest word.
    pub stamp: Stamp,
    /// Up to which word the table is complete afterwards: an earlier one where more is to come.
    pub upto: Stamp,
    /// All hosts that are enrolled.
    pub hosts: Vec<SiteHost>,
    /// All hosts that were removed.
    pub removed: BTreeSet<HostName>,
    /// The VMs that changed since then.
    pub vms: BTreeMap<VmName, SiteVm>,
    /// What the controller holds of the host that reads this.
    pub you: Standing,
}

/// What a host knows of the controller's words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct SiteHeard {
    /// The newest word heard.
    pub stamp: Stamp,
    /// Up to which word its table is complete.
    pub complete: Stamp,
}

/// A VM that a host holds and would boot, though no request asked for it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BootWish {
    pub vm: VmName,
    /// The generation that the host's record holds.
    pub generation: Generation,
}

/// A host asks the controller and every other host, once for all its VMs, before it boots what nobody asked for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SiteQuestion {
    /// The life that asks.
    pub instance: Instance,
    /// What it knows of the controller's words.
    #[serde(default)]
    pub knows: SiteHeard,
    /// What it would boot.
    pub wishes: Vec<BootWish>,
}

/// The answer, from a controller or a host, from what it has on record.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SiteAnswer {
    /// The host that answers; none for a controller.
    pub from: Option<HostName>,
    /// What it holds of the life that asked.
    pub standing: Standing,
    /// A controller that is not in charge (a restored copy) knows too little to let anything boot.
    pub in_charge: bool,
    /// The newest word of a controller that it knows.
    pub stamp: Stamp,
    /// Its table's rows of the VMs asked for.
    pub vms: BTreeMap<VmName, SiteVm>,
    /// Its own records of the VMs asked for; none from a controller.
    pub records: Vec<RecordSaid>,
    /// VMs of which its record cannot be read: it has said nothing of these.
    #[serde(default)]
    pub unread: BTreeSet<VmName>,
    /// Hosts that a person said are off. None from a host.
    #[serde(default)]
    pub off: BTreeSet<HostName>,
    /// VMs that this controller granted to another host since, which holds them and answers: the asker's records of them
    /// may go. None from a host.
    #[serde(default)]
    pub given_on: BTreeSet<VmName>,
    /// The certificate with which the life asked was replaced by a later one, which is in use: why it is an old copy.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub replaced: bool,
}

impl SiteAnswer {
    /// Whether it says anything of a VM.
    pub fn knows(&self, vm: &VmName) -> bool {
        !self.unread.contains(vm)
    }
}

/// Everything a host has on record: what a restored controller reads before it takes over.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WholeSurvey {
    pub instance: Instance,
    /// All its records that can be read.
    pub records: Vec<RecordSaid>,
    /// VMs of which its record cannot be read: it may hold these.
    #[serde(default)]
    pub unread: BTreeSet<VmName>,
    pub table: SiteTable,
}

/// Something that a person must know before anything else, first in every list.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(tag = "alarm", rename_all = "kebab-case")]
pub enum Alarm {
    /// Several hosts hold one VM.
    RunningTwice {
        #[schema(value_type = String)]
        vm: VmName,
        #[schema(value_type = Vec<String>)]
        hosts: Vec<HostName>,
    },
    /// The controller's database is an older copy than what the hosts have heard.
    RestoredController {
        /// Hosts that must answer, or be fenced, before it takes over.
        #[schema(value_type = Vec<String>)]
        waits_for: Vec<HostName>,
        /// Hosts that say that they have heard a later word.
        #[schema(value_type = Vec<String>)]
        said_by: Vec<HostName>,
    },
    /// Another controller has taken over from this one while it ran.
    ReplacedController {
        /// Hosts that say so.
        #[schema(value_type = Vec<String>)]
        said_by: Vec<HostName>,
    },
    /// A host says that it has heard a word that no controller can have said.
    ImpossibleWord {
        #[schema(value_type = String)]
        host: HostName,
    },
    /// A host's records or table name hosts that were never enrolled.
    NamesStrangers {
        #[schema(value_type = String)]
        host: HostName,
        /// Some of those that it names.
        #[schema(value_type = Vec<String>)]
        named: Vec<HostName>,
        /// It names more than can be: what it tells does not count when a restored controller takes over.
        too_many: bool,
    },
    /// A host that was removed is not off: it answers.
    RemovedHostAnswers {
        #[schema(value_type = String)]
        host: HostName,
        /// VMs that it says it runs.
        #[schema(value_type = Vec<String>)]
        vms: Vec<VmName>,
    },
    /// A host runs VMs that this controller does not know, or that were deleted.
    RunsUnknownVms {
        #[schema(value_type = String)]
        host: HostName,
        #[schema(value_type = Vec<String>)]
        vms: Vec<VmName>,
    },
    /// A host and this controller do not accept each other's certificates, because of a clock or a certificate's dates.
    ClockOrCertificate {
        #[schema(value_type = String)]
        host: HostName,
    },
    /// A host's answers are longer, or say more, than any agent's: nothing of them is taken.
    AnswerNotTaken {
        #[schema(value_type = String)]
        host: HostName,
    },
    /// A host does not take this controller's table of the site: it decides by an older one.
    TableNotTaken {
        #[schema(value_type = String)]
        host: HostName,
    },
    /// A host cannot read its record of a VM: it may hold it.
    DamagedRecord {
        #[schema(value_type = String)]
        host: HostName,
        #[schema(value_type = String)]
        vm: VmName,
    },
    /// A row of the controller's database cannot be read.
    UnreadRow { table: String, row: String },
    /// Two machines have the certificate of one host.
    SecondInstance {
        #[schema(value_type = String)]
        host: HostName,
    },
    /// A host's state directory is an older copy.
    OldCopy {
        #[schema(value_type = String)]
        host: HostName,
    },
    /// A host that was said to be off has answered.
    FencedHostAnswered {
        #[schema(value_type = String)]
        host: HostName,
    },
    /// A host's certificate is near its end, or past it, and was not renewed.
    CertificateEnds {
        #[schema(value_type = String)]
        host: HostName,
        /// When it was made and ends.
        #[serde(flatten)]
        dates: CertificateDates,
    },
    /// The controller's own certificate is near its end, or past it, and was not renewed.
    ControllerCertificateEnds {
        /// When it was made and ends.
        #[serde(flatten)]
        dates: CertificateDates,
    },
    /// The certificate authority ends within two years.
    AuthorityEnds {
        /// When it was made and ends.
        #[serde(flatten)]
        dates: CertificateDates,
    },
    /// A host shuts down, or was closed for that and runs on: it boots nothing.
    HostClosed {
        #[schema(value_type = String)]
        host: HostName,
    },
    /// `boot = "alone"` is ignored, since the site has more than one host.
    BootAloneIgnored {
        #[schema(value_type = String)]
        host: HostName,
    },
}

/// How the site stands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SiteView {
    /// The controller's last word.
    pub stamp: Stamp,
    /// Whether it grants anything.
    pub in_charge: bool,
    /// What a person must know, worst first.
    pub alarms: Vec<Alarm>,
    /// The same as sentences, with the commands that end each.
    pub sentences: Vec<String>,
    /// Hosts by name: whether each answers.
    #[schema(value_type = BTreeMap<String, HostState>)]
    pub hosts: BTreeMap<HostName, HostState>,
    /// Those of them that run no guests before their next boot, or 'godwit host open' on them.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    #[schema(value_type = Vec<String>)]
    pub closing: BTreeSet<HostName>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stamp_is_read_as_it_is_written_and_nothing_else_is() {
        let stamp = Stamp {
            epoch: 3,
            number: 41,
        };
        assert_eq!(stamp.to_string().parse(), Ok(stamp));
        for text in ["", "3", "3.", ".4", "+3.4", "3.4.5", "3.-4", " 3.4"] {
            assert_eq!(text.parse::<Stamp>(), Err(()), "{text:?}");
        }
        let later = Stamp {
            epoch: 4,
            number: 0,
        };
        assert!(later > stamp);
    }
}
