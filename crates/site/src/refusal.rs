//! Why the site's rules do not allow something: one sentence each, with the host to look at and the command that helps.
//!
//! Plain data. Refuses: nothing.

use crate::gift::KeptGift;
use godwit_types::{HostName, VmName};

fn names<T: ToString>(names: &[T]) -> String {
    let names: Vec<String> = names.iter().take(5).map(ToString::to_string).collect();
    names.join(", ")
}

/// Why something is not granted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// Hosts that may hold the VM did not answer.
    #[error(
        "host {} may run VM {vm} and does not answer: bring it back; or, when it is powered off, say so with 'godwit host fenced {}'",
        names(hosts),
        hosts.first().map(ToString::to_string).unwrap_or_default()
    )]
    Silent { vm: VmName, hosts: Vec<HostName> },
    /// A host that a record names is not in the inventory.
    #[error(
        "a record says that VM {vm} went to host {host}, which this controller does not know: enrol it again, or, when it is powered off, say so with 'godwit host fenced {host}'"
    )]
    Stranger { vm: VmName, host: HostName },
    /// A host holds the VM.
    #[error("host {host} holds VM {vm}: it starts there, or after it was stopped there")]
    Held { vm: VmName, host: HostName },
    /// A VM is to leave a host that does not hold it.
    #[error(
        "host {holder} holds VM {vm}, not host {from}, so it cannot leave from there: see 'godwit vm show {vm}'"
    )]
    NotHolder {
        vm: VmName,
        /// The host from which it was to leave.
        from: HostName,
        /// The host that holds it.
        holder: HostName,
    },
    /// A handover of the VM has not ended.
    #[error(
        "a handover of VM {vm} at host {} has not ended: wait for it, or see 'godwit vm show {vm}'",
        names(hosts)
    )]
    HandingOver {
        vm: VmName,
        /// The hosts that take part, as far as they say.
        hosts: Vec<HostName>,
    },
    /// A host waits for the end of a handover that the site went on without.
    #[error("{0}")]
    GiftKept(KeptGift),
    /// Two hosts hold the VM.
    #[error(
        "VM {vm} is held by {}: end that first with 'godwit vm resolve {vm} --keep HOST'",
        names(hosts)
    )]
    Twice { vm: VmName, hosts: Vec<HostName> },
    /// Something happened between the answers; asking again helps.
    #[error("something happened to VM {vm} while its hosts were asked: try again")]
    Stale { vm: VmName },
    /// The counter of the VM is used up.
    #[error("VM {vm} has no generation left")]
    Exhausted { vm: VmName },
    /// The controller's database is an old copy.
    #[error(
        "this controller works on an old copy of its database and grants nothing until it has read every host; it waits for {}: bring them back, or, when one is powered off, say so with 'godwit host fenced HOST'",
        if waits_for.is_empty() { "their answers".to_owned() } else { names(waits_for) }
    )]
    Restored { waits_for: Vec<HostName> },
    /// Another controller has taken over.
    #[error(
        "another controller has taken over this site, as {} can tell: this one starts and moves no VM; stop it, or, if it is the one to keep, stop the other one and start this one anew",
        names(said_by)
    )]
    Replaced {
        /// Hosts that say so.
        said_by: Vec<HostName>,
    },
    /// The controller has just been started.
    #[error(
        "this controller was started just now and has not asked {} yet: try again in a few seconds",
        names(waits_for)
    )]
    Starting { waits_for: Vec<HostName> },
    /// All that is left of a VM is an older copy, and its guest may run.
    #[error(
        "host {host} has an older copy of VM {vm}, and a guest of it may run there, while {} had the newest one: end that copy first with 'godwit vm stop {vm} --force'",
        newest.as_ref().map_or_else(|| "another host".to_owned(), |host| format!("host {host}"))
    )]
    OlderCopy {
        vm: VmName,
        host: HostName,
        /// Who held the newest one.
        newest: Option<HostName>,
    },
    /// A person's word would let an older copy of a VM run on.
    #[error(
        "VM {vm} does not run on on host {host} by a person's word: {} since; what stands still there is an older copy, see 'godwit vm show {vm}'",
        newest.as_ref().map_or_else(|| "it was held elsewhere or deleted".to_owned(), |host| format!("host {host} took it"))
    )]
    Overtaken {
        vm: VmName,
        host: HostName,
        /// Nobody where the VM was deleted or given up.
        newest: Option<HostName>,
    },
    /// A host that answers is not off.
    #[error("host {host} answers, so it is not off: nothing is changed")]
    Answers { host: HostName },
    /// A host that may hold VMs is not removed by itself.
    #[error(
        "host {host} does not answer and may run {}: bring it back; or, when it is powered off, say so with 'godwit host fenced {host}', or remove it for good with 'godwit host remove {host} --confirm-unreachable'",
        names(vms)
    )]
    MayRun { host: HostName, vms: Vec<VmName> },
    /// A host that holds VMs is not removed.
    #[error("host {host} may hold {} VMs ({}): empty it first with 'godwit host drain {host}', which moves what runs, lets go of what is off and says what stands in the way of the rest", vms.len(), names(vms))]
    HoldsVms { host: HostName, vms: Vec<VmName> },
    /// Nobody knows such a host.
    #[error("there is no host {host}: see 'godwit host list'")]
    UnknownHost { host: HostName },
    /// The host's own state is not to be believed.
    #[error(
        "host {host} is an old copy, or a second machine with the same certificate: it gets no VM, and its word about one does not count; see 'godwit site show'"
    )]
    NotItself { host: HostName },
}
