//! One connection of the load: sends one operation at a time, checks every answer.
//!
//! Each connection owns a share of the keys, so it knows for each of them which version an answer must
//! have. Only a write that was under way when a connection broke leaves two possibilities, until the next read.

use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use super::resp::{Reply, ReplyReader, RespError, write_command};
use super::values::{self, Found};

/// After this long without an answer a connection counts as lost.
const ANSWER_LIMIT: Duration = Duration::from_secs(30);
const CONNECT_LIMIT: Duration = Duration::from_secs(5);

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub lost: u64,
    pub verified: u64,
    pub damaged: u64,
    /// Acknowledged writes not found by a later read.
    pub lost_writes: u64,
    pub errors: u64,
}

impl Counts {
    pub fn add(&mut self, other: &Counts) {
        self.lost += other.lost;
        self.verified += other.verified;
        self.damaged += other.damaged;
        self.lost_writes += other.lost_writes;
        self.errors += other.errors;
    }
}

/// Versions of a key that an answer may have.
#[derive(Clone, Copy)]
struct Expected {
    acknowledged: u64,
    /// A write under way when the connection broke.
    possible: Option<u64>,
}

/// A connection and the keys it owns: `share`, `share + of`, `share + 2 of`, ...
pub struct Client {
    address: SocketAddr,
    connection: Option<(TcpStream, ReplyReader<TcpStream>)>,
    keys: Vec<u64>,
    expected: Vec<Expected>,
    value: Vec<u8>,
    counts: Counts,
}

/// Connects with the time limits that a load client needs.
pub fn connect(address: SocketAddr) -> std::io::Result<TcpStream> {
    let stream = TcpStream::connect_timeout(&address, CONNECT_LIMIT)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(ANSWER_LIMIT))?;
    stream.set_write_timeout(Some(ANSWER_LIMIT))?;
    Ok(stream)
}

/// The name of a key in Redis.
pub fn key_name(key: u64) -> String {
    format!("godwit:{key}")
}

impl Client {
    /// Connects. Every key must hold version 0.
    pub fn new(address: SocketAddr, keys: Vec<u64>, value_bytes: usize) -> std::io::Result<Self> {
        let expected = vec![
            Expected {
                acknowledged: 0,
                possible: None
            };
            keys.len()
        ];
        let (value, counts) = (vec![0; value_bytes], Counts::default());
        let mut client = Self {
            address,
            connection: None,
            keys,
            expected,
            value,
            counts,
        };
        client.reconnect()?;
        Ok(client)
    }

    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Number of keys that this connection owns.
    pub fn key_count(&self) -> usize {
        self.keys.len()
    }

    /// Reads (and checks) or writes the key at `index` of its own; false if the connection broke or is not there.
    pub fn operate(&mut self, index: usize, write: bool) -> bool {
        let (Some(&key), Some(&expected)) = (self.keys.get(index), self.expected.get(index)) else {
            return false;
        };
        if self.connection.is_none() && self.reconnect().is_err() {
            return false;
        }
        match if write {
            self.set(key, index, expected)
        } else {
            self.get(key, index, expected)
        } {
            Ok(()) => true,
            Err(RespError::Refused(_)) => {
                self.counts.errors += 1;
                true
            }
            Err(_) => {
                self.connection = None;
                self.counts.lost += 1;
                false
            }
        }
    }

    fn reconnect(&mut self) -> std::io::Result<()> {
        let stream = connect(self.address)?;
        self.connection = Some((stream.try_clone()?, ReplyReader::new(stream)));
        Ok(())
    }

    fn set(&mut self, key: u64, index: usize, expected: Expected) -> Result<(), RespError> {
        let version = expected.possible.unwrap_or(expected.acknowledged) + 1;
        values::make(&mut self.value, key, version);
        self.expected[index].possible = Some(version);
        let Some((stream, replies)) = &mut self.connection else {
            return Ok(());
        };
        send(stream, &[b"SET", key_name(key).as_bytes(), &self.value])?;
        match replies.read()? {
            Reply::Status(b"OK") => {
                self.expected[index] = Expected {
                    acknowledged: version,
                    possible: None,
                }
            }
            _ => self.counts.errors += 1,
        }
        Ok(())
    }

    fn get(&mut self, key: u64, index: usize, expected: Expected) -> Result<(), RespError> {
        let Some((stream, replies)) = &mut self.connection else {
            return Ok(());
        };
        send(stream, &[b"GET", key_name(key).as_bytes()])?;
        match replies.read()? {
            Reply::Value(answer) => match values::examine(answer, key, self.value.len()) {
                Found::Version(found)
                    if found == expected.acknowledged || Some(found) == expected.possible =>
                {
                    self.expected[index] = Expected {
                        acknowledged: found,
                        possible: None,
                    };
                    self.counts.verified += 1;
                }
                Found::Version(found) => {
                    self.counts.lost_writes += 1; // once: from here on that version is what is expected
                    self.expected[index] = Expected {
                        acknowledged: found,
                        possible: None,
                    };
                }
                Found::Damaged => self.counts.damaged += 1,
            },
            Reply::Nothing => self.counts.lost_writes += 1,
            _ => self.counts.errors += 1,
        }
        Ok(())
    }
}

/// A command in one write, so that it leaves in as few segments as it can.
fn send(stream: &mut TcpStream, words: &[&[u8]]) -> std::io::Result<()> {
    let mut bytes = Vec::with_capacity(words.iter().map(|word| word.len() + 16).sum());
    write_command(&mut bytes, words)?;
    stream.write_all(&bytes)
}

/// Empties the server and writes version 0 of keys `0..keys`, pipelined: one thread sends, this one counts answers.
pub fn fill(address: SocketAddr, keys: u64, value_bytes: usize) -> Result<Duration, RespError> {
    let started = Instant::now();
    let stream = connect(address)?;
    let mut sender = std::io::BufWriter::with_capacity(1 << 20, stream.try_clone()?);
    let mut replies = ReplyReader::new(stream);
    std::thread::scope(|scope| {
        let sending = scope.spawn(move || {
            let mut value = vec![0; value_bytes];
            write_command(&mut sender, &[b"FLUSHALL"])?;
            for key in 0..keys {
                values::make(&mut value, key, 0);
                write_command(&mut sender, &[b"SET", key_name(key).as_bytes(), &value])?;
            }
            sender.flush()
        });
        for _ in 0..=keys {
            if replies.read()? != Reply::Status(b"OK") {
                return Err(RespError::Malformed(
                    "FLUSHALL or SET was not answered with OK",
                ));
            }
        }
        sending
            .join()
            .map_err(|_| RespError::Malformed("the sending thread died"))??;
        Ok(started.elapsed())
    })
}
