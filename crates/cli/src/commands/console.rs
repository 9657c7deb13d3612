//! `godwit vm console`: printed, or with a person at it.
//!
//! Owns the terminal while somebody sits at a console. What a guest wrote steers the terminal then, as it does on any console;
//! printed, nothing of it does. Refuses: to sit down where standard input or output is no terminal.

use crate::args::Global;
use crate::commands::vm::must_be;
use crate::connect::{Reader, reader};
use crate::console_stream::{Followed, News};
use crate::exit::{CommandResult, Failure};
use crate::figures::moment;
use crate::output::Output;
use crate::plain;
use crate::raw_terminal::{RawTerminal, lines};
use crate::watch::failure;
use godwit_rpc::ClientError;
use godwit_types::console::{CONSOLE_TYPED_MAX, ConsolePiece, ConsolePlace};
use godwit_types::control_api::ConsoleText;
use godwit_types::{ApiError, ErrorCode, HostName, VmName};
use std::io::{IsTerminal as _, Read as _};
use std::sync::Arc;
use std::time::Duration;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc::{Receiver, Sender, channel};

/// Whoever types Ctrl-] gets up from the console.
const LEAVE: u8 = 0x1d;
/// Most pieces of text, or of keys, that wait.
const WAITING_MAX: usize = 64;

/// How long what was typed last may take to reach the guest once its console is left.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// How often what a guest could not be reached for is typed again, and the pause before that.
const TRIES_MAX: u32 = 20;
const TRY_PAUSE: Duration = Duration::from_millis(300);

/// Prints a console, or has a person sit down at it.
pub async fn console(
    vm: VmName,
    host: Option<HostName>,
    print: bool,
    global: &Global,
    output: &Output,
) -> CommandResult {
    let reader = reader(global).await?;
    if let Reader::Agent(client) = &reader {
        must_be(client, host.as_ref()).await?;
    }
    let is_terminal = std::io::stdin().is_terminal() && std::io::stdout().is_terminal();
    let text = printed(&reader, &vm, host.as_ref()).await;
    if print || output.json || !is_terminal {
        output.show(&text.map_err(failure)?, |output, console| {
            // Beside the text: who reads that by a program gets what the guest wrote and nothing else.
            beginning(console).iter().for_each(|line| plain::tell(line));
            output.verbatim(&console.text)
        });
        return Ok(());
    }
    let text = text.map_err(failure)?;
    sit_down(Followed { reader, vm, host }, &text).await
}

async fn printed(
    reader: &Reader,
    vm: &VmName,
    host: Option<&HostName>,
) -> Result<ConsoleText, ClientError> {
    match (reader, host) {
        (Reader::Controller(client), Some(host)) => client.console_at(vm, host).await,
        (Reader::Controller(client), None) => client.console(vm).await,
        (Reader::Agent(client), _) => client.console(vm).await,
    }
}

/// Where a console is read and where its text begins, as far as that is known.
fn beginning(console: &ConsoleText) -> Option<String> {
    let host = console.host.as_ref()?;
    let since = console.since_unix_s.map(moment);
    let carried = match console.came_along {
        true => "with what it wrote there",
        false => "what it wrote there is not carried along",
    };
    Some(match (since, &console.came_from) {
        (None, _) => format!("console on host {host}"),
        (Some(since), None) => {
            format!("console on host {host} since {since}")
        }
        (Some(since), Some(from)) if console.came_along => {
            format!(
                "console on host {host} since {since} (the VM came from host {from}, {carried})"
            )
        }
        (Some(since), Some(from)) => {
            format!(
                "console on host {host} since {since} (the VM came from host {from}; {carried})"
            )
        }
    })
}

/// Those who come to a person at the console: the guest, the keys, and whoever ends this process.
struct Comers {
    news: Receiver<News>,
    keys: Receiver<Vec<u8>>,
    typed: Receiver<ApiError>,
    ended: [Signal; 3],
}

