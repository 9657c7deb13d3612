//! What the records of VMs without a VM process answer other hosts.
//!
//! Part of [`Records`]. Refuses: what is no ownership message, one about a VM whose process is being started, and to
//! begin a record at another host's word where there are [`PEERS_VMS_MAX`] already, or where the answer needs none.

use crate::life::phase_wants_process;
use crate::records::{PEERS_VMS_MAX, Records, internal, or_absent, stored};
use godwit_ownership::{Action, Event, HostRecord, PeerMessage, Qemu, VmCore};
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
        let event = Event::Message {
            from: from.clone(),
            message,
        };
        let unwritten = match self.dir(vm).is_dir() {
            true => None,
            false => self.answer_unwritten(vm, &from, event.clone())?,
        };
        let replies = match unwritten {
            Some(replies) => replies,
            None => self.answer_durably(vm, &from, event)?,
        };
        replies
            .iter()
            .map(|reply| serde_json::to_value(reply).map_err(internal))
            .collect()
    }

    /// What is said of a VM without a record, if that needs none: an answer that binds does.
    fn answer_unwritten(
        &self,
        vm: &VmName,
        from: &HostName,
        event: Event,
    ) -> Result<Option<Vec<PeerMessage>>, ApiError> {
        let absent = HostRecord::absent(vm.clone());
        // It asks first that its record be durable: where there is none it is absent, which is what it says.
        let (mut core, _) =
            VmCore::recover(absent, self.host().clone(), Qemu::Dead).map_err(internal)?;
        let mut actions = core.handle(Event::Persisted);
        actions.extend(core.handle(event));
        if core.is_writing() {
            return Ok(None);
        }
        let replies = actions.into_iter().filter_map(|action| reply(action, from));
        Ok(Some(replies.collect()))
    }

    fn answer_durably(
        &self,
        vm: &VmName,
        from: &HostName,
        event: Event,
    ) -> Result<Vec<PeerMessage>, ApiError> {
        self.check_room(vm, PEERS_VMS_MAX)?;
        let mut journal = self.lock(vm)?;
        let record = or_absent(journal.load().map_err(stored)?, vm);
        if phase_wants_process(&record.phase) {
            return Err(ApiError::new(
                ErrorCode::WrongState,
                "the VM process is being started: ask again",
            ));
        }
        let mut replies = Vec::new();
        self.drive_collecting(&mut journal, record, event, &mut |action| {
            replies.extend(reply(action, from));
        })?;
        Ok(replies)
    }
}

