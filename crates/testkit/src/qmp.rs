//! A QEMU's control connection for tests and the bench: commands, and the events with the moments at which they happened.
//!
//! Events carry the time at which QEMU raised them, by the machine's clock; that is what switchovers are measured with,
//! for every system alike. Owns the connection. Every wait has a deadline and ends early on Ctrl-C.

use crate::stage::go_on;
use anyhow::{Context as _, Result, bail};
use serde_json::{Value, json};
use std::io::{BufRead as _, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

pub struct Qmp {
    stream: Box<dyn Write + Send>,
    lines: Receiver<Value>,
    events: Vec<Value>,
}

impl Qmp {
    /// Waits until the socket is there and answers.
    pub fn connect(path: &Path, deadline: Instant) -> Result<Self> {
        let stream = loop {
            match UnixStream::connect(path) {
                Ok(stream) => break stream,
                Err(error) if Instant::now() > deadline => {
                    return Err(error).with_context(|| format!("no QEMU at {}", path.display()));
                }
                Err(_) => std::thread::sleep(Duration::from_millis(2)),
            }
            go_on()?;
        };
        Self::over(stream.try_clone()?, stream, deadline)
    }

    /// Over two ways that lead to a QEMU, such as its standard output and input.
    pub fn over(
        from: impl Read + Send + 'static,
        to: impl Write + Send + 'static,
        deadline: Instant,
    ) -> Result<Self> {
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(from).lines().map_while(Result::ok) {
                let Ok(value) = serde_json::from_str(&line) else {
                    continue;
                };
                if sender.send(value).is_err() {
                    return;
                }
            }
        });
        let mut qmp = Self {
            stream: Box::new(to),
            lines,
            events: Vec::new(),
        };
        qmp.execute("qmp_capabilities", json!({}), deadline)?;
        Ok(qmp)
    }

    /// Runs a command and gives what it returns.
    pub fn execute(&mut self, command: &str, arguments: Value, deadline: Instant) -> Result<Value> {
        let request = json!({"execute": command, "arguments": arguments});
        let sent = writeln!(self.stream, "{request}").and_then(|()| self.stream.flush());
        sent.with_context(|| format!("QEMU ended before {command}"))?;
        loop {
            let reply = self
                .next(deadline)
                .with_context(|| format!("waiting for {command}"))?;
            if reply.get("event").is_some() {
                self.events.push(reply);
            } else if let Some(error) = reply.get("error") {
                bail!("{command}: {}", error["desc"].as_str().unwrap_or("refused"));
            } else if let Some(value) = reply.get("return") {
                return Ok(value.clone());
            }
        }
    }

    /// Runs a command of the human monitor.
    pub fn human(&mut self, line: &str, deadline: Instant) -> Result<String> {
        let answer = self.execute(
            "human-monitor-command",
            json!({"command-line": line}),
            deadline,
        )?;
        Ok(answer.as_str().unwrap_or_default().to_owned())
    }

    /// The moment of an event, seconds since 1970, once it has come; none when it has not come before the deadline.
    pub fn moment_of(&mut self, event: &str, deadline: Instant) -> Result<Option<f64>> {
        loop {
            if let Some(found) = self.events.iter().find(|one| one["event"] == event) {
                return Ok(Some(moment(found)));
            }
            match self.try_next(deadline)? {
                Some(line) if line.get("event").is_some() => self.events.push(line),
                Some(_) => {}
                None => return Ok(None),
            }
        }
    }

    /// Waits for an event, also one that came earlier and was not asked for yet.
    pub fn wait_event(&mut self, name: &str, deadline: Instant) -> Result<Value> {
        self.moment_of(name, deadline)?
            .with_context(|| format!("no {name} came in time"))?;
        let at = self.events.iter().position(|event| event["event"] == name);
        Ok(at.map_or(Value::Null, |at| self.events.remove(at)))
    }

    /// Forgets the events that have come.
    pub fn forget_events(&mut self) {
        self.events.clear();
    }

    fn next(&mut self, deadline: Instant) -> Result<Value> {
        self.try_next(deadline)?
            .context("QEMU did not answer in time")
    }

    fn try_next(&mut self, deadline: Instant) -> Result<Option<Value>> {
        loop {
            go_on()?;
            let left = deadline.saturating_duration_since(Instant::now());
            let step = left.min(Duration::from_millis(100));
            match self.lines.recv_timeout(step.max(Duration::from_millis(1))) {
                Ok(line) => return Ok(Some(line)),
                Err(RecvTimeoutError::Timeout) if left.is_zero() => return Ok(None),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => bail!("QEMU has ended"),
            }
        }
    }
}

fn moment(event: &Value) -> f64 {
    let part = |name: &str| event["timestamp"][name].as_f64().unwrap_or(0.0);
    part("seconds") + part("microseconds") / 1e6
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_events_moment_is_read_to_the_microsecond() {
        let event = json!({"event": "STOP", "timestamp": {"seconds": 5, "microseconds": 250_000}});
        assert_eq!(moment(&event), 5.25);
    }
}