async fn sit_down(followed: Followed, text: &ConsoleText) -> CommandResult {
    let events = followed.open(None).await.map_err(too_old)?;
    let ended = [
        SignalKind::terminate(),
        SignalKind::hangup(),
        SignalKind::interrupt(),
    ];
    let [terminate, hangup, interrupt] = ended.map(signal);
    let ended = [
        terminate.map_err(no_terminal)?,
        hangup.map_err(no_terminal)?,
        interrupt.map_err(no_terminal)?,
    ];
    beginning(text).iter().for_each(|line| plain::tell(line));
    plain::tell("Ctrl-] leaves the console.");
    let terminal = RawTerminal::enter().map_err(no_terminal)?;
    let followed = Arc::new(followed);
    let (tell, news) = channel(WAITING_MAX);
    let (press, keys) = channel(WAITING_MAX);
    let (send, sent) = channel(WAITING_MAX);
    let (complain, typed) = channel(WAITING_MAX);
    let follower = Arc::clone(&followed);
    tokio::spawn(async move { follower.run(events, tell).await });
    let handing_on = tokio::spawn(hand_on(followed, sent, complain));
    // It ends with the process: nothing takes a read away from a terminal.
    std::thread::spawn(move || {
        let mut bytes = [0; 1024];
        while let Ok(count @ 1..) = std::io::stdin().read(&mut bytes) {
            let pressed = bytes.get(..count).unwrap_or_default().to_vec();
            if press.blocking_send(pressed).is_err() {
                return;
            }
        }
    });
    let comers = Comers {
        news,
        keys,
        typed,
        ended,
    };
    let end = attend(&terminal, comers, send).await;
    // What was typed before it was left is the guest's.
    let is_typed = tokio::time::timeout(LAST_WORDS, handing_on).await;
    drop(terminal);
    if is_typed.is_err() {
        plain::tell("what you typed last may not be with the guest");
    }
    eprintln!();
    end
}

/// Until somebody leaves or it is over.
async fn attend(
    terminal: &RawTerminal,
    mut comers: Comers,
    send: Sender<Vec<u8>>,
) -> CommandResult {
    let mut shown = Shown::default();
    let [terminate, hangup, interrupt] = &mut comers.ended;
    loop {
        tokio::select! {
            news = comers.news.recv() => match news {
                Some(News::Piece(piece)) => {
                    shown.remarks(&piece).iter().for_each(|remark| terminal.tell(remark));
                    let text = shown.of(&piece);
                    if terminal.show(text).is_err() {
                        return Ok(());
                    }
                }
                Some(News::Lost(why)) => terminal.tell(&format!("{why}; still trying")),
                Some(News::End(why)) => return Err(why.into()),
                None => return Ok(()),
            },
            keys = comers.keys.recv() => {
                let Some(keys) = keys else { return Ok(()) };
                let leaves = keys.iter().position(|key| *key == LEAVE);
                let typed = keys.get(..leaves.unwrap_or(keys.len())).unwrap_or_default();
                if send.try_send(typed.to_vec()).is_err() {
                    terminal.tell("what you typed last is left out: what you typed before is not with the guest yet");
                }
                if leaves.is_some() {
                    return Ok(());
                }
            }
            Some(error) = comers.typed.recv() => terminal.tell(&format!("what you typed last may be lost: {error}")),
            _ = terminate.recv() => return Ok(()),
            _ = hangup.recv() => return Ok(()),
            _ = interrupt.recv() => return Ok(()),
        }
    }
}

/// Hands keys on, all that came meanwhile together.
async fn hand_on(followed: Arc<Followed>, mut keys: Receiver<Vec<u8>>, complain: Sender<ApiError>) {
    while let Some(mut bytes) = keys.recv().await {
        while bytes.len() < CONSOLE_TYPED_MAX / 2 {
            match keys.try_recv() {
                Ok(more) => bytes.extend(more),
                Err(_) => break,
            }
        }
        if bytes.is_empty() {
            continue;
        }
        if let Err(error) = type_patiently(&followed, bytes).await
            && complain.send(error.into()).await.is_err()
        {
            return;
        }
    }
}

/// A guest that is just moving is not found for a moment: what was certainly not typed is typed again.
async fn type_patiently(followed: &Followed, bytes: Vec<u8>) -> Result<(), ClientError> {
    let mut left = TRIES_MAX;
    loop {
        match followed.type_in(bytes.clone()).await {
            Err(error) if left > 0 && !error.may_be_done() => {
                left -= 1;
                tokio::time::sleep(TRY_PAUSE).await;
            }
            result => return result,
        }
    }
}

/// What a person has seen of a text.
#[derive(Debug, Default)]
struct Shown {
    place: Option<ConsolePlace>,
    host: Option<HostName>,
}

