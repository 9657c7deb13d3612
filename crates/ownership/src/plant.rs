//! Deliberate faults, compiled only with the feature `planted-faults`: what the simulator or a named test must catch.
//!
//! Owns nothing. Refuses: to exist in a product build.

use godwit_types::named;

impl Plant {
    /// Faults that need what the simulator of one VM does not have (a host that lies, an old copy of a disk, a
    /// controller without a survey). The tests of this crate named in `scripts/plant-faults.sh` catch them.
    pub const BY_TEST: &'static [Plant] = &[
        Plant::GrantWithoutSurvey,
        Plant::OldPermissionTaken,
        Plant::YieldsToAnybody,
        Plant::BootsWithoutAsking,
        Plant::SuccessorLeavesGaveRunning,
        Plant::AnybodyMovesGenerations,
        Plant::PeersReachAll,
    ];

    /// The faults that the simulator must catch.
    pub fn by_simulator() -> impl Iterator<Item = Plant> {
        let all = Self::ALL.iter().copied();
        all.filter(|plant| !Self::BY_TEST.contains(plant))
    }
}

named! {
    /// A fault to plant into a core.
    pub enum Plant {
        /// A cancel that comes after the gift is honoured: two permits for one guest.
        PermitTwice => "permit-twice",
        /// The source resumes by itself when the answer to its gift is late.
        ResumeOnTimeoutAfterGave => "resume-on-timeout-after-gave",
        /// The permit is sent before the gift is durable.
        GaveNotPersistedBeforeSend => "gave-not-persisted-before-send",
        /// A waiting destination refuses without writing it, and still takes a late permit.
        RefusedNotDurable => "refused-not-durable",
        /// A waiting destination is cleaned up by a time-out.
        CleanupReadyOnTimeout => "cleanup-ready-on-timeout",
        /// The next attempt reuses the generation of the one that failed.
        GenerationGoesBack => "generation-goes-back",
        /// The destination says that it holds before that is durable.
        AnswerFromMemory => "answer-from-memory",
        /// A successor acts on a record that it read but that may not be durable.
        TrustUnsyncedRecord => "trust-unsynced-record",
        /// A successor that reads "gave" resumes the guest.
        SuccessorResumesGave => "successor-resumes-gave",
        /// A destination whose source does not know boots the guest anew after a reboot.
        UnconfirmedBoots => "unconfirmed-boots",
        /// The last pages are not waited for.
        LastPagesSkipped => "last-pages-skipped",
        /// The guest runs at the destination before "holds" is durable.
        RunBeforeHolds => "run-before-holds",
        /// A grant is taken that no survey, or one that was overtaken, stands behind.
        GrantWithoutSurvey => "grant-without-survey",
        /// A holder ends its guest because any host says that it holds a higher generation.
        YieldsToAnybody => "yields-to-anybody",
        /// Any host raises the generations of a holder.
        AnybodyMovesGenerations => "anybody-moves-generations",
        /// Peers raise the generations of a host that holds nothing beyond what its controller can follow.
        PeersReachAll => "peers-reach-all",
        /// A holder whose QEMU is gone boots its guest as soon as its record is durable, without asking anybody.
        BootsWithoutAsking => "boots-without-asking",
        /// A successor that reads "gave" lets a QEMU run on that it finds running.
        SuccessorLeavesGaveRunning => "successor-leaves-gave-running",
        /// A migration begins by a permission that a survey has overtaken.
        OldPermissionTaken => "old-permission-taken",
    }
}
