//! The table of everything that is fuzzed. A new decoder is one line here and one function in a module below.
//!
//! Owns nothing. Refuses: a target without a seed that its decoder accepts ([`Target::seeds`], see the test).

mod canary;
mod control;
mod delta;
mod disk;
mod ownership;
mod protocol;
mod qcow2;
mod qemu;
mod samples;
mod wire;

use crate::outcome::Outcome;

#[derive(Debug, Clone, Copy)]
pub struct Target {
    /// Its name on the command line.
    pub name: &'static str,
    /// Whose bytes it reads.
    pub about: &'static str,
    /// Reads one input; panics when it finds something wrong.
    pub run: fn(&[u8]) -> Outcome,
    pub seeds: fn() -> Vec<Vec<u8>>,
}

macro_rules! targets {
    ($($name:literal, $about:literal, $module:ident :: $run:ident, $seeds:ident;)+) => {
        /// Every target, in the order in which they run.
        pub fn all() -> Vec<Target> {
            vec![$(Target {
                name: $name,
                about: $about,
                run: $module::$run,
                seeds: $module::$seeds,
            }),+]
        }
    };
}

targets! {
    "wire-record", "records of a channel, sealed and tampered with", wire::record, record_seeds;
    "wire-handshake", "the three messages of the handshake", wire::handshake, handshake_seeds;
    "wire-descriptor", "page lists, zero-page bitmaps and changes of disks", wire::descriptor, descriptor_seeds;
    "to-destination", "control messages that a destination reads", protocol::to_destination, to_destination_seeds;
    "to-source", "control messages that a source reads", protocol::to_source, to_source_seeds;
    "peer-message", "ownership messages between hosts", ownership::peer_message, peer_message_seeds;
    "ownership-core", "events in any order, lost writes and crashes", ownership::core, core_seeds;
    "record-file", "the durable ownership record", ownership::record_file, record_file_seeds;
    "qmp", "lines from QEMU", qemu::qmp, qmp_seeds;
    "disk-message", "what QEMU says to a disk", disk::message, message_seeds;
    "disk-request", "requests in a guest's rings", disk::request, request_seeds;
    "device-label", "the label of a block device that holds a disk", disk::label, label_seeds;
    "delta-head", "headers and label of a delta's extent", delta::head, head_seeds;
    "delta-table", "blocks of a delta's tables", delta::block, block_seeds;
    "delta-text", "the descriptor of a delta", delta::text, text_seeds;
    "qcow2-head", "the head of an image that a disk is made from", qcow2::head, head_seeds;
    "qcow2-chain", "images over one another that a disk is made from", qcow2::chain, chain_seeds;
    "probe-frame", "Ethernet frames from a bridge", qemu::probe, probe_seeds;
    "rest-body", "bodies, tokens, certificates and event streams", control::rest_body, rest_body_seeds;
    "vm-socket", "requests and answers between agent and VM process", control::vm_socket, vm_socket_seeds;
    "vm-toml", "descriptions of VMs", control::vm_toml, vm_toml_seeds;
}

/// The decoder with a bug in it.
pub const CANARY: Target = Target {
    name: "canary",
    about: "a decoder with a planted bug, which must be found",
    run: canary::decode,
    seeds: canary::seeds,
};

/// Takes numbers from an input; zeros when it is used up.
#[derive(Debug)]
struct Decisions<'a>(&'a [u8]);

impl Decisions<'_> {
    fn byte(&mut self) -> u8 {
        let (first, rest) = self.0.split_first().unwrap_or((&0, &[]));
        self.0 = rest;
        *first
    }

    fn is_over(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn names_are_unique_and_seeds_run() {
        let targets = all();
        let names: BTreeSet<_> = targets.iter().map(|t| t.name).collect();
        assert_eq!(names.len(), targets.len());
        for target in targets {
            let seeds = (target.seeds)();
            assert!(!seeds.is_empty(), "{} has no seeds", target.name);
            let nothing = (target.run)(b"\xffnothing of ours");
            let differs = seeds.iter().any(|seed| (target.run)(seed) != nothing);
            assert!(
                differs,
                "{}: seeds are as meaningless as rubbish",
                target.name
            );
        }
    }
}