/// What an action sends to whoever asked.
fn reply(action: Action, asker: &HostName) -> Option<PeerMessage> {
    match action {
        Action::Send { to, message } if to == *asker => Some(message),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::tests::{Served, ended, host_name, said};
    use crate::records::VMS_MAX;
    use crate::test_support::{TestHost, vm};
    use godwit_ownership::{Phase, Power};
    use godwit_rpc::Role;
    use godwit_store::save_json;
    use godwit_types::host_api::REPORTS_DIR;
    use godwit_types::{Generation, MigrationId};

    fn about(web: &str, host: &TestHost, message: &PeerMessage) -> Result<Vec<String>, ApiError> {
        let from = HostName::new("b").unwrap();
        let message = serde_json::to_value(message).unwrap();
        let replies = host.records().answer(&vm(web), from, message)?;
        let word = |reply: serde_json::Value| reply["message"].as_str().unwrap().to_owned();
        Ok(replies.into_iter().map(word).collect())
    }

    fn migration() -> MigrationId {
        MigrationId::new("m1").unwrap()
    }

    fn holding(generation: u64) -> PeerMessage {
        PeerMessage::Holding {
            migration: migration(),
            generation: Generation(generation),
        }
    }

    /// Each message that may come, about this generation.
    fn messages(generation: Generation) -> Vec<(&'static str, PeerMessage)> {
        let words = [
            "ready",
            "permit",
            "ask-holding",
            "holding",
            "confirmed",
            "refused",
            "ask-gift",
            "undecided",
            "withdrawn",
            "abort",
            "failed",
            "prepared",
            "superseded",
        ];
        let message = |word: &'static str| {
            let message = serde_json::from_value(serde_json::json!({
                "message": word, "migration": migration(), "generation": generation,
                "highest": generation, "by": generation.0.saturating_add(1),
            }));
            (word, message.unwrap())
        };
        words.map(message).into()
    }

    #[test]
    fn a_message_that_needs_no_record_of_an_unknown_vm_makes_none() {
        // What binds is durable before it is said; `holding` is answered that this host knows it durably.
        let binding = ["ready", "permit", "ask-holding", "holding", "ask-gift"];
        for generation in [Generation(7), Generation(u64::MAX)] {
            let host = TestHost::new();
            for (word, message) in messages(generation) {
                let said = about(word, &host, &message).unwrap();
                let is_believed = generation == Generation(7) && binding.contains(&word);
                assert_eq!(!said.is_empty(), is_believed, "{word}: {said:?}");
                let dir = host.records().dir(&vm(word));
                assert_eq!(dir.is_dir(), is_believed, "{word} {generation}");
                let highest = host.records().record(&vm(word)).unwrap().highest;
                assert_eq!(highest == generation, is_believed, "{word}");
            }
        }
    }

    #[test]
    fn a_host_that_names_many_vms_leaves_room_for_the_controllers() {
        let host = TestHost::new();
        let (records, level) = (host.records(), Generation(5));
        about("known", &host, &holding(3)).unwrap();
        for number in 1..PEERS_VMS_MAX {
            std::fs::create_dir(records.vms_dir().join(format!("vm-{number}"))).unwrap();
        }
        let full = about("one-more", &host, &holding(3)).unwrap_err().message;
        let dir = records.vms_dir();
        assert!(full.contains(&dir.display().to_string()), "{full}");
        assert!(full.contains(&PEERS_VMS_MAX.to_string()), "{full}");
        assert!(!records.dir(&vm("one-more")).exists());
        assert_eq!(about("known", &host, &holding(4)).unwrap(), ["confirmed"]);
        let (_, abort) = &messages(Generation(3))[9];
        assert!(about("one-more", &host, abort).unwrap().is_empty());
        // The controller's.
        let new = vm("new");
        assert_eq!(records.survey(&new, level).unwrap().highest, level);
        records.put(&crate::api::tests::put("new", 6)).unwrap();
        for number in PEERS_VMS_MAX..VMS_MAX - 1 {
            std::fs::create_dir(dir.join(format!("vm-{number}"))).unwrap();
        }
        let full = records.survey(&vm("last"), level).unwrap_err().message;
        assert!(full.contains(&VMS_MAX.to_string()), "{full}");
    }

    /// Its process alone knows the images, and ends by itself again.
    #[tokio::test(flavor = "multi_thread")]
    async fn a_vm_that_is_off_or_gone_has_a_process_for_whoever_asks_for_its_disks() {
        let migration = MigrationId::new("m").unwrap();
        let ask = |question: &PeerMessage| said(serde_json::to_value(question).unwrap());
        let for_disks = PeerMessage::ask_for_disks(migration.clone());
        let for_gift = PeerMessage::AskGift {
            migration: migration.clone(),
            generation: Generation(1),
        };
        let moved = Phase::Moved {
            generation: Generation(2),
            migration: migration.clone(),
            to: host_name("c"),
        };
        for is_off in [true, false] {
            let served = Served::new().await;
            match is_off {
                true => served.host.hold("web", Power::Off),
                false => served.host.record("web", Generation(1), moved.clone()),
            }
            served.agent.take_up().unwrap();
            let peer = served.client(&Role::Host(host_name("b")));
            let message = ask(&for_disks);
            for message in [&ask(&for_gift), &message] {
                let replies = peer.peer(&vm("web"), message).await.unwrap();
                assert!(replies.iter().all(|reply| reply["echo"].is_null()));
            }
            let reports = served.host.config.vms_dir().join("web").join(REPORTS_DIR);
            std::fs::create_dir_all(&reports).unwrap();
            let mut report = ended(&migration);
            report.to = host_name("b");
            save_json(&reports.join("m.json"), &report).unwrap();
            let replies = peer.peer(&vm("web"), &ask(&for_gift)).await.unwrap();
            assert!(replies.iter().all(|reply| reply["echo"].is_null()));
            let other = served.client(&Role::Host(host_name("d")));
            let replies = other.peer(&vm("web"), &message).await.unwrap();
            assert!(replies.iter().all(|reply| reply["echo"].is_null()));
            let replies = peer.peer(&vm("web"), &message).await.unwrap();
            assert_eq!(replies, [serde_json::json!({ "echo": message.message })]);
            served.end("web");
            // Of a VM that never was here no process tells anything.
            let replies = peer.peer(&vm("none"), &message).await.unwrap();
            assert!(replies.iter().all(|reply| reply["echo"].is_null()));
        }
    }
}
