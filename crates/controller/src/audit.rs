//! The audit log: who asked this controller for what, when, and what came of it, refused or not.
//!
//! Owns the table `audit`. An entry is written before its request is carried out and completed when it was answered; it
//! also goes to the log. A log that cannot be written refuses nothing: a person must be able to stop a VM while the
//! disk is full, and the log has the line. Keeps the newest [`KEPT`] entries. What strangers try and are refused is
//! counted, in one row a day and reason; what is tried with a certificate that was revoked, in one a day, certificate and
//! kind. So neither pushes out what people did; nor do the keys of whoever types to a guest, of which the first in a while is told.

use crate::store::{Store, unreadable};
use crate::typists::Typists;
use godwit_rpc::Peer;
use godwit_rpc::audit::{Answered, Asked, Auditor, Later, Login};
use godwit_rpc::controller_client::path;
use godwit_rpc::pki::now_unix_s;
use godwit_types::audit::{AuditEntry, AuditQuery, AuditResult};
use serde_json::Value;
use sqlx::{Sqlite, Transaction, query, query_as, query_scalar};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, MutexGuard, PoisonError};

type Result<T> = std::result::Result<T, crate::error::ControllerError>;

/// Entries that are kept; at some hundred bytes each.
const KEPT: i64 = 100_000;
/// Of these, refused attempts of clients without certificate, each counted for [`COUNTED_S`].
const STRANGERS_KEPT: i64 = 1_000;
/// For so long such attempts are counted in one row, s.
const COUNTED_S: i64 = 86_400;
/// Most kinds of refused requests that are told apart.
const TOLD_MAX: usize = 1_000;
/// Entries between two looks at what is too old.
const PRUNED_EVERY: i64 = 100;
/// A message is cut here.
const MESSAGE_LEN_MAX: usize = 1_000;
/// The number of an entry that could not be written.
const UNWRITTEN: i64 = 0;
/// What a key holds, in small letters and without what stands between them, whose value may be secret.
const SECRET_KEYS: [&str; 2] = ["cloudinit", "userdata"];

/// Writes the log into the controller's database.
pub struct AuditLog {
    store: Store,
    typists: Mutex<Typists>,
}

impl AuditLog {
    pub fn new(store: Store) -> Self {
        let typists = Mutex::default();
        Self { store, typists }
    }

    fn typists(&self) -> MutexGuard<'_, Typists> {
        self.typists.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Requests that were refused before anybody looked at them, by the serial number of the certificate that was shown and what
/// was wanted.
#[derive(Debug, Default)]
pub(crate) struct RefusedKinds(BTreeMap<(String, String), RefusedKind>);

#[derive(Debug)]
struct RefusedKind {
    told_unix_s: i64,
    /// How often after it was told, not yet added to its row.
    more: u64,
}

impl RefusedKinds {
    /// Whether this is the first of its kind within [`COUNTED_S`]; it is counted if not.
    fn is_news(&mut self, serial: String, what: String, now: i64) -> bool {
        let is_fresh = |kind: &RefusedKind| now.saturating_sub(kind.told_unix_s) < COUNTED_S;
        self.0.retain(|_, kind| is_fresh(kind) || kind.more > 0);
        let is_full = self.0.len() >= TOLD_MAX;
        match self.0.entry((serial, what)) {
            Entry::Occupied(mut kind) if is_fresh(kind.get()) => {
                kind.get_mut().more = kind.get().more.saturating_add(1);
                false
            }
            // There are no more kinds than certificates that were revoked, times routes.
            Entry::Vacant(_) if is_full => false,
            entry => {
                let told = RefusedKind {
                    told_unix_s: now,
                    more: 0,
                };
                entry.insert_entry(told);
                true
            }
        }
    }

    /// What is to be added to which rows.
    fn take(&mut self) -> Vec<((String, String), u64)> {
        let kinds = self.0.iter_mut().filter(|(_, kind)| kind.more > 0);
        kinds
            .map(|(key, kind)| (key.clone(), std::mem::take(&mut kind.more)))
            .collect()
    }
}

impl Auditor for AuditLog {
    fn asked(&self, asked: Asked) -> Later<'_, i64> {
        Box::pin(async move {
            let what = what(&asked);
            let subject = asked.subject.as_deref().unwrap_or_default();
            let who = who(&asked.peer, asked.login);
            // Not looked at by anybody yet: a name may be any text.
            tracing::info!("{who} asks: {what} {subject:?}");
            let written = self.store.audit_asked(&who, &what, &asked).await;
            let number = written.unwrap_or_else(|error| {
                tracing::warn!(%error, "this is missing in the audit log");
                UNWRITTEN
            });
            if asked.types() {
                let (who, guest) = typist(&asked);
                self.typists().is_told(who, guest, number);
            }
            number
        })
    }

