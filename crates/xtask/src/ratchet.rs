//! The files that were there before a limit and still exceed it. The list may only shrink: a file that keeps the limit
//! and is still listed is an error, as is one that is no longer there.
//!
//! Owns `crates/xtask/exceeds.txt`: a limit (`file`, `function`, `doc`) and a path on each line.

use std::collections::BTreeSet;

/// One file's excess of one limit.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Excess {
    /// Which limit: `file`, `function` or `doc`.
    pub limit: String,
    /// Relative to the root of the repository.
    pub path: String,
}

impl Excess {
    /// What one limit finds in one file.
    pub fn new(limit: &str, path: &str) -> Self {
        let (limit, path) = (limit.to_owned(), path.to_owned());
        Self { limit, path }
    }
}

/// Leaves out the findings of listed files, and adds one for each line of the list that is no longer needed.
pub fn sift(list: &str, found: Vec<(Excess, String)>) -> Vec<String> {
    let lines = list.lines().filter(|line| !line.starts_with('#'));
    let listed = lines.filter_map(|line| line.split_once(' '));
    let listed: BTreeSet<Excess> = listed
        .map(|(limit, path)| Excess::new(limit, path.trim()))
        .collect();
    let exceed: BTreeSet<&Excess> = found.iter().map(|(excess, _)| excess).collect();
    let over = listed.iter().filter(|excess| !exceed.contains(excess));
    let mut findings: Vec<String> = over
        .map(|Excess { limit, path }| {
            format!("crates/xtask/exceeds.txt: '{limit} {path}' exceeds nothing any more: take the line out")
        })
        .collect();
    let new = found
        .into_iter()
        .filter(|(excess, _)| !listed.contains(excess));
    findings.extend(new.map(|(_, finding)| finding));
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listed_file_may_exceed_and_no_other() {
        let found = |path| (Excess::new("file", path), format!("{path}: long"));
        let list = "# comment\nfile a.rs\n";
        assert!(sift(list, vec![found("a.rs")]).is_empty());
        assert_eq!(
            sift(list, vec![found("a.rs"), found("b.rs")]),
            ["b.rs: long"]
        );
    }

    #[test]
    fn a_listed_file_that_keeps_the_limit_is_an_error() {
        let found = vec![(Excess::new("doc", "a.rs"), "a.rs: repeats".to_owned())];
        let findings = sift("file a.rs\ndoc a.rs\n", found);
        assert_eq!(findings.len(), 1);
        assert!(findings[0].contains("'file a.rs'"), "{findings:?}");
    }
}
