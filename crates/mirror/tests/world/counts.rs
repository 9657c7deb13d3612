//! How often each thing came that the model is about, over all seeds: one that hardly ever comes is not tested.
//!
//! Owned by the test. Refuses nothing.

/// Makes a count of each, and their sum.
macro_rules! counts {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        #[derive(Debug, Clone, Copy, Default)]
        pub struct Counts {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl Counts {
            pub fn add(&mut self, other: Self) {
                $(self.$name += other.$name;)*
            }
        }
    };
}

counts! {
    failed_at_source,
    /// Of them, those to both sides: both may be unlike then.
    failed_while_mirrored,
    /// and those that write zeroes, or discard.
    failed_erasing,
    failed_flushes,
    failed_reads_of_guest,
    /// Writes of which a part came: at the source that failed,
    torn_at_source,
    /// at the destination that failed,
    torn_at_destination,
    /// and at either by a power cut,
    torn_by_cut,
    /// or on a link that was lost.
    torn_on_link,
    failed_at_destination,
    failed_flushes_there,
    failed_reads,
    power_cuts,
    /// Those of the destination alone.
    cuts_there,
    /// Cuts after which a destination was judged that counts, and went on alone.
    judged_there,
    left_alone,
    /// Cuts that were only thought of, with the destination judged, too, or without.
    imagined,
    imagined_there,
    /// Sectors that lost something that was not durable.
    lost_sectors,
    /// Requests that nobody answered, for a power cut.
    unanswered,
    /// Answers to flushes, for which one disk was asked,
    flushed_at_source,
    /// or two disks were.
    flushed_at_both,
    switched,
    reads,
    erased,
    durable_writes,
    /// How often both disks were found equal with nothing under way.
    equal,
}

impl Counts {
    /// What ends a mirror.
    pub fn ends(&self) -> u64 {
        self.failed_at_destination + self.failed_reads + self.cuts_there
    }
}
