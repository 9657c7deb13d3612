//! A terminal that hands every key on and shows only what it is sent, for as long as somebody sits at a guest's console.
//!
//! Owns the terminal's settings while it lives, and puts them back: when it is dropped, and when this process panics. Refuses:
//! where there is no terminal.

use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};
use std::io::Write as _;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// As it was, while it is raw.
static BEFORE: Mutex<Option<Termios>> = Mutex::new(None);

/// Drop it to have the terminal back.
#[derive(Debug)]
pub struct RawTerminal(());

impl RawTerminal {
    /// Takes the terminal of standard input.
    pub fn enter() -> std::io::Result<Self> {
        let input = std::io::stdin();
        let before = tcgetattr(&input)?;
        let mut raw = before.clone();
        raw.make_raw();
        if saved().replace(before).is_none() {
            let report = std::panic::take_hook();
            std::panic::set_hook(Box::new(move |panic| {
                leave();
                report(panic);
            }));
        }
        tcsetattr(&input, OptionalActions::Now, &raw)?;
        Ok(Self(()))
    }

    /// Shows what a guest wrote, as it stands: that is what a console is for.
    pub fn show(&self, bytes: &[u8]) -> std::io::Result<()> {
        let mut output = std::io::stdout().lock();
        output.write_all(bytes)?;
        output.flush()
    }

    /// Says something between what the guest writes, on a line of its own.
    pub fn tell(&self, text: &str) {
        let line = format!("\r\n[godwit: {}]\r\n", crate::plain::sentence(text));
        let _ = std::io::stderr().write_all(line.as_bytes());
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        leave();
    }
}

/// Lines of the terminal that standard output is, if it is one and says so.
pub fn lines() -> Option<usize> {
    let size = tcgetwinsize(std::io::stdout()).ok()?;
    Some(usize::from(size.ws_row)).filter(|lines| *lines > 0)
}

fn leave() {
    if let Some(before) = saved().take() {
        let _ = tcsetattr(std::io::stdin(), OptionalActions::Now, &before);
    }
}

fn saved() -> MutexGuard<'static, Option<Termios>> {
    BEFORE.lock().unwrap_or_else(PoisonError::into_inner)
}