    fn answered(&self, number: i64, answered: Answered) -> Later<'_, ()> {
        Box::pin(async move {
            if let Some(error) = &answered.error {
                self.typists().is_refused(number);
                let result = AuditResult::of_status(Some(answered.status));
                // A sentence may repeat what a stranger sent.
                let said: String = error.to_string().chars().take(MESSAGE_LEN_MAX).collect();
                let said = said.replace(char::is_control, " ");
                tracing::info!("{result}: {said}");
            }
            if number == UNWRITTEN {
                return;
            }
            if let Err(error) = self.store.audit_answered(number, &answered).await {
                tracing::warn!(%error, "the audit log does not say how this ended");
            }
        })
    }

    fn turned_away(&self) {
        self.store.turned_away.fetch_add(1, Ordering::Relaxed);
    }

    fn is_news(&self, asked: &Asked) -> bool {
        if asked.types() && !asked.is_refused {
            let (who, guest) = typist(asked);
            return self.typists().is_news(who, guest, now_unix_s());
        }
        let serial = asked.serial.clone().unwrap_or_default();
        let mut kinds = self.store.refused_kinds();
        kinds.is_news(serial, what(asked), now_unix_s())
    }
}

/// Who types, and to which guest.
fn typist(asked: &Asked) -> (String, String) {
    let serial = asked.serial.as_deref().unwrap_or_default();
    let who = format!("{} {serial}", who(&asked.peer, asked.login));
    (who, asked.subject.clone().unwrap_or_default())
}

impl Store {
    async fn audit_asked(&self, who: &str, what: &str, asked: &Asked) -> Result<i64> {
        let sql = "INSERT INTO audit (unix_s, who, certificate, what, subject, detail) VALUES (?, ?, ?, ?, ?, ?)";
        let written = query(sql)
            .bind(now_unix_s())
            .bind(who)
            .bind(&asked.serial)
            .bind(what)
            .bind(&asked.subject)
            .bind(asked.query.clone().or_else(|| stranger_from(asked)))
            .execute(&self.pool)
            .await?;
        let id = written.last_insert_rowid();
        if id % PRUNED_EVERY == 0 {
            self.prune().await?;
        }
        Ok(id)
    }

    /// Strangers who try to join do not push out what people did.
    async fn prune(&self) -> Result<()> {
        self.count_turned_away().await?;
        let strangers = "DELETE FROM audit WHERE who = ?1 AND status >= 400 AND id <= (SELECT id FROM audit WHERE who = ?1 AND status >= 400 ORDER BY id DESC LIMIT 1 OFFSET ?2)";
        query(strangers)
            .bind(Peer::Anonymous.to_string())
            .bind(STRANGERS_KEPT)
            .execute(&self.pool)
            .await?;
        let oldest = "DELETE FROM audit WHERE id <= (SELECT id FROM audit ORDER BY id DESC LIMIT 1 OFFSET ?)";
        query(oldest).bind(KEPT).execute(&self.pool).await?;
        Ok(())
    }

    async fn audit_answered(&self, id: i64, answered: &Answered) -> Result<()> {
        let message = answered.error.as_ref().map(|error| {
            let text = error.to_string();
            text.chars().take(MESSAGE_LEN_MAX).collect::<String>()
        });
        // A description's name is what the request is about, where the path names nothing.
        let mut tx = self.pool.begin().await?;
        let sql = "UPDATE audit SET status = ?1, message = ?2, detail = coalesce(?3, CASE WHEN who = ?6 AND ?1 < 400 THEN NULL ELSE detail END), subject = coalesce(subject, ?4) WHERE id = ?5";
        query(sql)
            .bind(i64::from(answered.status))
            .bind(message)
            .bind(detail(answered))
            .bind(named(answered))
            .bind(id)
            .bind(Peer::Anonymous.to_string())
            .execute(&mut *tx)
            .await?;
        if answered.error.is_some() {
            count(&mut tx, id).await?;
        }
        tx.commit().await?;
        Ok(())
    }

