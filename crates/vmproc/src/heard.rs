//! What the other host says about who may run the VM, and its words for why it gave a migration up.
//!
//! Part of [`Vm`]. The ownership core judges the message; the words are for people. Refuses: words of another host than the
//! destination of this very migration, and those that do not end it.

use crate::vm::Vm;
use godwit_ownership::{Event, PeerMessage};
use godwit_types::migration::Side;
use godwit_types::{HostName, MigrationId};

impl Vm {
    /// Hands the other host's message to the core. Why that host gave up is this side's reason, if that ends the migration.
    pub(crate) fn hear(&mut self, from: HostName, message: PeerMessage) {
        let why = match &message {
            PeerMessage::Failed {
                migration,
                reason: Some(reason),
            } => Some((migration.clone(), reason.as_str().to_owned())),
            _ => None,
        };
        let given = why.filter(|(id, _)| self.gives_its_reason(&from, id));
        if let (Some((_, why)), Some(migration)) = (&given, &mut self.migration) {
            migration.reason = Some(format!("host {from} gave the migration up: {why}"));
        }
        self.feed(Event::Message { from, message });
        if let (Some((id, _)), Some(migration)) = (&given, &mut self.migration)
            && migration.id == *id
        {
            migration.reason = None;
        }
    }

    /// Whether that host is the destination of this very migration, which has no reason yet.
    fn gives_its_reason(&self, from: &HostName, id: &MigrationId) -> bool {
        self.migration.as_ref().is_some_and(|migration| {
            migration.id == *id
                && migration.peer == *from
                && migration.side == Side::Source
                && migration.reason.is_none()
        })
    }
}
