//! When this controller last took over with an old copy of its database: what only the lost one knew is forgotten without
//! another word, so people are told for a day.
//!
//! Owns `takeover.json` in the state directory. Refuses: to take a file that cannot be read for a takeover that was.

use crate::app::App;
use godwit_rpc::pki::now_unix_s;
use serde::{Deserialize, Serialize};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// For how long people are told, seconds.
const TOLD_FOR_S: i64 = 24 * 3600;
const LOOK_EACH: Duration = Duration::from_secs(1);

/// The epoch that was noted last, which rises with a takeover and never else.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Noted {
    epoch: u64,
    /// When it rose, seconds since 1970; 0 if it was not seen to rise.
    unix_s: i64,
}

impl Noted {
    /// What is to be noted at `now` of a controller in charge that is in this epoch.
    fn follow(before: Option<Self>, epoch: u64, now: i64) -> Self {
        match before {
            Some(before) if before.epoch >= epoch => before,
            Some(_) => Self { epoch, unix_s: now },
            None => Self { epoch, unix_s: 0 },
        }
    }

    fn sentence(self, now: i64) -> Option<String> {
        let since = now - self.unix_s;
        let is_told = self.unix_s > 0 && (0..TOLD_FOR_S).contains(&since);
        is_told.then(|| format!(
            "this controller took over {since} s ago with an old copy of its database. What only the lost one knew is forgotten: which hosts were removed and which certificates revoked, VMs' descriptions that were edited or deleted, drains (one that was ended goes on until 'godwit host undrain HOST'), VMs that were never started, join tokens, old reports. Remove again what was removed, and edit again what was edited. See 'godwit host list' for hosts that take VMs again; this is shown for a day, or until 'godwit site acknowledge'"
        ))
    }
}

fn path(app: &App) -> PathBuf {
    app.config.state_dir.join("takeover.json")
}

fn read(path: &Path) -> std::io::Result<Option<Noted>> {
    match std::fs::read(path) {
        Ok(text) => Ok(Some(serde_json::from_slice(&text)?)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

fn write(path: &Path, noted: Noted) -> std::io::Result<()> {
    let fresh = path.with_extension("new");
    let mut file = std::fs::File::create(&fresh)?;
    file.write_all(&serde_json::to_vec(&noted)?)?;
    file.sync_all()?;
    std::fs::rename(&fresh, path)?;
    match path.parent() {
        Some(dir) => std::fs::File::open(dir)?.sync_all(),
        None => Ok(()),
    }
}

/// A person has seen it: it is told no more. False when there was nothing to tell.
pub fn acknowledge(app: &App) -> std::io::Result<bool> {
    let path = path(app);
    let Some(noted) = read(&path)?.filter(|noted| noted.sentence(now_unix_s()).is_some()) else {
        return Ok(false);
    };
    write(&path, Noted { unix_s: 0, ..noted })?;
    Ok(true)
}

/// Notes a takeover that happened since the last look; what is to be told now, if anything.
pub fn look(app: &App) -> Option<String> {
    let (epoch, in_charge) = {
        let state = app.state();
        (state.book.stamp().epoch, state.book.is_in_charge())
    };
    let (path, now) = (path(app), now_unix_s());
    let before = match read(&path) {
        Ok(before) => before,
        Err(error) => {
            tracing::warn!(%error, path = %path.display(), "when this controller took over cannot be read");
            return None;
        }
    };
    let noted = match in_charge || before.is_none() {
        true => Noted::follow(before, epoch, now),
        false => before?,
    };
    if before != Some(noted)
        && let Err(error) = write(&path, noted)
    {
        tracing::warn!(%error, path = %path.display(), "when this controller took over is not kept");
    }
    noted.sentence(now)
}

/// Looks until `stop` turns true.
pub async fn keep_looking(app: Arc<App>, mut stop: watch::Receiver<bool>) {
    while !*stop.borrow_and_update() {
        let looking = app.clone();
        if tokio::task::spawn_blocking(move || drop(look(&looking)))
            .await
            .is_err()
        {
            return;
        }
        if matches!(
            tokio::time::timeout(LOOK_EACH, stop.changed()).await,
            Ok(Err(_))
        ) {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_takeover_is_told_of_and_for_a_day() {
        let first = Noted::follow(None, 4, 1_000);
        assert_eq!(first.sentence(1_000), None, "it was not seen to rise");
        assert_eq!(Noted::follow(Some(first), 4, 2_000), first);
        let over = Noted::follow(Some(first), 5, 2_000);
        let told = over.sentence(2_030).unwrap();
        assert!(
            told.contains("30 s ago") && told.contains("drains"),
            "{told}"
        );
        assert!(
            told.contains("removed") && told.contains("revoked") && told.contains("edited"),
            "{told}"
        );
        assert_eq!(Noted::follow(Some(over), 5, 9_000), over);
        assert_eq!(over.sentence(2_000 + TOLD_FOR_S), None);
    }
}