    /// Adds who came too often to the newest row of strangers. What could not be written is counted the next time.
    pub async fn count_turned_away(&self) -> Result<()> {
        self.count_refused().await?;
        let times = self.turned_away.swap(0, Ordering::Relaxed);
        let counted = self.add_turned_away(times).await;
        if !matches!(counted, Ok(true)) {
            self.turned_away.fetch_add(times, Ordering::Relaxed);
        }
        counted.map(drop)
    }

    /// Adds requests that were refused to the rows of their kinds.
    async fn count_refused(&self) -> Result<()> {
        let kinds = self.refused_kinds().take();
        for ((serial, what), more) in kinds {
            let sql = "UPDATE audit SET times = times + ?1, last_unix_s = ?2 WHERE id = (SELECT max(id) FROM audit WHERE certificate = ?3 AND what = ?4 AND status >= 400)";
            query(sql)
                .bind(i64::try_from(more).unwrap_or(i64::MAX))
                .bind(now_unix_s())
                .bind(serial)
                .bind(what)
                .execute(&self.pool)
                .await?;
        }
        Ok(())
    }

    fn refused_kinds(&self) -> MutexGuard<'_, RefusedKinds> {
        self.refused.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// False when there is no row yet to add them to.
    async fn add_turned_away(&self, times: u64) -> Result<bool> {
        let times = i64::try_from(times).unwrap_or(i64::MAX);
        if times == 0 {
            return Ok(true);
        }
        let sql = "UPDATE audit SET times = times + ?1, last_unix_s = ?2 WHERE id = (SELECT max(id) FROM audit WHERE who = ?3 AND status >= 400)";
        let done = query(sql)
            .bind(times)
            .bind(now_unix_s())
            .bind(Peer::Anonymous.to_string())
            .execute(&self.pool)
            .await?;
        Ok(done.rows_affected() > 0)
    }

    /// Entries of the log, newest first.
    pub async fn audit(&self, wished: &AuditQuery) -> Result<Vec<AuditEntry>> {
        type Row = (
            i64,
            i64,
            String,
            Option<String>,
            String,
            Option<String>,
            Option<String>,
            Option<i64>,
            Option<String>,
            i64,
            Option<i64>,
        );
        self.count_turned_away().await?;
        let sql = "SELECT id, unix_s, who, certificate, what, subject, detail, status, message, times, last_unix_s FROM audit WHERE ?1 IS NULL OR subject = ?1 ORDER BY id DESC LIMIT ?2";
        let rows: Vec<Row> = query_as(sql)
            .bind(&wished.about)
            .bind(i64::from(wished.last.unwrap_or(AuditQuery::LAST)))
            .fetch_all(&self.pool)
            .await?;
        rows.into_iter()
            .map(
                |(
                    id,
                    unix_s,
                    who,
                    certificate,
                    what,
                    subject,
                    detail,
                    status,
                    message,
                    times,
                    last,
                )| {
                    let status = status.map(u16::try_from).transpose();
                    let status = status.map_err(|e| unreadable("status in the audit log", e))?;
                    Ok(AuditEntry {
                        id,
                        unix_s,
                        who,
                        certificate,
                        what,
                        subject,
                        detail,
                        result: AuditResult::of_status(status),
                        message,
                        times: u64::try_from(times).unwrap_or(1),
                        last_unix_s: last,
                    })
                },
            )
            .collect()
    }
}

/// Counts a stranger's refused attempt in the row of the same kind that was begun within [`COUNTED_S`], if there is one.
async fn count(tx: &mut Transaction<'_, Sqlite>, id: i64) -> Result<()> {
    let earlier = "SELECT max(old.id) FROM audit old JOIN audit new ON new.id = ?1 WHERE old.who = ?2 AND new.who = ?2 AND old.id < ?1 AND old.what = new.what AND old.status = new.status AND old.unix_s > ?3";
    let now = now_unix_s();
    let earlier: Option<i64> = query_scalar(earlier)
        .bind(id)
        .bind(Peer::Anonymous.to_string())
        .bind(now.saturating_sub(COUNTED_S))
        .fetch_one(&mut **tx)
        .await?;
    let Some(earlier) = earlier else {
        return Ok(());
    };
    let counted = "UPDATE audit SET times = times + 1, last_unix_s = ?1, detail = (SELECT detail FROM audit WHERE id = ?2) WHERE id = ?3";
    query(counted)
        .bind(now)
        .bind(id)
        .bind(earlier)
        .execute(&mut **tx)
        .await?;
    query("DELETE FROM audit WHERE id = ?")
        .bind(id)
        .execute(&mut **tx)
        .await?;
    Ok(())
}

