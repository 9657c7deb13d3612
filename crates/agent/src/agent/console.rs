//! A guest's serial console: where its text begins, what it writes, and what is typed to it.
//!
//! Part of [`Agent`]; owns nothing. The text is kept by the VM process; it begins anew when the guest is started, and when it
//! comes from a host that does not send it along. A stream ends with whatever ends its VM process: who follows it asks again
//! from its place on. Refuses: to follow, or to type, where the VM process is too old for it. Where the beginning is not
//! known, it is not said.

use super::{Agent, READ, Reply, blocking, done, unexpected};
use futures_util::stream::{self, Stream, StreamExt as _};
use godwit_types::console::{ConsolePiece, ConsolePlace, ConsoleTyped};
use godwit_types::control_api::{ConsoleText, Done};
use godwit_types::host_api::{HostVm, VmAnswer, VmRequest};
use godwit_types::migration::{MigrationReport, Outcome, Side};
use godwit_types::{ApiError, ErrorCode, HostName, VmName};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// How long a VM process is asked at a time for what comes next.
const FOLLOW: Duration = Duration::from_secs(20);
/// Longest wait for its answer besides.
const TYPING: Duration = Duration::from_secs(10);

impl Agent {
    /// The last of what the guest wrote while it ran here.
    pub(crate) async fn console(self: &Arc<Self>, name: &VmName) -> Reply<ConsoleText> {
        let vm = self.known(name)?;
        let (place, wait_ms) = (None, 0);
        let read = VmRequest::ReadConsole { place, wait_ms };
        let (text, came_along) = match vm.ask(&read, READ).await {
            Ok(VmAnswer::ConsolePiece(piece)) => {
                let text = String::from_utf8_lossy(&piece.bytes).into_owned();
                (text, piece.came_along)
            }
            Err(error) if is_not_understood(&error) => {
                match vm.ask(&VmRequest::Console, READ).await? {
                    VmAnswer::Console(text) => (text, false),
                    _ => return Err(unexpected(name)),
                }
            }
            Err(error) => return Err(self.why_not(name, error).await),
            Ok(_) => return Err(unexpected(name)),
        };
        let mut console = ConsoleText {
            text,
            host: Some(self.host().clone()),
            came_along,
            ..ConsoleText::default()
        };
        if let Ok(seen) = self.vm(name).await {
            self.tell_beginning(&seen, &mut console).await;
        }
        Ok(console)
    }

    /// What the guest writes, from a place on, for as long as its VM process lives.
    pub(crate) async fn follow_console(
        self: &Arc<Self>,
        name: VmName,
        place: Option<ConsolePlace>,
    ) -> Reply<impl Stream<Item = Reply<ConsolePiece>> + use<>> {
        let first = self.read_console(&name, place, Duration::ZERO).await?;
        let follower = (self.clone(), name, Some(first.place()));
        let rest = stream::unfold(Some(follower), async |follower| {
            let (agent, name, mut place) = follower?;
            loop {
                let next = agent.read_console(&name, place.clone(), FOLLOW).await;
                match next {
                    Ok(piece) if Some(piece.place()) == place => {}
                    Ok(piece) => {
                        place = Some(piece.place());
                        return Some((Ok(piece), Some((agent, name, place))));
                    }
                    Err(error) => return Some((Err(error), None)),
                }
            }
        });
        Ok(stream::once(async { Ok(first) }).chain(rest))
    }

    async fn read_console(
        self: &Arc<Self>,
        name: &VmName,
        place: Option<ConsolePlace>,
        wait: Duration,
    ) -> Reply<ConsolePiece> {
        let wait_ms = u64::try_from(wait.as_millis()).unwrap_or(0);
        let request = VmRequest::ReadConsole { place, wait_ms };
        match self.ask_console(name, &request, wait + TYPING).await? {
            VmAnswer::ConsolePiece(mut piece) => {
                piece.host = Some(self.host().clone());
                Ok(piece)
            }
            _ => Err(unexpected(name)),
        }
    }

    /// Types to the guest.
    pub(crate) async fn type_console(
        self: &Arc<Self>,
        name: &VmName,
        typed: ConsoleTyped,
    ) -> Reply<Done> {
        let request = VmRequest::TypeConsole(typed);
        match self.ask_console(name, &request, TYPING).await? {
            VmAnswer::Done(message) => Ok(done(message)),
            _ => Err(unexpected(name)),
        }
    }

