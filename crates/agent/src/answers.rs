//! What the records of VMs without a VM process answer other hosts.
//!
//! Part of [`Records`]. Refuses: what is no ownership message, and one about a VM whose process is being started.

use crate::life::phase_wants_process;
use crate::records::{Records, internal, or_absent, stored};
use godwit_ownership::{Action, Event, PeerMessage};
use godwit_types::{ApiError, ErrorCode, HostName, VmName};

impl Records {
    /// Answers another host's message about a VM that has no VM process here.
    pub(crate) fn answer(
        &self,
        vm: &VmName,
        from: HostName,
        message: serde_json::Value,
    ) -> Result<Vec<serde_json::Value>, ApiError> {
        let message: PeerMessage = serde_json::from_value(message).map_err(|error| {
            ApiError::new(
                ErrorCode::InvalidRequest,
                format!("no ownership message: {error}"),
            )
        })?;
        self.check_room(vm)?;
        let mut journal = self.lock(vm)?;
        let record = or_absent(journal.load().map_err(stored)?, vm);
        if phase_wants_process(&record.phase) {
            return Err(ApiError::new(
                ErrorCode::WrongState,
                "the VM process is being started: ask again",
            ));
        }
        let mut replies = Vec::new();
        let event = Event::Message {
            from: from.clone(),
            message,
        };
        self.drive_collecting(&mut journal, record, event, &mut |action| {
            if let Action::Send { to, message } = action
                && to == from
            {
                replies.push(message);
            }
        })?;
        replies
            .iter()
            .map(|reply| serde_json::to_value(reply).map_err(internal))
            .collect()
    }
}