/// Of somebody who has no name, or a name that does not count, where the request came from.
fn stranger_from(asked: &Asked) -> Option<String> {
    let from = asked.from;
    let from = from.filter(|_| asked.peer == Peer::Anonymous || asked.is_refused)?;
    Some(format!("from {from}"))
}

/// An empty request says nothing, and what cannot be read is not kept. What a guest is told may be secret: only its kind and length are kept.
fn detail(answered: &Answered) -> Option<String> {
    let body = answered.body.as_deref()?.trim();
    if body == "{}" {
        return None;
    }
    let mut read: Value = serde_json::from_str(body).ok()?;
    Some(match hide_secrets(&mut read) {
        true => read.to_string(),
        false => body.to_owned(),
    })
}

/// Puts kind and length in the place of what a guest is told, wherever in the body somebody wrote it. Returns whether there was any.
fn hide_secrets(body: &mut Value) -> bool {
    match body {
        Value::Object(fields) => {
            let mut is_hidden = false;
            for (key, value) in fields.iter_mut() {
                is_hidden |= match may_be_secret(key) && !value.is_null() {
                    true => {
                        *value = Value::from(kind_and_length(value));
                        true
                    }
                    false => hide_secrets(value),
                };
            }
            is_hidden
        }
        Value::Array(items) => items
            .iter_mut()
            .fold(false, |is_hidden, item| hide_secrets(item) | is_hidden),
        _ => false,
    }
}

/// Whether a value under this key is for the guest alone; a person may have mistyped it.
fn may_be_secret(key: &str) -> bool {
    let letters = key.chars().filter(|letter| letter.is_alphanumeric());
    let plain: String = letters.flat_map(char::to_lowercase).collect();
    SECRET_KEYS.iter().any(|secret| plain.contains(secret))
}

/// Of a text its own length counts, of all else the length of its JSON; in bytes.
fn kind_and_length(value: &Value) -> String {
    let (kind, length) = match value {
        Value::String(text) => ("text", text.len()),
        Value::Array(_) => ("a list", value.to_string().len()),
        Value::Object(_) => ("a table", value.to_string().len()),
        _ => ("a value", value.to_string().len()),
    };
    format!("{kind} of {length} bytes")
}

/// The name within a description.
fn named(answered: &Answered) -> Option<String> {
    let body: Value = serde_json::from_str(answered.body.as_deref()?).ok()?;
    let name = body.get("name")?.as_str()?;
    Some(name.chars().take(128).collect())
}

fn who(peer: &Peer, login: Option<Login>) -> String {
    let Peer::Local { uid } = peer else {
        return peer.to_string();
    };
    let user = user_name(*uid);
    match login.filter(|login| login.0 != *uid) {
        Some(login) => format!("{user}, logged in as {}", user_name(login.0)),
        None => user,
    }
}

/// A user's name; the number where this machine knows none.
fn user_name(uid: u32) -> String {
    let known = std::fs::read_to_string("/etc/passwd")
        .ok()
        .and_then(|users| {
            users.lines().find_map(|line| {
                let mut fields = line.split(':');
                let name = fields.next()?;
                (fields.nth(1)?.parse() == Ok(uid)).then(|| name.to_owned())
            })
        });
    known.unwrap_or_else(|| format!("user {uid}"))
}

