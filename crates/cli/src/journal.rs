//! Log lines as systemd's journal takes them: each begins with its priority, and has no time of its own.
//!
//! Owns nothing. Applies only where standard error is the journal itself, which `JOURNAL_STREAM` names by device and inode:
//! where a person has sent it elsewhere since, lines stay as they are.

use std::fmt;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

/// Whether standard error is the journal.
pub fn is_stderr() -> bool {
    let named = std::env::var("JOURNAL_STREAM").unwrap_or_default();
    rustix::fs::fstat(std::io::stderr())
        .is_ok_and(|stat| is_stream(&named, stat.st_dev, stat.st_ino))
}

fn is_stream(named: &str, device: u64, inode: u64) -> bool {
    named
        .split_once(':')
        .is_some_and(|(dev, ino)| dev.parse() == Ok(device) && ino.parse() == Ok(inode))
}

/// One line per event, with syslog's number of its level before it.
pub struct Lines;

impl<S, N> FormatEvent<S, N> for Lines
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let mut text = String::new();
        context.format_fields(Writer::new(&mut text), event)?;
        let priority = priority(*event.metadata().level());
        // Each line of a text is an entry of its own, and would lose its priority.
        for line in text.lines() {
            writeln!(writer, "<{priority}>{line}")?;
        }
        Ok(())
    }
}

fn priority(level: Level) -> u8 {
    match level {
        Level::ERROR => 3,
        Level::WARN => 4,
        Level::INFO => 6,
        Level::DEBUG | Level::TRACE => 7,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::sync::{Arc, Mutex};
    use tracing_subscriber::layer::SubscriberExt as _;

    #[derive(Clone, Default)]
    struct Kept(Arc<Mutex<Vec<u8>>>);

    impl Write for Kept {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_warning_is_one_for_the_journal_and_has_no_second_time() {
        let kept = Kept::default();
        let writer = kept.clone();
        let layer = tracing_subscriber::fmt::layer()
            .with_ansi(false)
            .event_format(Lines)
            .with_writer(move || writer.clone());
        tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), || {
            tracing::warn!(vm = "web", "two\nlines");
            tracing::error!("worse");
            tracing::info!("as usual");
        });
        let text = String::from_utf8(kept.0.lock().unwrap().clone()).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 4, "{text}");
        assert_eq!(lines[0], "<4>two");
        assert!(lines[1].starts_with("<4>lines") && lines[1].contains("web"));
        assert_eq!(lines[2..], ["<3>worse", "<6>as usual"]);
    }

    #[test]
    fn only_the_journal_s_own_stream_is_the_journal() {
        assert!(is_stream("8:123", 8, 123));
        for other in ["", "8", "8:124", "9:123", "x:y", "8:123:1"] {
            assert!(!is_stream(other, 8, 123), "{other}");
        }
    }
}