impl Shown {
    /// What has to be said before this piece.
    fn remarks(&mut self, piece: &ConsolePiece) -> Vec<String> {
        let mut remarks = Vec::new();
        let Some(place) = &self.place else {
            self.host = piece.host.clone();
            return remarks;
        };
        if piece.host != self.host
            && let Some(host) = &piece.host
        {
            remarks.push(format!("the VM is on host {host} now"));
            self.host = piece.host.clone();
        }
        if piece.text != place.text {
            remarks.push("the guest was started anew, or came without what it wrote before".into());
        } else if piece.from > place.after {
            let missed = piece.from - place.after;
            remarks.push(format!(
                "{missed} bytes were written too fast and are left out"
            ));
        }
        remarks
    }

    /// What of it is shown: of what was written before somebody sat down, the last screenful.
    fn of<'a>(&mut self, piece: &'a ConsolePiece) -> &'a [u8] {
        let is_first = self.place.replace(piece.place()).is_none();
        match lines().filter(|_| is_first) {
            Some(lines) => last_lines(&piece.bytes, lines.saturating_sub(1)),
            None => &piece.bytes,
        }
    }
}

/// The last so many lines of a text.
fn last_lines(text: &[u8], lines: usize) -> &[u8] {
    let mut ends = text.iter().enumerate().rev();
    let mut ends = ends.by_ref().filter(|(_, byte)| **byte == b'\n');
    let before = ends.nth(lines).map_or(0, |(end, _)| end + 1);
    text.get(before..).unwrap_or_default()
}

/// A controller or agent of a version before knows no such route.
fn too_old(error: ClientError) -> Failure {
    if error.code() != ErrorCode::NotFound {
        return failure(error);
    }
    Failure::new(
        ErrorCode::Incompatible,
        "this controller is of an older Godwit, whose consoles only print: use --print, or update it",
    )
}

fn no_terminal(error: std::io::Error) -> Failure {
    let message = format!("this terminal cannot be a console: {error}; use --print");
    Failure::new(ErrorCode::Internal, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_console_is_told_with_its_host_and_its_beginning() {
        let mut console = ConsoleText::default();
        assert_eq!(beginning(&console), None, "an older host says nothing");
        console.host = HostName::new("b").ok();
        assert_eq!(beginning(&console).unwrap(), "console on host b");
        console.since_unix_s = Some(1_790_000_000);
        let booted = beginning(&console).unwrap();
        assert!(booted.starts_with("console on host b since 20"), "{booted}");
        console.came_from = HostName::new("a").ok();
        let came = beginning(&console).unwrap();
        let left = "(the VM came from host a; what it wrote there is not carried along)";
        assert_eq!(came, format!("{booted} {left}"));
        console.came_along = true;
        let came = beginning(&console).unwrap();
        let carried = "(the VM came from host a, with what it wrote there)";
        assert_eq!(came, format!("{booted} {carried}"));
    }

    #[test]
    fn the_last_screenful_begins_at_a_line() {
        assert_eq!(last_lines(b"a\nb\nc", 1), b"b\nc");
        assert_eq!(last_lines(b"a\nb\nc\n", 1), b"c\n");
        assert_eq!(last_lines(b"a\nb\nc\n", 0), b"");
        assert_eq!(last_lines(b"a\nb", 24), b"a\nb");
    }

    fn piece(text: &str, from: u64, bytes: &[u8], host: &str) -> ConsolePiece {
        ConsolePiece {
            text: text.into(),
            from,
            bytes: bytes.to_vec(),
            came_along: false,
            host: HostName::new(host).ok(),
        }
    }

    #[test]
    fn a_move_a_new_text_and_what_is_left_out_are_told_in_one_line_each() {
        let mut shown = Shown::default();
        let mut told = |piece: &ConsolePiece| {
            let remarks = shown.remarks(piece);
            assert_eq!(shown.of(piece), piece.bytes);
            remarks
        };
        assert!(told(&piece("a1", 7, b"login:", "a")).is_empty());
        assert!(told(&piece("a1", 13, b"root", "a")).is_empty());
        let moved = told(&piece("a1", 17, b"", "b"));
        assert_eq!(moved, ["the VM is on host b now"]);
        let missed = told(&piece("a1", 27, b"x", "b"));
        assert_eq!(missed, ["10 bytes were written too fast and are left out"]);
        let anew = told(&piece("b2", 0, b"boot", "b"));
        assert_eq!(
            anew,
            ["the guest was started anew, or came without what it wrote before"]
        );
    }
}
