//! The one-time token of joining and renewing, wherever it was given: on the command line, in a file, or on standard input.
//!
//! Owns nothing; what was read is wiped. Refuses: more than a token can have.

use crate::args::TokenArgs;
use crate::exit::Failure;
use godwit_rpc::Token;
use godwit_types::ErrorCode;
use std::io::Read;
use zeroize::Zeroizing;

/// Longest file that holds a token, bytes.
const TOKEN_FILE_MAX: u64 = 4096;

/// Takes the token from the command line, a file or standard input.
pub fn read(arguments: &TokenArgs) -> Result<Token, Failure> {
    let text = text(arguments, std::io::stdin().lock())?;
    Token::parse(text.trim()).map_err(|error| Failure::new(ErrorCode::BadToken, error.to_string()))
}

fn text(arguments: &TokenArgs, stdin: impl Read) -> Result<Zeroizing<String>, Failure> {
    let given = arguments.token.as_deref().unwrap_or_default();
    if given != "-" && arguments.token_file.is_none() {
        return Ok(Zeroizing::new(given.to_owned()));
    }
    // As long as it may get, so that no part of it is left behind where it grew.
    let mut text = Zeroizing::new(String::with_capacity(TOKEN_FILE_MAX as usize + 1));
    let (place, read) = match &arguments.token_file {
        Some(path) => {
            let read = std::fs::File::open(path)
                .and_then(|file| file.take(TOKEN_FILE_MAX).read_to_string(&mut text));
            (path.display().to_string(), read)
        }
        None => (
            "standard input".to_owned(),
            stdin.take(TOKEN_FILE_MAX).read_to_string(&mut text),
        ),
    };
    read.map_err(|error| {
        let message = format!("cannot read the token from {place}: {error}");
        Failure::new(ErrorCode::Internal, message)
    })?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Cli, Command, HostCommand};

    /// As joining and as renewing take it.
    fn given(words: &[&str]) -> [TokenArgs; 2] {
        use clap::Parser;
        let parse = |verb| Cli::parse_from(["godwit", "host", verb].iter().chain(words));
        let (Command::Host(HostCommand::Join(join)), Command::Host(HostCommand::Renew(renew))) =
            (parse("join").command, parse("renew").command)
        else {
            panic!("{words:?}");
        };
        [join.token, renew.token]
    }

    #[test]
    fn a_token_need_not_stand_where_every_user_reads_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        std::fs::write(&path, "from-file\n").unwrap();
        let path = path.to_str().unwrap();
        let stdin = || &b"from-stdin\n"[..];
        for (words, wanted) in [
            (vec!["plain"], "plain"),
            (vec!["-"], "from-stdin"),
            (vec!["--token-file", path], "from-file"),
        ] {
            for arguments in given(&words) {
                let found = text(&arguments, stdin()).unwrap();
                assert_eq!(found.trim(), wanted);
            }
        }
        let endless = text(&given(&["-"])[1], std::io::repeat(b'x')).unwrap();
        assert_eq!(endless.len() as u64, TOKEN_FILE_MAX);
        let [_, missing] = given(&["--token-file", "/no/such"]);
        let refused = text(&missing, stdin()).unwrap_err();
        assert!(format!("{refused:?}").contains("/no/such"), "{refused:?}");
    }
}
