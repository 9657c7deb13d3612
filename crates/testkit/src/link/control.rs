//! A link in another process: one request and one answer, a line of JSON each, over a Unix socket.
//!
//! The process that runs the link owns it; here is what it listens with and what others ask with. It answers whoever may
//! open the socket, one after the other, and refuses long requests and silence.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{Counters, Direction, Link, LinkSpec};

const LINE_BYTES_MAX: u64 = 16 << 10;
const PATIENCE: Duration = Duration::from_secs(5);

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
enum Request {
    Set(LinkSpec),
    SetDirection(Direction, LinkSpec),
    Spec(Direction),
    Counters,
    Cut,
    Heal,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Answer {
    Done,
    Spec(LinkSpec),
    Counters(Box<Counters>),
    Refused(String),
}

/// Answers requests for ever.
pub fn serve(link: &Link, listener: &UnixListener) -> io::Result<()> {
    loop {
        let (stream, _) = listener.accept()?;
        // Whoever asked badly or went away has only itself to blame; the link goes on.
        let _ = answer_one(link, &stream);
    }
}

fn answer_one(link: &Link, stream: &UnixStream) -> io::Result<()> {
    let answer = match read_line::<Request>(stream) {
        Ok(request) => obey(link, request),
        Err(error) => Err(error),
    };
    let answer = answer.unwrap_or_else(|error| Answer::Refused(error.to_string()));
    write_line(stream, &answer)
}

fn obey(link: &Link, request: Request) -> io::Result<Answer> {
    match request {
        Request::Set(spec) => link.set(spec).map(|()| Answer::Done),
        Request::SetDirection(direction, spec) => {
            link.set_direction(direction, spec).map(|()| Answer::Done)
        }
        Request::Spec(direction) => Ok(Answer::Spec(link.spec(direction))),
        Request::Counters => link
            .counters()
            .map(|counters| Answer::Counters(Box::new(counters))),
        Request::Cut => link.cut().map(|()| Answer::Done),
        Request::Heal => link.heal().map(|()| Answer::Done),
    }
}

/// A link that another process runs.
#[derive(Clone, Debug)]
pub struct RemoteLink {
    socket: PathBuf,
}

impl RemoteLink {
    /// The link that listens on this socket.
    pub fn new(socket: impl AsRef<Path>) -> Self {
        Self {
            socket: socket.as_ref().to_owned(),
        }
    }

    /// As [`Link::set`].
    pub fn set(&self, spec: LinkSpec) -> io::Result<()> {
        self.ask(&Request::Set(spec)).map(|_| ())
    }

    /// As [`Link::set_direction`].
    pub fn set_direction(&self, direction: Direction, spec: LinkSpec) -> io::Result<()> {
        self.ask(&Request::SetDirection(direction, spec))
            .map(|_| ())
    }

    /// As [`Link::spec`].
    pub fn spec(&self, direction: Direction) -> io::Result<LinkSpec> {
        match self.ask(&Request::Spec(direction))? {
            Answer::Spec(spec) => Ok(spec),
            other => Err(unexpected(&other)),
        }
    }

    /// As [`Link::counters`].
    pub fn counters(&self) -> io::Result<Counters> {
        match self.ask(&Request::Counters)? {
            Answer::Counters(counters) => Ok(*counters),
            other => Err(unexpected(&other)),
        }
    }

    /// As [`Link::cut`].
    pub fn cut(&self) -> io::Result<()> {
        self.ask(&Request::Cut).map(|_| ())
    }

    /// As [`Link::heal`].
    pub fn heal(&self) -> io::Result<()> {
        self.ask(&Request::Heal).map(|_| ())
    }

    fn ask(&self, request: &Request) -> io::Result<Answer> {
        let connect = || -> io::Result<Answer> {
            let stream = UnixStream::connect(&self.socket)?;
            write_line(&stream, request)?;
            read_line(&stream)
        };
        match connect() {
            Ok(Answer::Refused(why)) => Err(io::Error::other(why)),
            Ok(answer) => Ok(answer),
            Err(error) => {
                let socket = self.socket.display();
                let text = format!("cannot ask the link at {socket}: {error}");
                Err(io::Error::new(error.kind(), text))
            }
        }
    }
}

fn unexpected(answer: &Answer) -> io::Error {
    io::Error::other(format!("the link answered something else: {answer:?}"))
}

fn read_line<T: for<'a> Deserialize<'a>>(stream: &UnixStream) -> io::Result<T> {
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut line = Vec::new();
    BufReader::new(stream.take(LINE_BYTES_MAX)).read_until(b'\n', &mut line)?;
    Ok(serde_json::from_slice(&line)?)
}

fn write_line(mut stream: &UnixStream, value: &impl Serialize) -> io::Result<()> {
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut line = serde_json::to_vec(value)?;
    line.push(b'\n');
    stream.write_all(&line)
}
