//! Saving against a scripted QEMU over real sockets.

use super::*;
use crate::qmp::Client;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};
use std::io::{IoSliceMut, Read as _, Write as _};
use std::mem::MaybeUninit;
use std::os::unix::net::UnixStream;
use std::thread::JoinHandle;

const GREETING: &str = r#"{"QMP": {"version": {"qemu": {"micro": 1, "minor": 2, "major": 7}, "package": ""}, "capabilities": ["oob"]}}"#;
/// More than any socket holds.
const STATE_BYTES: usize = 4 << 20;
const LONG: Duration = Duration::from_secs(20);

/// QEMU's side of a control socket.
struct Peer {
    socket: UnixStream,
    unread: Vec<u8>,
    /// The descriptor that came last.
    fd: Option<OwnedFd>,
}

impl Peer {
    /// Reads one command and its id.
    fn asked(&mut self) -> (String, u64) {
        loop {
            if let Some(end) = self.unread.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.unread.drain(..=end).collect();
                let asked: Value = serde_json::from_slice(&line).unwrap();
                let command = asked["execute"].as_str().unwrap().to_owned();
                return (command, asked["id"].as_u64().unwrap());
            }
            self.receive();
        }
    }

    fn receive(&mut self) {
        let mut bytes = [0; 4096];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let parts = &mut [IoSliceMut::new(&mut bytes)];
        let received = net::recvmsg(&self.socket, parts, &mut control, RecvFlags::CMSG_CLOEXEC);
        let count = received.unwrap().bytes;
        assert!(count > 0, "hung up in the middle");
        self.unread.extend_from_slice(&bytes[..count]);
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(mut fds) = message {
                self.fd = fds.next();
            }
        }
    }

    /// Waits for the next bytes; whether none will come any more.
    fn has_hung_up(&mut self) -> bool {
        self.unread.is_empty()
            && matches!(
                net::recv(&self.socket, &mut [0; 1], RecvFlags::PEEK),
                Ok((0, _)) | Ok((_, 0))
            )
    }

    fn answer(&mut self, id: u64, value: &Value) {
        writeln!(self.socket, "{}", json!({"return": value, "id": id})).unwrap();
    }

    fn refuse(&mut self, id: u64) {
        let error = json!({"class": "GenericError", "desc": "there is a blocker"});
        writeln!(self.socket, "{}", json!({"error": error, "id": id})).unwrap();
    }

    /// Answers what comes before a save.
    fn until_migrate(&mut self) -> u64 {
        loop {
            match self.asked() {
                (command, id) if command == "migrate" => return id,
                (command, id) if command == "query-status" => {
                    let paused = json!({"status": "paused", "running": false, "singlestep": false});
                    self.answer(id, &paused);
                }
                (_, id) => self.answer(id, &json!({})),
            }
        }
    }
}

fn machine(script: impl FnOnce(Peer) + Send + 'static) -> (Machine, JoinHandle<()>) {
    let (ours, mut socket) = UnixStream::pair().unwrap();
    let peer = std::thread::spawn(move || {
        writeln!(socket, "{GREETING}").unwrap();
        let (unread, fd) = (Vec::new(), None);
        script(Peer { socket, unread, fd });
    });
    // Negotiating asks a question that the script answers like any other.
    let client = Client::negotiate(ours, Instant::now() + LONG).unwrap();
    (Machine::new(client, None), peer)
}

#[test]
fn a_hypervisor_that_answers_only_when_its_state_is_read_saves_at_once() {
    let (machine, peer) = machine(|mut peer| {
        let id = peer.until_migrate();
        let mut stream = std::fs::File::from(peer.fd.take().unwrap());
        // With the main lock held: no answer before all of it is read.
        stream.write_all(&vec![7; STATE_BYTES]).unwrap();
        drop(stream);
        peer.answer(id, &json!({}));
        let (command, id) = peer.asked();
        assert_eq!(command, "query-migrate");
        peer.answer(id, &json!({"status": "completed"}));
    });
    let (mut read, mut whole) = (0, Vec::new());
    let saved = machine.save_device_state(Instant::now() + LONG, |news| {
        match news {
            SaveNews::Piece(piece) => read += piece.len(),
            SaveNews::Silence => {}
            SaveNews::Whole => whole.push(read),
        }
        Ok(())
    });
    assert_eq!(saved.unwrap(), STATE_BYTES as u64);
    assert_eq!(whole, [STATE_BYTES], "said once, behind the last piece");
    peer.join().unwrap();
}

#[test]
fn a_refusal_ends_a_save_for_which_nothing_flows() {
    let (machine, peer) = machine(|mut peer| {
        let id = peer.until_migrate();
        peer.refuse(id);
        // The descriptor stays open, as QEMU's would, until the other side hangs up.
        assert_eq!(peer.socket.read(&mut [0]).unwrap(), 0);
    });
    let saved = machine.save_device_state(Instant::now() + LONG, |_| Ok(()));
    let error = saved.unwrap_err();
    assert!(
        matches!(&error, DeviceStateError::Qmp(QmpError::Refused { .. })),
        "{error:?}"
    );
    drop(machine);
    peer.join().unwrap();
}

/// A save whose taker gives up before 'migrate' is answered, and whether its end may be asked after.
fn given_up(
    script: impl FnOnce(&mut Peer, u64) + Send + 'static,
    is_asked_after: bool,
) -> DeviceStateError {
    let (machine, peer) = machine(move |mut peer| {
        let id = peer.until_migrate();
        let (command, cancel) = peer.asked();
        assert_eq!(command, "migrate_cancel");
        script(&mut peer, id);
        peer.answer(cancel, &json!({}));
        let settles = [
            ("query-migrate", json!({"status": "cancelled"})),
            (
                "query-status",
                json!({"status": "paused", "running": false, "singlestep": false}),
            ),
        ];
        while !peer.has_hung_up() {
            assert!(is_asked_after, "a save that never began is waited for");
            let (command, id) = peer.asked();
            let answer = settles.iter().find(|(name, _)| *name == command);
            peer.answer(id, &answer.expect("a command of the end").1);
        }
    });
    let refuse = |_: SaveNews| Err(io::Error::other("enough"));
    let error = machine.save_device_state(Instant::now() + LONG, refuse);
    drop(machine);
    peer.join().unwrap();
    error.unwrap_err()
}

#[test]
fn a_save_that_is_given_up_before_it_is_answered_is_cancelled_and_settled() {
    let error = given_up(|peer, id| peer.answer(id, &json!({})), true);
    assert!(matches!(&error, DeviceStateError::Sink(_)), "{error:?}");
}

#[test]
fn a_save_that_is_given_up_and_then_refused_is_not_waited_for() {
    let error = given_up(|peer, id| peer.refuse(id), false);
    let refused = matches!(&error, DeviceStateError::Qmp(QmpError::Refused { .. }));
    assert!(refused, "{error:?}");
}
