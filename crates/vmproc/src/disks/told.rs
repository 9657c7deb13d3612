//! What the log was told already of work that is tried again and again: each reason is told once.
//!
//! Owns what was told, for this process. Refuses nothing.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// What is to be done, with which file.
type Work<'a> = (&'static str, &'a Path);

static TOLD: Mutex<BTreeMap<(&'static str, PathBuf), String>> = Mutex::new(BTreeMap::new());

/// Notes why something was not done. Returns whether that is news.
pub(super) fn is_news((what, path): Work<'_>, why: &str) -> bool {
    let mut told = TOLD.lock().unwrap_or_else(PoisonError::into_inner);
    let before = told.insert((what, path.to_owned()), why.to_owned());
    before.is_none_or(|before| before != why)
}

/// It is done. Returns whether the log was told before that it was not.
pub(super) fn is_over((what, path): Work<'_>) -> bool {
    let mut told = TOLD.lock().unwrap_or_else(PoisonError::into_inner);
    told.remove(&(what, path.to_owned())).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_reason_is_news_once_until_it_is_over() {
        let path = Path::new("/nowhere/of/the/test/of/told");
        let work = ("test", path);
        assert!(!is_over(work));
        assert!(is_news(work, "a") && !is_news(work, "a"));
        assert!(is_news(work, "b") && is_news(work, "a"));
        assert!(is_news(("another", path), "a") && is_over(("another", path)));
        assert!(is_over(work) && !is_over(work));
        assert!(is_news(work, "a"));
        assert!(is_over(work));
    }
}
