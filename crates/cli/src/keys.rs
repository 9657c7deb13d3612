//! The key that ends a display: a terminal gives it at once and does not show it.
//!
//! Owns the terminal's settings while it lives, and puts them back. Refuses: to change anything where no terminal is.

use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcsetattr};
use std::io::{IsTerminal as _, Read as _};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

/// A terminal whose keys are heard one by one.
pub struct Keys {
    before: Option<Termios>,
    pressed: UnboundedReceiver<u8>,
}

impl Keys {
    /// Hears the keys from now on. Ctrl-C stays what it is.
    pub fn listen() -> Self {
        let (press, pressed) = unbounded_channel();
        let input = std::io::stdin();
        let before = tcgetattr(&input).ok().filter(|_| input.is_terminal());
        if let Some(mut settings) = before.clone() {
            settings.local_modes -= LocalModes::ICANON | LocalModes::ECHO;
            let _ = tcsetattr(&input, OptionalActions::Now, &settings);
            // It ends with the process: nothing takes a read away from a terminal.
            std::thread::spawn(move || {
                for byte in std::io::stdin().lock().bytes().map_while(Result::ok) {
                    if press.send(byte).is_err() {
                        return;
                    }
                }
            });
        }
        Self { before, pressed }
    }

    /// Waits until `q` is pressed; without a terminal for ever.
    pub async fn quit(&mut self) {
        while let Some(key) = self.pressed.recv().await {
            if matches!(key, b'q' | b'Q') {
                return;
            }
        }
        std::future::pending().await
    }
}

impl Drop for Keys {
    fn drop(&mut self) {
        if let Some(settings) = &self.before {
            let _ = tcsetattr(std::io::stdin(), OptionalActions::Now, settings);
        }
    }
}
