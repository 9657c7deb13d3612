//! Figures as people read them: units that fit their size, and how wide a terminal is.
//!
//! Pure, but for [`columns`]. Refuses: digits that say nothing.

/// Bytes per second.
pub fn rate(bytes_per_s: f64) -> String {
    match bytes_per_s {
        gb if gb >= 1e9 => format!("{:.2} GB/s", gb / 1e9),
        mb if mb >= 1e6 => format!("{:.1} MB/s", mb / 1e6),
        kb => format!("{:.0} kB/s", kb / 1e3),
    }
}

/// A time of seconds to hours.
pub fn seconds(seconds: f64) -> String {
    match seconds {
        long if long >= 5400.0 => format!("{:.1} h", long / 3600.0),
        long if long >= 100.0 => format!("{:.1} min", long / 60.0),
        short => format!("{short:.1} s"),
    }
}

/// Bytes of memory.
pub fn mib(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

/// Bytes of a disk.
pub fn amount(bytes: u64) -> String {
    match bytes >> 30 {
        0 => mib(bytes),
        _ => format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30)),
    }
}

/// How much of its speed a guest has.
pub fn guest_speed(percent: u32) -> String {
    match percent {
        100.. => "not slowed".into(),
        _ => format!("slowed to {percent} %"),
    }
}

/// A moment, by the calendar and UTC.
pub fn moment(unix_s: u64) -> String {
    let moment = i64::try_from(unix_s).ok();
    let moment = moment.and_then(|seconds| jiff::Timestamp::from_second(seconds).ok());
    moment.map_or_else(
        || "-".into(),
        |moment| moment.strftime("%Y-%m-%d %H:%M:%S UTC").to_string(),
    )
}

/// The parts from the first on that fit into so many columns, with commas between them; the first at least.
pub fn fitting(parts: &[String], columns: usize) -> String {
    let mut text = String::new();
    for part in parts {
        let with = match text.as_str() {
            "" => part.clone(),
            before => format!("{before}, {part}"),
        };
        if !text.is_empty() && with.chars().count() > columns {
            break;
        }
        text = with;
    }
    text
}

/// Columns of the terminal that is behind this descriptor; none where there is no terminal.
pub fn columns(terminal: impl std::os::fd::AsFd) -> Option<usize> {
    let size = rustix::termios::tcgetwinsize(terminal).ok()?;
    Some(usize::from(size.ws_col)).filter(|columns| *columns > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_have_units_that_fit_them() {
        assert_eq!(seconds(12.34), "12.3 s");
        assert_eq!(seconds(7200.0), "2.0 h");
        assert_eq!(rate(1.25e9), "1.25 GB/s");
        assert_eq!(rate(12e6), "12.0 MB/s");
        assert_eq!(rate(0.0), "0 kB/s");
        assert_eq!(guest_speed(100), "not slowed");
        assert_eq!(guest_speed(30), "slowed to 30 %");
        assert_eq!(moment(0), "1970-01-01 00:00:00 UTC");
        assert_eq!(moment(u64::MAX), "-");
    }

    #[test]
    fn what_does_not_fit_is_left_out_from_the_end() {
        let parts = ["88 %", "30.8 MB/s", "limited by cap"].map(String::from);
        assert_eq!(fitting(&parts, 80), "88 %, 30.8 MB/s, limited by cap");
        assert_eq!(fitting(&parts, 20), "88 %, 30.8 MB/s");
        assert_eq!(fitting(&parts, 1), "88 %");
    }
}
