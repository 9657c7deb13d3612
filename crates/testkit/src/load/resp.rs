//! The Redis protocol as far as a load client needs it, over any byte stream.
//!
//! The peer is a guest that may have been damaged by what is tested: every length is checked before anything is
//! allocated, and memory grows only with bytes that have arrived. Arrays and the newer reply types are refused.

use std::io::{self, BufRead, BufReader, Read, Write};

/// Longest line (status, error, number, length) that is accepted.
pub const MAX_LINE_BYTES: usize = 4096;
pub const MAX_VALUE_BYTES: usize = 64 << 20;

/// One reply. A value lies in the reader's buffer until the next reply is read.
#[derive(Debug, PartialEq, Eq)]
pub enum Reply<'a> {
    /// `+OK` and its like.
    Status(&'a [u8]),
    /// `:1`
    Integer(i64),
    Value(&'a [u8]),
    Nothing,
}

/// Why a reply could not be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RespError {
    /// The connection failed or ended.
    #[error("the connection failed: {0}")]
    Io(#[from] io::Error),
    /// The server answered with an error.
    #[error("the server refused: {0}")]
    Refused(String),
    /// What arrived is not a reply that this client can be given.
    #[error("not a reply: {0}")]
    Malformed(&'static str),
}

/// Reads replies one after the other.
pub struct ReplyReader<R> {
    stream: BufReader<R>,
    buffer: Vec<u8>,
}

impl<R: Read> ReplyReader<R> {
    pub fn new(stream: R) -> Self {
        Self {
            stream: BufReader::with_capacity(256 << 10, stream),
            buffer: Vec::new(),
        }
    }

    /// Reads the next reply. After an error other than `Refused` the stream is out of step: drop the connection.
    pub fn read(&mut self) -> Result<Reply<'_>, RespError> {
        self.read_line()?;
        let (kind, rest) = self
            .buffer
            .split_first()
            .ok_or(RespError::Malformed("an empty line"))?;
        match kind {
            b'+' => Ok(Reply::Status(&self.buffer[1..])),
            b'-' => Err(RespError::Refused(
                String::from_utf8_lossy(rest).into_owned(),
            )),
            b':' => Ok(Reply::Integer(number(rest)?)),
            b'$' => match number(rest)? {
                -1 => Ok(Reply::Nothing),
                length => self.read_value(length),
            },
            _ => Err(RespError::Malformed("an unknown kind of reply")),
        }
    }

    /// The next line without its end, in the buffer.
    fn read_line(&mut self) -> Result<(), RespError> {
        self.buffer.clear();
        let limit = MAX_LINE_BYTES as u64 + 2;
        let length = (&mut self.stream)
            .take(limit)
            .read_until(b'\n', &mut self.buffer)?;
        if length == 0 {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
        }
        if !self.buffer.ends_with(b"\r\n") {
            return Err(RespError::Malformed(
                "a line without its end, or one too long",
            ));
        }
        self.buffer.truncate(length - 2);
        Ok(())
    }

    fn read_value(&mut self, length: i64) -> Result<Reply<'_>, RespError> {
        let length =
            usize::try_from(length).map_err(|_| RespError::Malformed("a negative length"))?;
        if length > MAX_VALUE_BYTES {
            return Err(RespError::Malformed("a value longer than 64 MiB"));
        }
        self.buffer.clear();
        let read = (&mut self.stream)
            .take(length as u64 + 2)
            .read_to_end(&mut self.buffer)?;
        if read < length + 2 {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
        }
        match self.buffer.ends_with(b"\r\n") {
            true => Ok(Reply::Value(&self.buffer[..length])),
            false => Err(RespError::Malformed("a value without its end")),
        }
    }
}

fn number(text: &[u8]) -> Result<i64, RespError> {
    let text = std::str::from_utf8(text)
        .ok()
        .and_then(|text| text.parse().ok());
    text.ok_or(RespError::Malformed("a number that is none"))
}

pub fn write_command(stream: &mut impl Write, words: &[&[u8]]) -> io::Result<()> {
    write!(stream, "*{}\r\n", words.len())?;
    for word in words {
        write!(stream, "${}\r\n", word.len())?;
        stream.write_all(word)?;
        stream.write_all(b"\r\n")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn malformed(bytes: &[u8]) -> bool {
        matches!(ReplyReader::new(bytes).read(), Err(RespError::Malformed(_)))
    }

    fn cut_short(bytes: &[u8]) -> bool {
        matches!(ReplyReader::new(bytes).read(), Err(RespError::Io(_)))
    }

    #[test]
    fn replies_are_read_one_after_the_other() {
        let mut reader =
            ReplyReader::new(&b"+OK\r\n:-7\r\n$3\r\na\r\n\r\n$-1\r\n-ERR no\r\n$0\r\n\r\n"[..]);
        assert_eq!(reader.read().unwrap(), Reply::Status(b"OK"));
        assert_eq!(reader.read().unwrap(), Reply::Integer(-7));
        assert_eq!(reader.read().unwrap(), Reply::Value(b"a\r\n"));
        assert_eq!(reader.read().unwrap(), Reply::Nothing);
        assert!(matches!(reader.read(), Err(RespError::Refused(text)) if text == "ERR no"));
        assert_eq!(reader.read().unwrap(), Reply::Value(b""));
        assert!(matches!(reader.read(), Err(RespError::Io(_))));
    }

    #[test]
    fn hostile_input_is_refused_without_allocating_for_it() {
        let endless = [b'+'; MAX_LINE_BYTES * 3];
        assert!(malformed(&endless));
        for bytes in [
            &b"$99999999999999999999\r\n"[..],
            b"$9223372036854775807\r\n",
            b"$67108865\r\n",
            b"$-2\r\n",
            b"$\r\n",
            b"$3\r\nabcde",
            b":1x\r\n",
            b"*1\r\n",
            b"\r\n",
            b"\n",
            b"+OK\n",
            b"\xff\xfe\r\n",
        ] {
            assert!(malformed(bytes), "{bytes:?}");
        }
        for bytes in [&b""[..], b"$67108864\r\nab", b"$3\r\nabc\r"] {
            assert!(cut_short(bytes), "{bytes:?}");
        }
    }

    #[test]
    fn every_cut_of_a_reply_is_an_error() {
        let whole = b"$5\r\nhello\r\n";
        for length in 0..whole.len() {
            assert!(
                ReplyReader::new(&whole[..length]).read().is_err(),
                "{length}"
            );
        }
    }

    #[test]
    fn commands_are_written_with_their_lengths() {
        let mut bytes = Vec::new();
        write_command(&mut bytes, &[b"SET", b"k", b"\r\n"]).unwrap();
        assert_eq!(bytes, b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$2\r\n\r\n\r\n");
    }
}
