//! Who a peer is and what it may call.
//!
//! Every route has one [`Rule`] in a table that the server is made with. Refuses by default: a route without a rule is
//! closed to everybody, and a peer without a certificate may call only what says [`Access::ANYONE`].

use godwit_types::{ApiError, ErrorCode, HostName};
use std::fmt;

/// Who is on the other end of a connection; set by the server on every request.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Peer {
    /// A process on this machine that may open the Unix socket.
    Local {
        uid: u32,
    },
    Host(HostName),
    Controller,
    /// A person or script with an operator's certificate.
    Operator(String),
    /// Somebody without a certificate.
    Anonymous,
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Local { uid } => write!(f, "local user {uid}"),
            Self::Host(name) => write!(f, "host {name}"),
            Self::Controller => f.write_str("the controller"),
            Self::Operator(name) => write!(f, "operator {name}"),
            Self::Anonymous => f.write_str("a client without certificate"),
        }
    }
}

/// A set of kinds of peers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Access(u8);

impl Access {
    pub const LOCAL: Self = Self(1);
    pub const HOST: Self = Self(2);
    pub const CONTROLLER: Self = Self(4);
    pub const OPERATOR: Self = Self(8);
    /// People: here or with a certificate.
    pub const PEOPLE: Self = Self::LOCAL.or(Self::OPERATOR);
    /// Everybody, also without certificate: joining only.
    pub const ANYONE: Self = Self(31);

    pub const fn or(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Whether `peer` is in the set.
    pub fn allows(self, peer: &Peer) -> bool {
        let bit = match peer {
            Peer::Local { .. } => 1,
            Peer::Host(_) => 2,
            Peer::Controller => 4,
            Peer::Operator(_) => 8,
            Peer::Anonymous => 16,
        };
        self.0 & bit != 0
    }
}

/// Who may call one route.
#[derive(Debug, Clone, Copy)]
pub struct Rule {
    /// HTTP method, upper case.
    pub method: &'static str,
    /// Path as given to the router, with `{name}` parameters.
    pub path: &'static str,
    pub access: Access,
    /// Whether a peer whose certificate was revoked may call it, too: to be told that it was removed.
    pub also_removed: bool,
}

/// Why a peer's certificate is wanted no more. Set on its request; only routes that say so ever see one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unwanted {
    /// It was revoked: its holder was removed.
    Removed,
    /// A later one of its life is in use: its holder goes on, and who shows this one is an old copy.
    Replaced,
}

/// Shorthand for tables of rules.
pub const fn rule(method: &'static str, path: &'static str, access: Access) -> Rule {
    Rule {
        method,
        path,
        access,
        also_removed: false,
    }
}

/// A route that peers with a revoked certificate may call, too.
pub const fn rule_also_removed(method: &'static str, path: &'static str, access: Access) -> Rule {
    Rule {
        also_removed: true,
        ..rule(method, path, access)
    }
}

/// Whether a peer with a revoked certificate may make this request.
pub(crate) fn is_open_to_removed(rules: &[Rule], method: &str, path: Option<&str>) -> bool {
    let mut rules = rules.iter();
    rules.any(|rule| rule.also_removed && rule.method == method && Some(rule.path) == path)
}

/// Whether this is a request that needs no certificate.
pub(crate) fn is_open_to_all(rules: &[Rule], method: &str, path: Option<&str>) -> bool {
    let mut rules = rules.iter().filter(|rule| rule.access == Access::ANYONE);
    rules.any(|rule| rule.method == method && Some(rule.path) == path)
}

