//! Which certificates are wanted no more, though their chain is fine.
//!
//! Owns the list in memory; the controller's database and each agent's file keep it, as texts. A text is the serial number
//! of a life, which ends all its certificates; or one of the two forms below. Refuses: to take a revocation back.

use crate::access::Unwanted;
use crate::pki::Holder;
use godwit_types::ApiError;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::{PoisonError, RwLock};
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// How long a connection goes on that was open when its certificate was replaced: what was asked on it is answered.
pub const REPLACED_GRACE: Duration = Duration::from_secs(10);
/// Before the text of one certificate of a life that goes on.
const ONE: &str = "one:";
/// Before the text of all certificates of a life, or of a role, that were made before a time.
const BEFORE: &str = "before:";

/// Whether a certificate whose chain is fine is still wanted, and who may try to become somebody.
pub trait Admission: Send + Sync {
    /// Asked whenever a certificate is shown.
    fn admits(&self, holder: &Holder) -> bool;

    /// The same for a request on a connection that is open since then; asked at every request.
    fn admits_on(&self, holder: &Holder, _open_since: Instant) -> bool {
        self.admits(holder)
    }

    /// Why one that is not admitted is not.
    fn why_unwanted(&self, holder: &Holder) -> Unwanted;

    /// Changes whenever a certificate may have become unwanted, so that what is being told to its holder ends.
    fn changes(&self) -> Option<watch::Receiver<u64>> {
        None
    }

    /// Whether this address may call a route now that is open to everybody.
    fn may_try(&self, _from: IpAddr) -> Result<(), ApiError> {
        Ok(())
    }
}

/// How a list of revocations names one certificate of a life that goes on.
pub fn one_certificate(serial: &str) -> String {
    format!("{ONE}{serial}")
}

/// How a list of revocations names what was made before that time: the certificates of a life, by its serial number, or
/// those of a role, by its URI.
pub fn made_before(what: &str, unix_s: i64) -> String {
    format!("{BEFORE}{unix_s}:{what}")
}

fn parse_before(text: &str) -> Option<(&str, i64)> {
    let (unix_s, what) = text.strip_prefix(BEFORE)?.split_once(':')?;
    Some((what, unix_s.parse().ok()?))
}

/// Revoked certificates, shared between a server and whoever revokes.
#[derive(Debug)]
pub struct Revocations {
    lists: RwLock<Lists>,
    /// How often the list has grown.
    version: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct Lists {
    /// Lives, and single certificates. What this build does not know stands here too, and is kept.
    exact: BTreeSet<String>,
    /// Of a life or role, what was made before that time.
    before: BTreeMap<String, Before>,
}

#[derive(Debug, Clone, Copy)]
struct Before {
    unix_s: i64,
    /// When that was learnt here.
    since: Instant,
}

impl Default for Revocations {
    fn default() -> Self {
        Self {
            lists: RwLock::default(),
            version: watch::Sender::new(0),
        }
    }
}

impl Revocations {
    pub fn revoke(&self, text: impl Into<String>) {
        self.extend([text.into()]);
    }

    /// Adds what the controller says; revoking is for ever, so nothing is taken back.
    pub fn extend(&self, texts: impl IntoIterator<Item = String>) {
        let mut lists = self.lists.write().unwrap_or_else(PoisonError::into_inner);
        let mut grew = false;
        for text in texts {
            grew |= lists.add(text);
        }
        drop(lists);
        self.version.send_if_modified(|version| {
            *version += u64::from(grew);
            grew
        });
    }

    /// Every text, from which another list is made.
    pub fn all(&self) -> Vec<String> {
        let lists = self.lists.read().unwrap_or_else(PoisonError::into_inner);
        let before = lists.before.iter();
        let before = before.map(|(what, before)| made_before(what, before.unix_s));
        lists.exact.iter().cloned().chain(before).collect()
    }

    /// How often the list has grown.
    pub fn version(&self) -> u64 {
        *self.version.borrow()
    }

    /// Before when a certificate of this life or role must not have been made.
    pub fn made_before(&self, what: &str) -> Option<i64> {
        let lists = self.lists.read().unwrap_or_else(PoisonError::into_inner);
        lists.before.get(what).map(|before| before.unix_s)
    }

    /// Whether a later certificate of its life is in use, or its role was ended since.
    pub fn is_replaced(&self, holder: &Holder) -> bool {
        let lists = self.lists.read().unwrap_or_else(PoisonError::into_inner);
        lists.ended_since(holder).is_some()
    }
}

impl Lists {
    /// Whether that says more than was known.
    fn add(&mut self, text: String) -> bool {
        let Some((what, unix_s)) = parse_before(&text) else {
            return self.exact.insert(text);
        };
        let known = self.before.get(what);
        if known.is_some_and(|known| known.unix_s >= unix_s) {
            return false;
        }
        let since = Instant::now();
        self.before
            .insert(what.to_owned(), Before { unix_s, since });
        true
    }

