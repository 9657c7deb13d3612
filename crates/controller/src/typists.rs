//! Who types to which guest: news for the audit log once in a while, not with every key.
//!
//! Owns a bounded table. Refuses: to pass over somebody whose last words were refused, since the log would say nothing of those
//! that came to the guest.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

/// For so long who types to a guest is told of once, s.
const TOLD_S: i64 = 600;
/// Most that are told apart; of more, every word is told.
const TOLD_MAX: usize = 1_000;

/// When each was told of, by who it is and to which guest.
#[derive(Debug, Default)]
pub(crate) struct Typists(BTreeMap<(String, String), Told>);

#[derive(Debug)]
struct Told {
    unix_s: i64,
    /// Its entry in the log.
    number: Option<i64>,
}

impl Typists {
    /// Whether this one is to be told of now.
    pub(crate) fn is_news(&mut self, who: String, guest: String, now: i64) -> bool {
        self.0
            .retain(|_, told| now.saturating_sub(told.unix_s) < TOLD_S);
        let is_full = self.0.len() >= TOLD_MAX;
        match self.0.entry((who, guest)) {
            Entry::Occupied(_) => false,
            Entry::Vacant(_) if is_full => true,
            Entry::Vacant(place) => {
                place.insert(Told {
                    unix_s: now,
                    number: None,
                });
                true
            }
        }
    }

    /// It has this entry.
    pub(crate) fn is_told(&mut self, who: String, guest: String, number: i64) {
        if let Some(told) = self.0.get_mut(&(who, guest)) {
            told.number = Some(number);
        }
    }

    /// What this entry tells of was refused.
    pub(crate) fn is_refused(&mut self, number: i64) {
        self.0.retain(|_, told| told.number != Some(number));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_types_is_told_of_once_in_ten_minutes_and_after_a_refusal() {
        let mut typists = Typists::default();
        let mut is_news = |who: &str, guest: &str, now| {
            let news = typists.is_news(who.into(), guest.into(), now);
            typists.is_told(who.into(), guest.into(), now);
            news
        };
        assert!(is_news("jane", "web", 1_000));
        assert!(!is_news("jane", "web", 1_599), "ten minutes");
        assert!(is_news("jane", "db", 1_001) && is_news("joe", "web", 1_002));
        assert!(is_news("jane", "web", 1_600));
        typists.is_refused(1_600);
        assert!(typists.is_news("jane".into(), "web".into(), 1_601));
    }

    #[test]
    fn of_too_many_every_word_is_told() {
        let mut typists = Typists::default();
        for guest in 0..TOLD_MAX {
            assert!(typists.is_news("jane".into(), guest.to_string(), 0));
        }
        assert!(typists.is_news("joe".into(), "web".into(), 0));
        assert!(typists.is_news("joe".into(), "web".into(), 0));
    }
}
