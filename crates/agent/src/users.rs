//! The user that QEMU runs as, from `/etc/passwd` (no directory service is asked).
//!
//! Owns nothing. Refuses: to run QEMU as root.

/// The user that QEMU should have.
pub const QEMU_USER: &str = "godwit-qemu";

/// A user as the kernel knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct User {
    pub uid: u32,
    pub gid: u32,
}

/// The user without rights of its own.
pub const NOBODY: User = User {
    uid: 65534,
    gid: 65534,
};

/// What follows where `nobody` stands in for the user that QEMU should have.
pub const NOBODY_RUNS: &str = "this host has no user godwit-qemu: QEMU of a VM without a user id of its own runs as nobody, and every daemon that does so too can read and change that guest's memory";

/// Whether QEMU's common user is `nobody` only because there is no better one. Who names it in host.toml wants it.
pub fn is_nobody_for_want_of(configured: Option<&str>, found: User) -> bool {
    configured.is_none() && found.uid == NOBODY.uid
}

/// Why no user could be found for QEMU.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UserError {
    /// The configured user does not exist.
    #[error(
        "user '{0}' does not exist: make it with 'useradd --system --no-create-home {0}', or change qemu_user"
    )]
    Unknown(String),
    /// The configured user is root.
    #[error("qemu_user = \"{0}\" is root: QEMU must run as a user without privileges")]
    Root(String),
}

fn field(line: &str, index: usize) -> Option<&str> {
    line.split(':').nth(index)
}

fn find_user(passwd: &str, name: &str) -> Option<User> {
    let line = passwd.lines().find(|line| field(line, 0) == Some(name))?;
    Some(User {
        uid: field(line, 2)?.parse().ok()?,
        gid: field(line, 3)?.parse().ok()?,
    })
}

/// The user that QEMU runs as: the configured one, else `godwit-qemu` where it exists, else `nobody`.
pub fn qemu_user(configured: Option<&str>) -> Result<User, UserError> {
    choose(
        &std::fs::read_to_string("/etc/passwd").unwrap_or_default(),
        configured,
    )
}

fn choose(passwd: &str, configured: Option<&str>) -> Result<User, UserError> {
    let candidates = match configured {
        Some(name) => vec![name],
        None => vec![QEMU_USER, "nobody"],
    };
    let found = candidates
        .iter()
        .find_map(|name| Some((*name, find_user(passwd, name)?)));
    match found {
        Some((name, user)) if user.uid == 0 => Err(UserError::Root(name.into())),
        Some((_, user)) => Ok(user),
        None => Err(UserError::Unknown(
            candidates.first().unwrap_or(&"nobody").to_string(),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &str = "root:x:0:0::/root:/bin/sh\nnobody:x:65534:65533::/:/bin/false\n";

    #[test]
    fn nobody_is_the_last_resort() {
        assert_eq!(choose(PASSWD, None).unwrap().gid, 65533);
        let with = format!("{PASSWD}godwit-qemu:x:990:991::/:/bin/false\n");
        assert_eq!(choose(&with, None).unwrap(), User { uid: 990, gid: 991 });
    }

    #[test]
    fn root_and_unknown_users_are_refused() {
        assert!(
            choose(PASSWD, Some("root"))
                .unwrap_err()
                .to_string()
                .contains("root")
        );
        assert!(
            choose(PASSWD, Some("ghost"))
                .unwrap_err()
                .to_string()
                .contains("ghost")
        );
    }
}