/// Decides on a request; `path` is the router's matched pattern, if any matched.
pub(crate) fn decide(
    rules: &[Rule],
    peer: &Peer,
    method: &str,
    path: Option<&str>,
) -> Result<(), ApiError> {
    // HEAD is answered by GET's handler and so takes its rule.
    let method = if method == "HEAD" { "GET" } else { method };
    let found = rules
        .iter()
        .find(|rule| rule.method == method && Some(rule.path) == path);
    match found {
        Some(rule) if rule.access.allows(peer) => Ok(()),
        Some(rule) if rule.access == Access::LOCAL => Err(only_here(peer, method, path)),
        Some(_) => Err(denied(peer, method, path)),
        None if matches!(peer, Peer::Anonymous) => Err(denied(peer, method, path)),
        None => missing(rules, peer, method, path),
    }
}

/// No rule: let the router say 404 or 405, unless a handler exists that nobody made a rule for.
fn missing(rules: &[Rule], peer: &Peer, method: &str, path: Option<&str>) -> Result<(), ApiError> {
    match path {
        None => Ok(()),
        Some(path) if rules.iter().any(|rule| rule.path == path) => Err(ApiError::new(
            ErrorCode::MethodNotAllowed,
            format!("{method} is not a method of {path}"),
        )),
        Some(_) => Err(denied(peer, method, path)),
    }
}

fn called(method: &str, path: Option<&str>) -> String {
    path.map_or_else(
        || format!("{method} on this path"),
        |path| format!("{method} {path}"),
    )
}

fn denied(peer: &Peer, method: &str, path: Option<&str>) -> ApiError {
    let what = called(method, path);
    ApiError::new(
        ErrorCode::NotAllowed,
        format!("{peer} may not call {what}: use the certificate of a role that may"),
    )
}

/// Nobody's certificate may: the route is served on the Unix socket alone.
fn only_here(peer: &Peer, method: &str, path: Option<&str>) -> ApiError {
    let what = called(method, path);
    ApiError::new(
        ErrorCode::NotAllowed,
        format!(
            "{peer} may not call {what}: that is done on the machine that serves it alone, by its Unix socket and without a certificate"
        ),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const RULES: &[Rule] = &[
        rule("POST", "/v1/operators", Access::LOCAL),
        rule("GET", "/v1/vms", Access::PEOPLE),
        rule("POST", "/v1/join", Access::ANYONE),
    ];

    fn code(peer: &Peer, method: &str, path: Option<&str>) -> Option<ErrorCode> {
        decide(RULES, peer, method, path).err().map(|e| e.code)
    }

    #[test]
    fn what_has_no_rule_is_closed() {
        let local = Peer::Local { uid: 0 };
        assert_eq!(code(&local, "GET", Some("/v1/vms")), None);
        assert_eq!(code(&local, "HEAD", Some("/v1/vms")), None);
        assert_eq!(code(&local, "GET", None), None);
        let not_allowed = Some(ErrorCode::NotAllowed);
        assert_eq!(code(&local, "GET", Some("/v1/forgotten")), not_allowed);
        let wrong_method = Some(ErrorCode::MethodNotAllowed);
        assert_eq!(code(&local, "PUT", Some("/v1/vms")), wrong_method);
    }

    #[test]
    fn what_no_certificate_may_is_not_said_to_need_another_one() {
        let said = |peer: &Peer, path| {
            let refused = decide(RULES, peer, "POST", Some(path));
            refused.unwrap_err().message
        };
        let eve = Peer::Operator("eve".into());
        let message = said(&eve, "/v1/operators");
        assert!(message.contains("without a certificate"), "{message}");
        assert!(!message.contains("a role that may"), "{message}");
        let message = said(&eve, "/v1/forgotten");
        assert!(message.contains("a role that may"), "{message}");
    }

    #[test]
    fn nobody_without_certificate_learns_anything_but_joining() {
        let not_allowed = Some(ErrorCode::NotAllowed);
        for (method, path) in [
            ("GET", Some("/v1/vms")),
            ("PUT", Some("/v1/vms")),
            ("GET", None),
        ] {
            assert_eq!(code(&Peer::Anonymous, method, path), not_allowed);
        }
        assert_eq!(code(&Peer::Anonymous, "POST", Some("/v1/join")), None);
    }
}