/// The command that makes a request.
fn what(asked: &Asked) -> String {
    let command = match (asked.method.as_str(), asked.route.as_str()) {
        ("POST", path::HOSTS) => "host add",
        ("DELETE", path::HOST) => "host remove",
        ("POST", path::FENCED) => "host fenced",
        ("POST", path::DRAIN) => "host drain",
        ("DELETE", path::DRAIN) => "host undrain",
        ("POST", path::JOIN) => "host join",
        ("POST", path::CERTIFICATE) => "certificate renew",
        ("DELETE", path::CERTIFICATE) => "host leave",
        ("POST", path::OPERATORS) => "operator add",
        ("DELETE", path::OPERATOR) => "operator remove",
        ("POST", path::VMS) => "vm create",
        ("PUT", path::VM) => "vm edit",
        ("DELETE", path::VM) => "vm delete",
        ("POST", path::START) => "vm start",
        ("POST", path::STOP) => "vm stop",
        ("POST", path::RESET) => "vm reset",
        ("POST", path::PAUSE) => "vm pause",
        ("POST", path::RESUME) => "vm resume",
        ("POST", path::RENEW) => "vm renew",
        ("POST", path::MOVE_DISKS) => "vm move-disk",
        ("POST", path::RESIZE_DISK) => "vm resize-disk",
        ("POST", path::LIMIT_DISK) => "vm limit-disk",
        ("POST", path::SNAPSHOTS) => "vm snapshot create",
        ("POST", path::REVERT_SNAPSHOT) => "vm snapshot revert",
        ("POST", path::DELETE_SNAPSHOT) => "vm snapshot delete",
        ("POST", path::CLONE) => "vm clone",
        ("DELETE", path::CLONE) => "vm clone --cancel",
        ("DELETE", path::MOVE_DISKS) => "vm move-disk --cancel",
        ("POST", path::RESOLVE) => "vm resolve --run-on",
        ("POST", path::KEEP) => "vm resolve --keep",
        ("POST", path::SITE_ACKNOWLEDGE) => "site acknowledge",
        ("POST", path::CONSOLE_TYPE) => "vm console",
        ("POST", path::MIGRATE) => "vm migrate",
        ("POST", path::CANCEL) => "migration cancel",
        (method, route) => return format!("{method} {route}"),
    };
    command.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_rpc::controller_client::RULES;

    #[test]
    fn every_request_that_changes_something_has_its_commands_name() {
        let people = |rule: &&godwit_rpc::Rule| {
            rule.method != "GET" && rule.access.allows(&Peer::Local { uid: 0 })
        };
        for rule in RULES.iter().filter(people) {
            let asked = Asked {
                peer: Peer::Local { uid: 0 },
                serial: None,
                login: None,
                from: None,
                method: rule.method.parse().unwrap(),
                route: rule.path.into(),
                subject: None,
                query: None,
                is_refused: false,
            };
            let what = what(&asked);
            assert!(!what.contains('/'), "{what}: add its command to `what`");
        }
    }

    #[test]
    fn what_a_guest_is_told_is_in_no_audit_whatever_its_key_and_type() {
        let told = |body: &str| {
            detail(&Answered {
                status: 200,
                error: None,
                body: Some(body.into()),
            })
        };
        let plain = r#"{"name":"web","vcpus":1,"cloud_init":null}"#;
        assert_eq!(told(plain).as_deref(), Some(plain));
        assert_eq!(told("{}"), None);
        for (secret, kept) in [
            (
                r##"{"cloud_init":{"user_data":"#!secret"}}"##,
                "a table of 24 bytes",
            ),
            (r##"{"cloud_init":"#!secret"}"##, "text of 8 bytes"),
            (
                r##"{"cloud_init":{"ssh_keys":["secret"]}}"##,
                "a table of 23 bytes",
            ),
            (
                r##"{"cloud_init":{"user_data_file":"#!secret"}}"##,
                "a table of 29 bytes",
            ),
            (
                r##"{"disk":[{"user_data":["#!secret"]}]}"##,
                "a list of 12 bytes",
            ),
            (r##"{"UserData":{"a":"#!secret"}}"##, "a table of 16 bytes"),
            (r##"{"user-data":"#!secret"}"##, "text of 8 bytes"),
            (r##"{"userdata":7}"##, "a value of 1 bytes"),
        ] {
            let said = told(secret).unwrap();
            let is_hidden = said.contains(kept) && !said.contains("secret");
            assert!(is_hidden, "{secret}: {said}");
        }
        assert_eq!(told(r##"{"user_data":"#!secret""##), None);
        assert_eq!(told("#!secret"), None);
    }

    #[test]
    fn a_person_who_became_root_is_named() {
        let root = Peer::Local { uid: 0 };
        assert_eq!(who(&root, None), "root");
        assert_eq!(who(&root, Some(Login(0))), "root");
        let odd = Some(Login(4_000_000_001));
        assert_eq!(who(&root, odd), "root, logged in as user 4000000001");
        let remote = Peer::Operator("jane".into());
        assert_eq!(who(&remote, None), "operator jane");
    }
}
