//! The guest comes first, as long as that is no loss to it: threads that move its pages give way to vCPUs in the first pass.
//!
//! The first pass is long, and a vCPU and a sender that want the same core would otherwise share it evenly: the guest would
//! feel its own migration. Every later pass is a race against what the guest writes meanwhile. There, on a host whose cores
//! are all busy, page threads that give way lose it: the guest is slowed for them, the pause grows, or the migration is
//! given up as impossible.

/// Niceness of page threads in the first pass, 0 (as the guest) to 19.
const NICENESS: i32 = 10;

/// Cores that this process may use.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// The calling thread's manners; asks the kernel only when they change.
#[derive(Debug, Default)]
pub(crate) struct Manners {
    gives_way: bool,
}

impl Manners {
    /// Gives way to vCPUs, or no longer.
    pub(crate) fn give_way(&mut self, gives_way: bool) {
        if self.gives_way == gives_way {
            return;
        }
        self.gives_way = gives_way;
        // On Linux the caller's own thread is meant, not its process.
        let niceness = if gives_way { NICENESS } else { 0 };
        if let Err(error) = rustix::process::setpriority_process(None, niceness) {
            tracing::warn!(%error, gives_way, "a page thread keeps its priority");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::thread::CapabilitySet;

    fn niceness() -> i32 {
        let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
        let after_name = stat.rsplit_once(')').unwrap().1;
        after_name
            .split_whitespace()
            .nth(16)
            .unwrap()
            .parse()
            .unwrap()
    }

    #[test]
    fn a_page_thread_gives_way_and_takes_its_full_share_again() {
        let own = rustix::thread::capabilities(None);
        if !own.is_ok_and(|own| own.effective.contains(CapabilitySet::SYS_NICE)) {
            println!("skipped: a priority is raised only with CAP_SYS_NICE");
            return;
        }
        let thread = std::thread::spawn(|| {
            let mut manners = Manners::default();
            manners.give_way(true);
            let first = niceness();
            manners.give_way(false);
            (first, niceness())
        });
        assert_eq!(thread.join().unwrap(), (NICENESS, 0));
    }
}
