//! `godwit audit`: who asked the controller for what.
//!
//! Owns nothing. Refuses: names that nothing could have.

use crate::args::{AuditArgs, Global};
use crate::connect::controller;
use crate::exit::CommandResult;
use crate::output::Output;
use crate::watch::failure;
use godwit_types::audit::{AuditEntry, AuditQuery};
use jiff::Timestamp;
use jiff::tz::TimeZone;

/// Shows the newest entries, the last one at the end as in any log.
pub async fn run(arguments: AuditArgs, global: &Global, output: &Output) -> CommandResult {
    let query = AuditQuery {
        last: Some(arguments.last),
        about: arguments.about,
    };
    // The same rules as at the other end, so that a bad name is refused here.
    let query = AuditQuery::parse(&query.to_text())?;
    let mut entries = controller(global)?.audit(&query).await.map_err(failure)?;
    entries.reverse();
    output.show(&entries, |output, entries| show(entries, output));
    Ok(())
}

fn show(entries: &[AuditEntry], output: &Output) {
    if entries.is_empty() {
        return output.line("The audit log is empty.");
    }
    let zone = TimeZone::system();
    let rows = entries.iter().map(|entry| {
        let subject = entry.subject.as_deref().unwrap_or_default();
        let command = format!("{} {subject}", entry.what);
        vec![
            time(entry.unix_s, &zone),
            entry.who.clone(),
            command.trim_end().to_owned(),
            result(entry),
        ]
    });
    output.table(&["time", "who", "asked for", "result"], rows.collect());
}

fn result(entry: &AuditEntry) -> String {
    let times = match (entry.times, entry.last_unix_s) {
        (0 | 1, _) => String::new(),
        (times, None) => format!(" {times} times"),
        (times, Some(last)) => {
            format!(" {times} times until {}", time(last, &TimeZone::system()))
        }
    };
    match &entry.message {
        Some(message) => format!("{}{times}: {message}", entry.result),
        None => format!("{}{times}", entry.result),
    }
}

/// In this machine's time zone.
fn time(unix_s: i64, zone: &TimeZone) -> String {
    let Ok(at) = Timestamp::from_second(unix_s) else {
        return "-".into();
    };
    let at = at.to_zoned(zone.clone());
    at.strftime("%Y-%m-%d %H:%M:%S").to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_told_as_people_read_them() {
        assert_eq!(time(1_700_000_000, &TimeZone::UTC), "2023-11-14 22:13:20");
        assert_eq!(time(i64::MAX, &TimeZone::UTC), "-");
    }
}
