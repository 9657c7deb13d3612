//! What is known of this host's QEMU at this moment.
//!
//! Owns the last answer and what the program's file was then. Asked at the agent's start, and again once the file is
//! another one (an upgrade) or while an answer failed. Refuses: nothing.

use crate::config::HostConfig;
use crate::pause::stops_within;
use crate::qemu_facts::{QemuFacts, QemuFactsError};
use crate::qemu_trial::TrialSetting;
use crate::users::User;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;
use tokio::sync::watch;

/// Time between two looks at whether the program is another one.
const LOOK: Duration = Duration::from_secs(20);
/// Longest wait for each answer of the program.
const PATIENCE: Duration = Duration::from_secs(10);

/// What makes a file another one: device, inode, size, time of its last change.
type FileIs = (u64, u64, u64, i64, i64);
/// What QEMU's program said of itself when it was asked last.
pub type Answer = Arc<Result<QemuFacts, QemuFactsError>>;

/// The last answer, and of which file it was.
pub struct QemuNow(RwLock<(Option<FileIs>, Answer)>);

fn file_is(program: &Path) -> Option<FileIs> {
    let file = std::fs::metadata(program).ok()?;
    Some((
        file.dev(),
        file.ino(),
        file.size(),
        file.mtime(),
        file.mtime_nsec(),
    ))
}

/// Asks QEMU all that a host has to know of it.
pub async fn ask(config: &HostConfig, user: User) -> Result<QemuFacts, QemuFactsError> {
    let setting = TrialSetting::new(config, user);
    QemuFacts::ask_and_try(&config.qemu, setting, PATIENCE).await
}

fn say(answer: &Result<QemuFacts, QemuFactsError>) {
    match answer {
        Err(error) => tracing::error!(%error, "no VM can run here"),
        Ok(facts) => {
            for (accelerator, cpus) in &facts.tried.cpus {
                if let Err(why) = cpus {
                    tracing::warn!(%accelerator, %why, "QEMU was tried in vain: no VM is placed here with this accelerator");
                }
            }
            if let Some(why) = &facts.tried.no_handout {
                tracing::error!(%why, "no VM can run here");
            }
        }
    }
}

impl QemuNow {
    /// Asks for the first time.
    pub async fn begin(config: &HostConfig, user: User) -> Self {
        let file = file_is(&config.qemu);
        let answer = ask(config, user).await;
        say(&answer);
        Self(RwLock::new((file, Arc::new(answer))))
    }

    /// One that was told instead of asked.
    #[cfg(test)]
    pub fn told(answer: Result<QemuFacts, QemuFactsError>) -> Self {
        Self(RwLock::new((None, Arc::new(answer))))
    }

    pub fn get(&self) -> Answer {
        self.0
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .1
            .clone()
    }

    fn is_stale(&self, program: &Path) -> bool {
        let (file, answer) = &*self.0.read().unwrap_or_else(PoisonError::into_inner);
        let failed = match answer.as_ref() {
            Err(_) => true,
            Ok(facts) => {
                facts.tried.no_handout.is_some() || facts.tried.cpus.values().any(Result::is_err)
            }
        };
        failed || *file != file_is(program)
    }

    /// Asks again whenever that may give another answer.
    pub async fn keep(&self, config: &HostConfig, user: User, mut stop: watch::Receiver<bool>) {
        while !stops_within(&mut stop, LOOK).await {
            if self.is_stale(&config.qemu) {
                let file = file_is(&config.qemu);
                let answer = Arc::new(ask(config, user).await);
                let mut now = self.0.write().unwrap_or_else(PoisonError::into_inner);
                if now.1.as_ref().as_ref().ok() != answer.as_ref().as_ref().ok() {
                    say(&answer);
                }
                *now = (file, answer);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_program_or_a_failure_is_asked_again() {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("qemu");
        std::fs::write(&program, "one").unwrap();
        let now = |answer| QemuNow(RwLock::new((file_is(&program), Arc::new(answer))));
        let fine = now(Ok(QemuFacts::default()));
        assert!(!fine.is_stale(&program));
        let error = QemuFactsError::NoVersion {
            program: "q".into(),
            text: String::new(),
        };
        assert!(now(Err(error)).is_stale(&program));
        let mut facts = QemuFacts::default();
        facts.tried.no_handout = Some("nobody listens".into());
        assert!(now(Ok(facts)).is_stale(&program));
        std::fs::write(&program, "an upgrade").unwrap();
        assert!(fine.is_stale(&program));
    }
}
