//! The machines for as long as the list is worked through, also when one of them breaks.
//!
//! Owns the site and the list of what broke. An emulated kernel that panicked, or a machine whose shell answers nothing, says
//! nothing of the product: both machines are switched on anew and the row is tried again, and the list tells of it. What a
//! machine that lives says is the row's result, whatever it is.

use crate::rows::{ROWS, Row};
use crate::site::Site;
use crate::{Arguments, Shown};
use anyhow::Result;
use godwit_e2e::person::emulated::Dead;
use std::time::Instant;

/// Machines that break more often than that are no ground to stand on.
const BROKEN_MAX: usize = 4;
/// What new machines are given before any other row.
const GROUND: [&str; 3] = ["install", "set-up", "guest"];

pub struct Stage<'a> {
    arguments: &'a Arguments,
    ends: Instant,
    site: Result<Site>,
    /// What broke, and at which row.
    pub broken: Vec<String>,
}

impl<'a> Stage<'a> {
    pub fn new(arguments: &'a Arguments, ends: Instant) -> Self {
        let mut stage = Self {
            arguments,
            ends,
            site: Err(anyhow::anyhow!("the machines are off")),
            broken: Vec::new(),
        };
        stage.switch_on(&ROWS[0]);
        stage
    }

    pub fn try_row(&mut self, row: &Row) -> Shown {
        let only = &self.arguments.only;
        if !only.is_empty() && !only.iter().any(|name| name == row.name) {
            return Shown::Untried("left out by --only");
        }
        loop {
            if Instant::now() >= self.ends {
                return Shown::Untried("the time was over");
            }
            let failed = match &self.site {
                Ok(site) => (row.act)(site),
                Err(error) => return Shown::No(format!("{error:#}")),
            };
            let error = match failed {
                Ok(note) => return Shown::Yes(note),
                Err(error) => error,
            };
            let Some(broken) = self.machines_broke() else {
                return Shown::No(format!("{error:#}"));
            };
            if !self.may_go_on(row, &format!("{broken}: {error:#}")) {
                return Shown::No(format!("{broken}: {error:#}"));
            }
            self.switch_on(row);
        }
    }

    /// Counts a machine that broke, and says whether there is another try.
    fn may_go_on(&mut self, row: &Row, broken: &str) -> bool {
        println!("  at row {}: {broken}", row.name);
        self.broken.push(format!("at row {}: {broken}", row.name));
        self.broken.len() <= BROKEN_MAX && !self.arguments.attach
    }

    /// Which machine does not live any more; writes down what a machine that lives knows of the failure.
    fn machines_broke(&self) -> Option<String> {
        let site = self.site.as_ref().ok()?;
        let broken = site.broken();
        if broken.is_none() {
            site.explain();
        }
        broken
    }

    /// Machines with what every row up to this one needs.
    fn switch_on(&mut self, row: &Row) {
        loop {
            // The old ones end first: there is no memory for four.
            self.site = Err(anyhow::anyhow!("the machines are off"));
            self.site = Site::switch_on(self.arguments, self.ends, self.broken.len())
                .and_then(|site| ground(&site, row).map(|()| site));
            match &self.site {
                Err(error) if error.is::<Dead>() => {
                    let broken = format!("{error:#}");
                    if !self.may_go_on(row, &broken) {
                        return;
                    }
                }
                _ => return,
            }
        }
    }
}

fn ground(site: &Site, row: &Row) -> Result<()> {
    ROWS.iter()
        .take_while(|earlier| earlier.name != row.name)
        .filter(|earlier| GROUND.contains(&earlier.name))
        .try_for_each(|earlier| (earlier.act)(site).map(drop))
}
