//! The VM process's socket: one JSON line in, one JSON line out, for the agent on the same host.
//!
//! Owns the listening socket and a thread per connection. Knows nothing of VMs: each request goes to the VM's own
//! thread and the answer comes back on a channel. Refuses: peers other than root and this process's own user, lines
//! over the limit, more connections than the limit.

use crate::ask::{Ask, Connection};
use crate::console::Desk;
use crate::input::{Input, Request};
use crate::outbox::Outbox;
use godwit_types::host_api::{MESSAGE_LEN_MAX, VmAnswer, VmRequest};
use godwit_types::version::VERSION;
use godwit_types::{ApiError, ErrorCode};
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Sender, sync_channel};
use std::thread::Builder;
use std::time::Duration;

/// Most connections at once: the agent needs two, people's tools a few.
const CONNECTIONS_MAX: usize = 32;
/// Pause after a connection that could not be taken: what it lacked will hardly be there at once.
const FAILED_PAUSE: Duration = Duration::from_millis(100);
/// Longest time that a request may take before its caller is told that it goes on.
const ANSWER_WAIT: Duration = Duration::from_secs(120);

/// What connections answer from by themselves, without the VM's own thread.
#[derive(Debug, Clone)]
pub(crate) struct AtHand {
    pub outbox: Arc<Outbox>,
    pub desk: Arc<Desk>,
}

/// Serves on a socket at `path`, which only root gets at, for ever, in threads of its own. Without a thread no socket is
/// left there, so that whoever looks knows.
pub(crate) fn serve(path: &Path, inputs: Sender<Input>, at_hand: AtHand) -> std::io::Result<()> {
    let listener = bind(path)?;
    let work = move || admit(listener.incoming(), &inputs, &at_hand);
    let spawned = Builder::new().name("listen".into()).spawn(work);
    spawned.map(drop).inspect_err(|_| {
        let _ = std::fs::remove_file(path);
    })
}

fn bind(path: &Path) -> std::io::Result<UnixListener> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}

/// Gives each connection a thread; one for which there is none is closed. Where connections fail, for want of threads or
/// descriptors, the next waits for a moment.
fn admit(
    connections: impl Iterator<Item = std::io::Result<UnixStream>>,
    inputs: &Sender<Input>,
    at_hand: &AtHand,
) {
    // Each connection's thread has one more.
    let open = Arc::new(());
    let mut failed_before = false;
    for connection in connections {
        let begun = connection.and_then(|stream| {
            if Arc::strong_count(&open) > CONNECTIONS_MAX {
                return Ok(());
            }
            let (inputs, at_hand, open) = (inputs.clone(), at_hand.clone(), open.clone());
            let work = move || {
                // A connection that breaks concerns only its peer.
                let _ = converse(stream, &inputs, &at_hand);
                drop(open);
            };
            let spawned = Builder::new().name("answer".into()).spawn(work);
            spawned.map(drop)
        });
        if let (Err(error), false) = (&begun, failed_before) {
            tracing::warn!(%error, "this VM process cannot take a connection of its agent");
        }
        failed_before = begun.is_err();
        if failed_before {
            std::thread::sleep(FAILED_PAUSE);
        }
    }
}

fn converse(stream: UnixStream, inputs: &Sender<Input>, at_hand: &AtHand) -> std::io::Result<()> {
    if !may_ask(&stream)? {
        return Ok(());
    }
    let mut writer = stream.try_clone()?;
    let mut reader = BufReader::new(stream);
    let mut line = Vec::new();
    loop {
        line.clear();
        let limit = MESSAGE_LEN_MAX as u64;
        if reader.by_ref().take(limit).read_until(b'\n', &mut line)? == 0 {
            return Ok(());
        }
        let is_whole = line.last() == Some(&b'\n');
        let answer = if is_whole {
            answer(&line, inputs, at_hand)
        } else {
            error(ErrorCode::InvalidRequest, &unfinished(line.len()))
        };
        let mut text = serde_json::to_vec(&answer)?;
        text.push(b'\n');
        writer.write_all(&text)?;
        if !is_whole {
            // What may follow is the rest of this line, and no request.
            return Ok(());
        }
    }
}

/// What is wrong with a line of so many bytes that has no end.
fn unfinished(len: usize) -> String {
    if len < MESSAGE_LEN_MAX {
        return "the request was cut off before the end of its line: ask again".into();
    }
    format!("the request is longer than the {MESSAGE_LEN_MAX} bytes that this interface takes")
}

fn may_ask(stream: &UnixStream) -> std::io::Result<bool> {
    let peer = rustix::net::sockopt::socket_peercred(stream)?;
    let own = rustix::process::geteuid();
    Ok(peer.uid.is_root() || peer.uid == own)
}

