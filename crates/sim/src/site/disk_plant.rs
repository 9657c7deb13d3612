//! Deliberate faults of what a host does with the disk that only it has: what the simulator must catch.
//!
//! Owns nothing. They are planted into the simulated shell, since the product's is not linked.

use godwit_types::named;

named! {
    /// A fault to plant into what the simulated hosts do with disks.
    pub enum DiskPlant {
        /// A destination says that it is ready before its copy of the disk is durable.
        ReadyBeforeFlush => "disk-ready-before-flush",
        /// The source removes its image once it gave the VM, before the destination has said that it holds it.
        RemovesUnconfirmed => "image-removed-unconfirmed",
        /// What came with a migration that failed is taken for what comes with the next.
        UsesFailedCopy => "failed-copy-used",
        /// A disk goes on with its second image before its record says so.
        SwitchesBeforeRecord => "disk-switched-before-record",
        /// What a disk was being copied to is taken for its disk at the next start.
        TakesHalfMade => "half-made-image-taken",
        /// The former image is removed before the record of the second one is durable.
        RemovesFormerEarly => "former-image-removed-early",
        /// What came is removed though its source has said nothing.
        RemovesUnasked => "came-removed-unasked",
        /// What came is removed where it is to be kept: its source is gone, or the VM goes on without it.
        RemovesGivenUp => "given-up-copy-removed",
        /// A source says that it has the disk, whatever has the disk's name there.
        SaysUnlooked => "has-disk-unlooked",
        /// A controller has hosts start VMs with the disk where it was once told that it is.
        OverrulesPlace => "controller-overrules-place",
    }
}