    async fn ask_console(
        self: &Arc<Self>,
        name: &VmName,
        request: &VmRequest,
        patience: Duration,
    ) -> Reply<VmAnswer> {
        match self.known(name)?.ask(request, patience).await {
            Err(error) if is_not_understood(&error) => Err(self.is_too_old(name)),
            Err(error) => Err(self.why_not(name, error).await),
            answer => answer,
        }
    }

    fn is_too_old(&self, name: &VmName) -> ApiError {
        let host = self.host();
        let message = format!(
            "the VM process of VM '{name}' on host '{host}' is of an older Godwit, whose console only prints: run 'godwit vm renew {name}' and try again, or use 'godwit vm console {name} --print'"
        );
        ApiError::new(ErrorCode::Incompatible, message).on_host(host)
    }

    /// A VM that is off has no VM process, which is no failure of anything.
    async fn why_not(self: &Arc<Self>, name: &VmName, error: ApiError) -> ApiError {
        match self.vm(name).await {
            Ok(vm) if vm.state.is_off() => {
                let message = format!("VM '{name}' is not running on host '{}'", self.host());
                ApiError::new(ErrorCode::WrongState, message)
            }
            _ => error,
        }
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

/// A VM process refuses no request for what it asks, but for words that it does not know.
fn is_not_understood(error: &ApiError) -> bool {
    error.code == ErrorCode::InvalidRequest
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
    use crate::test_support::{DIALECT, QEMU_PID, vm};
    use godwit_rpc::sse::EventStream;
    use godwit_types::MigrationId;
    use godwit_types::console::ConsoleQuery;

    const LONG: Duration = Duration::from_secs(60);

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

    async fn piece(events: &mut EventStream) -> ConsolePiece {
        let event = events.next(LONG).await.unwrap().unwrap();
        assert_eq!(event.name, "console", "{event:?}");
        serde_json::from_str(&event.data).unwrap()
    }

    /// So many bytes and where they are, in however many pieces they come.
    async fn pieces(events: &mut EventStream, bytes: usize) -> (u64, Vec<u8>) {
        let ConsolePiece {
            from,
            bytes: mut all,
            ..
        } = piece(events).await;
        while all.len() < bytes {
            all.extend(piece(events).await.bytes);
        }
        (from, all)
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_console_is_followed_from_a_place_on_until_its_vm_process_ends() {
        let served = Served::new().await;
        let (controller, web) = (served.controller(), vm("web"));
        controller.put_vm(&put("web", 1)).await.unwrap();
        let whole = ConsoleQuery::default();
        let Err(error) = controller.console_events(&web, &whole).await else {
            panic!("it is off");
        };
        let off = "VM 'web' is not running on host 'a'";
        assert_eq!(error.to_string(), off);
        controller.start(&web).await.unwrap();
        let mut events = controller.console_events(&web, &whole).await.unwrap();
        let first = piece(&mut events).await;
        assert_eq!((first.from, first.bytes.as_slice()), (0, &b"login:"[..]));
        let bytes = b"root".to_vec();
        let typed = ConsoleTyped { bytes };
        controller.console_type(&web, &typed).await.unwrap();
        let answer = (6, b"root\n".to_vec());
        assert_eq!(pieces(&mut events, answer.1.len()).await, answer);
        let place = Some(first.place());
        let later = ConsoleQuery { place, host: None };
        let mut later = controller.console_events(&web, &later).await.unwrap();
        assert_eq!(pieces(&mut later, answer.1.len()).await, answer);
        served.end("web");
        let last = events.next(LONG).await.unwrap().unwrap();
        assert_eq!(last.name, "error", "{last:?}");
        assert_eq!(events.next(LONG).await.unwrap(), None);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_vm_process_of_a_version_before_only_prints() {
        let served = Served::new().await;
        let (controller, web) = (served.controller(), vm("web"));
        controller.put_vm(&put("web", 1)).await.unwrap();
        std::fs::write(served.host.run_dir("web").join(DIALECT), "older").unwrap();
        controller.start(&web).await.unwrap();
        assert_eq!(controller.console(&web).await.unwrap().text, "login:");
        let whole = ConsoleQuery::default();
        let refused = controller.console_events(&web, &whole).await.err().unwrap();
        assert_eq!(refused.code(), ErrorCode::Incompatible);
        let renewed = "run 'godwit vm renew web'";
        assert!(refused.to_string().contains(renewed), "{refused}");
        served.end("web");
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