fn answer(line: &[u8], inputs: &Sender<Input>, at_hand: &AtHand) -> VmAnswer {
    let request: VmRequest = match serde_json::from_slice(line) {
        Ok(request) => request,
        Err(problem) => {
            return error(
                ErrorCode::InvalidRequest,
                &format!(
                    "this VM process, of Godwit {VERSION}, cannot read the request ({problem}): if its agent is newer, renew it with 'godwit vm renew'"
                ),
            );
        }
    };
    let (reply, replied) = sync_channel(1);
    let input = match Ask::of(request) {
        Ok(Ask::Connection(asked)) => return by_itself(asked, at_hand),
        Ok(Ask::Now(ask)) => Input::Now(Request { ask, reply }),
        Ok(Ask::Later(ask)) => Input::Later(Request { ask, reply }),
        Err(error) => return VmAnswer::Error(error),
    };
    if inputs.send(input).is_err() {
        return error(
            ErrorCode::Internal,
            "the VM process is ending; ask again in a second",
        );
    }
    replied.recv_timeout(ANSWER_WAIT).unwrap_or_else(|_| {
        error(
            ErrorCode::Internal,
            "the VM process has not answered in two minutes; the request may still be carried out",
        )
    })
}

fn by_itself(asked: Connection, at_hand: &AtHand) -> VmAnswer {
    let desk = &at_hand.desk;
    let answer = match asked {
        Connection::TakeOutbox { wait } => Ok(VmAnswer::Outbox(at_hand.outbox.take(wait))),
        Connection::ReadConsole { place, wait } => {
            let piece = desk.read(place.as_ref(), wait);
            piece.map(VmAnswer::ConsolePiece)
        }
        Connection::TypeConsole(typed) => {
            let done = desk.type_in(&typed);
            done.map(|()| VmAnswer::Done("it is typed".into()))
        }
    };
    answer.unwrap_or_else(VmAnswer::Error)
}

fn error(code: ErrorCode, message: &str) -> VmAnswer {
    VmAnswer::Error(ApiError::new(code, message))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::alone::without_threads;
    use crate::testing::{LONG, Site};
    use std::io::{Error, ErrorKind};
    use std::net::Shutdown;
    use std::sync::mpsc::channel;
    use std::time::Instant;

    fn at_hand() -> AtHand {
        AtHand {
            outbox: Arc::default(),
            desk: Arc::new(Desk::of(&Site::new().config)),
        }
    }

    #[test]
    fn a_process_without_threads_to_spare_closes_connections_and_lives_on() {
        let name =
            "server::tests::a_process_without_threads_to_spare_closes_connections_and_lives_on";
        if without_threads(name) {
            return;
        }
        let (inputs, at_hand) = (channel().0, at_hand());
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        admit(std::iter::once(Ok(theirs)), &inputs, &at_hand);
        assert_eq!(ours.read(&mut [0]).unwrap(), 0, "it is closed");
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vm.sock");
        let refused = serve(&path, inputs, at_hand).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::WouldBlock, "{refused}");
        assert!(!path.exists(), "nobody would answer there");
    }

    #[test]
    fn connections_that_fail_one_after_the_other_cost_no_whole_core() {
        const FAILED: u32 = 3;
        let failed = (0..FAILED).map(|_| Err(Error::other("too many open files")));
        let began = Instant::now();
        admit(failed, &channel().0, &at_hand());
        assert!(began.elapsed() >= FAILED * FAILED_PAUSE);
    }

    /// What a peer hears that says this and no more.
    fn heard(said: Vec<u8>) -> Vec<String> {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_read_timeout(Some(LONG)).unwrap();
        let mut mouth = ours.try_clone().unwrap();
        let serving = std::thread::spawn(move || {
            let _ = converse(theirs, &channel().0, &at_hand());
        });
        let saying = std::thread::spawn(move || {
            // It may be hung up on before all is said.
            let _ = mouth.write_all(&said);
            let _ = mouth.shutdown(Shutdown::Write);
        });
        let answers = BufReader::new(ours).lines().map_while(Result::ok).collect();
        saying.join().unwrap();
        serving.join().unwrap();
        answers
    }

    #[test]
    fn a_line_that_is_too_long_is_answered_once() {
        let mut said = vec![b'x'; MESSAGE_LEN_MAX];
        said.extend(b"and more\n");
        let answers = heard(said);
        assert_eq!(answers.len(), 1, "{answers:?}");
        assert!(answers[0].contains("longer than"), "{answers:?}");
    }

    #[test]
    fn a_line_that_is_cut_off_is_not_told_to_be_too_long() {
        let answers = heard(b"{\"request\":\"sta".to_vec());
        assert_eq!(answers.len(), 1, "{answers:?}");
        assert!(answers[0].contains("cut off"), "{answers:?}");
    }
}
