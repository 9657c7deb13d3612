//! The bar of a disk that is being made, copied or moved, and the asking until there is what disks are made for.
//!
//! Owns the bar while it is shown. Refuses nothing.

use crate::exit::Failure;
use crate::figures::mib;
use crate::output::Output;
use crate::plain;
use crate::wait::{of_vm, saying};
use crate::watch::{bar, failure, permille};
use godwit_rpc::{ClientError, ControllerClient};
use godwit_types::VmName;
use godwit_types::control_api::{DiskMaking, DisksMaking};
use indicatif::{ProgressBar, ProgressDrawTarget};
use std::time::Duration;

/// Columns of the disk's name, which stands before the bar.
const PREFIX: usize = 20;
/// How often it is looked how far a disk is.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// The bar, on standard error and only on a terminal; elsewhere a line for each disk.
pub(super) struct DiskBar {
    bar: ProgressBar,
    /// What becomes of the disks, as in 'is being made'.
    does: &'static str,
    is_plain: bool,
    said: Option<String>,
    /// What is said of the disk besides.
    pub(super) note: String,
}

impl Drop for DiskBar {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

impl DiskBar {
    pub(super) fn new(does: &'static str, output: &Output) -> Self {
        let (bar, _) = bar(PREFIX);
        if output.json {
            bar.set_draw_target(ProgressDrawTarget::hidden());
        }
        Self {
            is_plain: bar.is_hidden() && !output.json,
            bar,
            does,
            said: None,
            note: String::new(),
        }
    }

    /// Shows how many bytes of a disk are done, and how long the rest takes, s.
    pub(super) fn show(&mut self, disk: &str, done: u64, total: u64, eta_s: Option<u64>) {
        let disk = plain::sentence(disk);
        let words = format!("{}{}", words(done, total, eta_s), self.note);
        self.bar.set_prefix(disk.clone());
        self.bar.set_position(permille(percent(done, total)));
        if self.is_plain && self.said.as_ref() != Some(&disk) {
            plain::tell(&format!("disk {disk} {}, {words}", self.does));
            self.said = Some(disk);
        }
        self.bar.set_message(words);
    }
}

/// Asks until there is what is ordered, since its disks come first; shows how far these are meanwhile. Returns what was said at last.
pub(super) async fn until_there(
    (client, vm): (&ControllerClient, &VmName),
    (does, output): (&'static str, &Output),
    ask: impl AsyncFn() -> Result<(String, Option<DiskMaking>), ClientError>,
    look: impl AsyncFn() -> Result<DisksMaking, ClientError>,
) -> Result<String, Failure> {
    let mut shown = None;
    loop {
        let asked = saying(of_vm(client, vm), ask()).await;
        let (message, mut making) = asked.map_err(failure)?;
        if making.is_none() {
            return Ok(message);
        }
        let shown = shown.get_or_insert_with(|| DiskBar::new(does, output));
        // Until all are there, or it has ended otherwise, which the next answer tells.
        while let Some(now) = making {
            // It has no name before it has begun.
            if !now.disk.is_empty() {
                shown.show(&now.disk, now.done_bytes, now.total_bytes, None);
            }
            tokio::time::sleep(LOOK_EVERY).await;
            making = look().await.map_err(failure)?.making;
        }
    }
}

fn percent(done: u64, total: u64) -> f64 {
    match total {
        0 => 100.0,
        total => 100.0 * done as f64 / total as f64,
    }
}

fn words(done: u64, total: u64, eta_s: Option<u64>) -> String {
    let left = eta_s.map_or_else(String::new, |left| format!(", {left} s left"));
    format!("{} of {}{left}", mib(done), mib(total))
}

#[cfg(test)]
mod tests {
    use super::*;
    use indicatif::TermLike;
    use std::io;
    use std::sync::{Arc, Mutex};

    /// A terminal that keeps what is written to it.
    #[derive(Debug, Clone, Default)]
    struct Screen(Arc<Mutex<String>>);

    impl TermLike for Screen {
        fn width(&self) -> u16 {
            100
        }
        fn move_cursor_up(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_down(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_right(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_left(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn write_line(&self, text: &str) -> io::Result<()> {
            self.write_str(text)
        }
        fn write_str(&self, text: &str) -> io::Result<()> {
            self.0.lock().unwrap().push_str(text);
            Ok(())
        }
        fn clear_line(&self) -> io::Result<()> {
            Ok(())
        }
        fn flush(&self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_disk_that_is_made_from_an_image_has_a_bar_on_a_terminal() {
        let (mut shown, screen) = (
            DiskBar::new("is being made", &Output::new(false)),
            Screen::default(),
        );
        let target = ProgressDrawTarget::term_like(Box::new(screen.clone()));
        shown.bar.set_draw_target(target);
        shown.show("root", 1 << 30, 4 << 30, None);
        let drawn = screen.0.lock().unwrap().clone();
        for part in [" root [===", "=>", "  ] 1024.0 MiB of 4096.0 MiB"] {
            assert!(drawn.contains(part), "{part:?}: {drawn}");
        }
    }

    #[test]
    fn a_disk_of_nothing_is_done() {
        assert_eq!(percent(0, 0), 100.0);
        assert_eq!(percent(1 << 20, 4 << 20), 25.0);
        assert!(words(1 << 20, 4 << 20, None).contains(" of "));
        assert!(words(1 << 20, 4 << 20, Some(7)).ends_with(", 7 s left"));
    }
}
