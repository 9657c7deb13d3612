//! Deliberate faults, switched on only in builds with the feature `planted-faults`: what the simulator must catch.
//!
//! Owns nothing. Refuses: to do anything in a product build, where [`is`] is `false` at compile time.

use godwit_types::named;

named! {
    /// A fault to plant into a controller's book or a host's knowledge of the site.
    pub enum Plant {
        /// A host that does not answer counts as one that said no.
        SilenceIsNo => "counts-silence-as-stopped",
        /// A grant follows whatever was heard last, without asking.
        GrantWithoutSurvey => "grants-without-survey",
        /// The destination of a migration is not written into the set of hosts that may hold the VM.
        ForgetDestination => "forgets-the-destination",
        /// A host boots what its record says without asking anybody.
        BootWithoutAsking => "boots-without-asking",
        /// Of two running copies the lower one is ended instead of paused.
        EndLowerCopy => "ends-lower-copy",
        /// An image is opened whatever it says of who has it.
        OpensAnyImage => "opens-any-image",
        /// An image is opened although nobody can read who has it.
        OpensUnreadImage => "opens-unread-image",
        /// An image is opened although it could not be written that this host has it.
        OpensUnwrittenImage => "opens-unwritten-image",
        /// What a VM's holder knows of its image is not told to the next one.
        ForgetsImages => "forgets-images",
        /// A restored controller goes on as if it knew everything.
        RestoredGoesOn => "restored-controller-goes-on",
        /// A no that was said before a host was named again takes it out of the set.
        OldNoCounts => "old-no-counts",
        /// Answers older than what the asking host knows let it boot.
        OldAnswerBoots => "old-answer-boots",
        /// A host accepts words of a controller below the highest that it has heard.
        OldWordAccepted => "old-word-accepted",
        /// A host's old copy, or a second life with its certificate, is treated as the host itself.
        OldCopyBoots => "old-copy-boots",
        /// A person's word that a host is off holds after that host was heard.
        FenceOutlivesHearing => "fence-outlives-hearing",
        /// A host hears no controller out before it believes its neighbours.
        NeighboursFirst => "hears-neighbours-first",
        /// Of several hosts' answers the first counts, whatever others say then or said before.
        FirstAnswerBoots => "first-answer-boots",
        /// A person's word runs a VM on against what somebody who answered knows.
        WordUnheard => "persons-word-unheard",
        /// What a restored database says of hosts that are off counts.
        OldFenceCounts => "old-fence-counts",
        /// What could not be written is never written again.
        LosesUnwritten => "loses-unwritten",
        /// A controller grants before it has asked every host since it was started.
        GrantsUnheard => "grants-before-hearing",
        /// A clone of a host is the host to its neighbours.
        CloneIsHost => "clone-is-the-host",
        /// Generations that a host tells are believed however high they are.
        BelievesAnyGeneration => "believes-any-generation",
        /// A state directory that went back within one life of its agent is not noticed.
        MissesWentBack => "misses-went-back",
        /// A database from before a host got another machine gives its name back to the former one.
        FormerMachineIsHost => "former-machine-is-the-host",
    }
}

impl Plant {
    /// Faults that a named test judges, since no seed of the simulator shows them.
    pub const BY_TEST: &'static [Plant] = &[
        Plant::OldNoCounts,
        Plant::OldAnswerBoots,
        Plant::NeighboursFirst,
        Plant::OldWordAccepted,
        Plant::FirstAnswerBoots,
        Plant::WordUnheard,
        Plant::RestoredGoesOn,
        Plant::OldFenceCounts,
        Plant::LosesUnwritten,
        Plant::GrantsUnheard,
        Plant::MissesWentBack,
        Plant::BelievesAnyGeneration,
        Plant::FormerMachineIsHost,
    ];

    /// Faults that the simulator judges.
    pub fn by_simulator() -> impl Iterator<Item = Plant> {
        let all = Self::ALL.iter().copied();
        all.filter(|plant| !Self::BY_TEST.contains(plant))
    }
}

/// Whether a fault is planted: the one that a build with planted faults was given.
#[cfg(feature = "planted-faults")]
pub(crate) fn is(planted: Option<Plant>, plant: Plant) -> bool {
    planted == Some(plant)
}

/// Never, in a product build.
#[cfg(not(feature = "planted-faults"))]
#[inline(always)]
pub(crate) fn is(_planted: Option<Plant>, _plant: Plant) -> bool {
    false
}