    /// Since when a certificate counts as made too early, if it does.
    fn ended_since(&self, holder: &Holder) -> Option<Instant> {
        let of = |what: &str| {
            let before = self.before.get(what)?;
            (holder.order < before.unix_s).then_some(before.since)
        };
        of(&holder.life)
            .into_iter()
            .chain(of(&holder.role.uri()))
            .min()
    }

    /// What is revoked is a life with all its certificates, or one certificate of a life that goes on.
    fn names(&self, holder: &Holder) -> bool {
        self.exact.contains(&holder.life)
            || self.exact.contains(&holder.serial)
            || self.exact.contains(&one_certificate(&holder.serial))
    }
}

impl Admission for Revocations {
    fn admits(&self, holder: &Holder) -> bool {
        let lists = self.lists.read().unwrap_or_else(PoisonError::into_inner);
        !lists.names(holder) && lists.ended_since(holder).is_none()
    }

    fn admits_on(&self, holder: &Holder, open_since: Instant) -> bool {
        let lists = self.lists.read().unwrap_or_else(PoisonError::into_inner);
        if lists.names(holder) {
            return false;
        }
        // A host's earlier certificate may have something under way. A person's was taken away, and ends at once.
        let may_end = holder.role.is_host();
        lists
            .ended_since(holder)
            .is_none_or(|since| may_end && open_since <= since && since.elapsed() < REPLACED_GRACE)
    }

    fn why_unwanted(&self, holder: &Holder) -> Unwanted {
        let lists = self.lists.read().unwrap_or_else(PoisonError::into_inner);
        match lists.names(holder) || lists.ended_since(holder).is_none() {
            true => Unwanted::Removed,
            false => Unwanted::Replaced,
        }
    }

    fn changes(&self) -> Option<watch::Receiver<u64>> {
        Some(self.version.subscribe())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pki::Role;
    use godwit_types::HostName;

    fn holder(role: Role, serial: &str, made_unix_s: i64) -> Holder {
        Holder {
            role,
            serial: serial.into(),
            life: "11".into(),
            made_unix_s,
            order: made_unix_s,
            not_after_unix_s: made_unix_s + 1000,
        }
    }

    fn host(serial: &str, made_unix_s: i64) -> Holder {
        holder(Role::Host(HostName::new("a").unwrap()), serial, made_unix_s)
    }

    #[test]
    fn what_was_made_before_another_one_was_used_is_refused_everywhere_but_on_what_was_open() {
        let (list, opened) = (Revocations::default(), Instant::now());
        let (first, second) = (host("11", 10), host("22", 20));
        assert!(list.admits(&first) && list.admits(&second));
        list.revoke(made_before("11", 20));
        assert!(!list.admits(&first) && list.admits(&second));
        assert!(list.admits_on(&first, opened), "it was under way");
        assert!(!list.admits_on(&first, Instant::now() + Duration::from_secs(1)));
        assert_eq!(list.why_unwanted(&first), Unwanted::Replaced);
        // Another list that is made of this one knows the same; an earlier time says nothing more.
        let other = Revocations::default();
        other.extend(list.all());
        other.revoke(made_before("11", 5));
        assert!(!other.admits(&first) && other.admits(&second));
        assert_eq!(other.all(), list.all());
        assert_eq!(other.version(), 1);
        // Once its host was removed, that is what counts.
        other.revoke("11");
        assert_eq!(other.why_unwanted(&first), Unwanted::Removed);
    }

    #[test]
    fn an_operator_who_was_removed_is_refused_on_open_connections_and_may_come_anew() {
        let eve = || Role::Operator(HostName::new("eve").unwrap());
        let (list, opened) = (Revocations::default(), Instant::now());
        list.revoke(made_before(&eve().uri(), 20));
        let former = holder(eve(), "11", 19);
        assert!(!list.admits(&former) && !list.admits_on(&former, opened));
        assert!(list.admits(&holder(eve(), "33", 20)));
        assert!(list.admits(&host("11", 10)), "another role");
    }

    #[test]
    fn a_text_of_a_later_version_is_kept_and_says_nothing() {
        let list = Revocations::default();
        for text in ["later:what", "before:soon:11", "before:7"] {
            list.revoke(text);
        }
        assert_eq!(list.all().len(), 3);
        assert!(list.admits(&host("11", 1)));
    }
}
