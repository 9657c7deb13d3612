//! The VM process's socket: one JSON line in, one JSON line out, for the agent on the same host.
//!
//! Owns the listening socket and a thread per connection. Knows nothing of VMs: each request goes to the VM's own
//! thread and the answer comes back on a channel. Refuses: peers other than root and this process's own user, lines
//! over the limit, more connections than the limit.

use crate::ask::{Ask, Connection};
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
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, sync_channel};
use std::time::Duration;

/// Most connections at once: the agent needs two, people's tools a few.
const CONNECTIONS_MAX: usize = 32;
/// Longest time that a request may take before its caller is told that it goes on.
const ANSWER_WAIT: Duration = Duration::from_secs(120);

/// Binds the socket; only root gets at it.
pub(crate) fn bind(path: &Path) -> std::io::Result<UnixListener> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}

/// Serves for ever, in threads of its own.
pub(crate) fn serve(listener: UnixListener, inputs: Sender<Input>, outbox: Arc<Outbox>) {
    let open = Arc::new(AtomicUsize::new(0));
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            if open.fetch_add(1, Ordering::SeqCst) >= CONNECTIONS_MAX {
                open.fetch_sub(1, Ordering::SeqCst);
                continue;
            }
            let (inputs, outbox, open) = (inputs.clone(), outbox.clone(), open.clone());
            std::thread::spawn(move || {
                // A connection that breaks concerns only its peer.
                let _ = converse(stream, &inputs, &outbox);
                open.fetch_sub(1, Ordering::SeqCst);
            });
        }
    });
}

fn converse(stream: UnixStream, inputs: &Sender<Input>, outbox: &Outbox) -> std::io::Result<()> {
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
            answer(&line, inputs, outbox)
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

fn answer(line: &[u8], inputs: &Sender<Input>, outbox: &Outbox) -> VmAnswer {
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
        Ok(Ask::Connection(Connection::TakeOutbox { wait })) => {
            return VmAnswer::Outbox(outbox.take(wait));
        }
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

fn error(code: ErrorCode, message: &str) -> VmAnswer {
    VmAnswer::Error(ApiError::new(code, message))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::LONG;
    use std::net::Shutdown;
    use std::sync::mpsc::channel;

    /// What a peer hears that says this and no more.
    fn heard(said: Vec<u8>) -> Vec<String> {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_read_timeout(Some(LONG)).unwrap();
        let mut mouth = ours.try_clone().unwrap();
        let serving = std::thread::spawn(move || {
            let _ = converse(theirs, &channel().0, &Outbox::default());
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
