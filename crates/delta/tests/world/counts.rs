//! How often each thing came that the model is about, over all seeds: one that hardly ever comes is not tested.
//!
//! Owned by the test. Refuses nothing.

/// Makes a count of each, and their sum.
macro_rules! counts {
    ($($name:ident,)*) => {
        #[derive(Debug, Clone, Copy, Default)]
        pub struct Counts {
            $(pub $name: u64,)*
        }

        impl Counts {
            pub fn add(&mut self, other: Self) {
                $(self.$name += other.$name;)*
            }

            pub fn all(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name)),*]
            }
        }
    };
}

counts! {
    straight_writes,
    filled_writes,
    zeroed_edges,
    punches,
    held,
    answered_at_once,
    failed_writes,
    failed_erasures,
    failed_syncs,
    failed_tables,
    torn,
    syncs,
    rounds_with_tables,
    flushes_in_rounds,
    durable_changes,
    kills,
    power_cuts,
    lost_sectors,
    unanswered,
    read_in_pieces,
}
