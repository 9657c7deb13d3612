//! A guest's serial console, and where its text begins.
//!
//! Part of [`Agent`]; owns nothing. The text is kept by the QEMU that runs the guest, so that it begins anew with each QEMU: when
//! the guest is started, and when it comes from another host. Refuses nothing: where the beginning is not known, it is not
//! said.

use super::{Agent, READ, Reply, blocking, unexpected};
use godwit_types::control_api::ConsoleText;
use godwit_types::host_api::{HostVm, VmAnswer, VmRequest};
use godwit_types::migration::{MigrationReport, Outcome, Side};
use godwit_types::{HostName, VmName};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

impl Agent {
    /// The last of what the guest wrote while it ran here.
    pub(crate) async fn console(self: &Arc<Self>, name: &VmName) -> Reply<ConsoleText> {
        let vm = self.known(name)?;
        let text = match vm.ask(&VmRequest::Console, READ).await? {
            VmAnswer::Console(text) => text,
            _ => return Err(unexpected(name)),
        };
        let mut console = ConsoleText {
            text,
            host: Some(self.host().clone()),
            ..ConsoleText::default()
        };
        if let Ok(seen) = self.vm(name).await {
            self.tell_beginning(&seen, &mut console).await;
        }
        Ok(console)
    }

    async fn tell_beginning(self: &Arc<Self>, seen: &HostVm, console: &mut ConsoleText) {
        let age = seen.qemu_pid.map(godwit_qemu::process::age);
        let Some(started) = age.and_then(|age| unix_s_before(SystemTime::now(), age.ok()?)) else {
            return;
        };
        console.since_unix_s = Some(started);
        let (agent, name) = (self.clone(), seen.spec.name.clone());
        let read = blocking(move || Ok(agent.reports.all(&[name])));
        let reports = read.await.unwrap_or_default();
        if let Some((came, from)) = came_from(&reports, started) {
            (console.since_unix_s, console.came_from) = (Some(came), Some(from));
        }
    }
}

fn unix_s_before(now: SystemTime, age: Duration) -> Option<u64> {
    let since = now.duration_since(UNIX_EPOCH).ok()?;
    Some(since.checked_sub(age)?.as_secs())
}

/// When and from where the guest of a QEMU that was started then came here, if it did: a QEMU that was started after the end
/// of a migration booted the guest anew.
fn came_from(reports: &[MigrationReport], started_unix_s: u64) -> Option<(u64, HostName)> {
    let came = reports.iter().filter(|report| {
        report.side == Side::Destination && report.outcome == Some(Outcome::Completed)
    });
    let ended = came.filter_map(|report| Some((report.ended_unix_s?, report.from.clone())));
    ended
        .filter(|(ended, _)| *ended >= started_unix_s)
        .max_by_key(|(ended, _)| *ended)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::tests::{Served, ended, put};
    use crate::test_support::{QEMU_PID, vm};
    use godwit_types::MigrationId;

    fn host(name: &str) -> HostName {
        HostName::new(name).unwrap()
    }

    /// A migration from host b that ended then.
    fn came(ended_unix_s: u64) -> MigrationReport {
        MigrationReport {
            from: host("b"),
            side: Side::Destination,
            ended_unix_s: Some(ended_unix_s),
            ..ended(&MigrationId::new("m7").unwrap())
        }
    }

    #[test]
    fn a_guest_came_by_the_last_move_that_ended_since_its_qemu_was_started() {
        let found = came_from(&[came(40), came(70), came(60)], 50);
        assert_eq!(found, Some((70, host("b"))));
        assert_eq!(came_from(&[came(40)], 50), None, "it was booted since");
        let mut others = [came(60), came(60), came(60)];
        others[0].outcome = Some(Outcome::Failed);
        others[1].side = Side::Source;
        others[2].ended_unix_s = None;
        assert_eq!(came_from(&others, 50), None);
    }

    #[test]
    fn a_process_that_is_older_than_the_clock_has_no_beginning() {
        let now = UNIX_EPOCH + Duration::from_secs(100);
        assert_eq!(unix_s_before(now, Duration::from_secs(40)), Some(60));
        assert_eq!(unix_s_before(now, Duration::from_secs(101)), None);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_console_says_where_it_is_read_and_since_when() {
        let served = Served::new().await;
        let (controller, web) = (served.controller(), vm("web"));
        controller.put_vm(&put("web", 1)).await.unwrap();
        controller.start(&web).await.unwrap();
        let mut expected = ConsoleText {
            text: "login:".into(),
            host: Some(host("a")),
            ..ConsoleText::default()
        };
        assert_eq!(controller.console(&web).await.unwrap(), expected);
        let pid = served.host.run_dir("web").join(QEMU_PID);
        std::fs::write(pid, std::process::id().to_string()).unwrap();
        let now = unix_s_before(SystemTime::now(), Duration::ZERO).unwrap();
        let booted = controller.console(&web).await.unwrap();
        assert!(booted.since_unix_s.is_some_and(|since| since <= now));
        assert_eq!(booted.came_from, None);
        let dir = served.host.config.vms_dir().join("web/migrations");
        std::fs::create_dir_all(&dir).unwrap();
        godwit_store::save_json(&dir.join("m7.json"), &came(now + 1)).unwrap();
        (expected.since_unix_s, expected.came_from) = (Some(now + 1), Some(host("b")));
        assert_eq!(controller.console(&web).await.unwrap(), expected);
        served.end("web");
    }
}
