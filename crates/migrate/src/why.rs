//! Why a migration ends without success, as people are told, and as the two hosts tell each other in the messages that end it.
//!
//! Plain data. Refuses: to decide anything by a reason. What a peer gives is bounded and on one line before it comes here.

use godwit_ownership::{PeerMessage, Reason};
use godwit_types::{HostName, MigrationId};

/// Why a migration ends without success.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Why {
    /// One sentence for people.
    pub reason: String,
    /// A person or a deadline wanted it; else it failed.
    pub cancelled: bool,
    /// There is no guest any more that could move.
    pub guest_ended: bool,
}

impl Why {
    /// Something failed, and nobody wanted that.
    pub fn failure(reason: impl Into<String>) -> Self {
        Self {
            reason: reason.into(),
            cancelled: false,
            guest_ended: false,
        }
    }

    /// A person or a deadline wanted it.
    pub fn wish(reason: impl Into<String>) -> Self {
        Self {
            cancelled: true,
            ..Self::failure(reason)
        }
    }

    /// The guest is no more.
    pub fn guest_ended(reason: impl Into<String>) -> Self {
        Self {
            guest_ended: true,
            ..Self::failure(reason)
        }
    }

    /// What the other host says of why it ended the migration, if that is what it says.
    pub fn said_by(from: &HostName, message: &PeerMessage) -> Option<Self> {
        match message {
            PeerMessage::Failed {
                reason: Some(why), ..
            } => Some(Self::failure(format!(
                "host {from} gave the migration up: {}",
                why.as_str()
            ))),
            PeerMessage::Abort {
                reason: Some(why),
                cancelled,
                ..
            } => Some(match cancelled {
                true => Self::wish(why.as_str()),
                false => Self::failure(format!("the source ended the migration: {}", why.as_str())),
            }),
            _ => None,
        }
    }

    /// The message of a source that has ended the migration.
    pub fn abort(migration: MigrationId, why: Option<&Self>) -> PeerMessage {
        let mut abort = PeerMessage::abort(migration);
        Self::tell(why, &mut abort);
        abort
    }

    /// Has a message that ends a migration say why.
    pub fn tell(why: Option<&Self>, message: &mut PeerMessage) {
        let said = why.map(|why| Reason::clipped(&why.reason));
        match message {
            PeerMessage::Failed { reason, .. } => *reason = said,
            PeerMessage::Abort {
                reason, cancelled, ..
            } => {
                *reason = said;
                *cancelled = why.is_some_and(|why| why.cancelled);
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host() -> HostName {
        HostName::new("a").unwrap()
    }

    fn id() -> MigrationId {
        MigrationId::new("m").unwrap()
    }

    #[test]
    fn an_abort_says_why_and_whose_wish_it_was() {
        for (why, heard) in [
            (Why::wish("enough"), Why::wish("enough")),
            (
                Why::guest_ended("the guest panicked"),
                Why::failure("the source ended the migration: the guest panicked"),
            ),
        ] {
            let abort = Why::abort(id(), Some(&why));
            assert_eq!(Why::said_by(&host(), &abort), Some(heard));
        }
        let silent = Why::abort(id(), None);
        assert_eq!(Why::said_by(&host(), &silent), None);
    }

    #[test]
    fn a_failure_says_why_on_one_line() {
        let mut failed = PeerMessage::Failed {
            migration: id(),
            reason: None,
        };
        Why::tell(Some(&Why::failure("its disk\nis full")), &mut failed);
        let heard = Why::failure("host a gave the migration up: its disk is full");
        assert_eq!(Why::said_by(&host(), &failed), Some(heard));
    }
}
