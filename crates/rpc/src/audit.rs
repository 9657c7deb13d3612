//! The hook by which the owner of a server keeps a log of who asked for what.
//!
//! Owns nothing: a server that was made with an [`Auditor`] tells it of every request that changes something, before it
//! is carried out and when it was answered, refused ones included. Left out: reading requests, what hosts and the
//! controller say to each other (but that a host leaves), and strangers who are refused at the door (they could fill any
//! log; those who come too often are counted). Of who shows a certificate that is not admitted, and of hosts who want what
//! hosts may not do, and of what is typed to a guest, the auditor says which requests are news. Bodies are told of where they are
//! short, and never of a join, which holds a secret, or of what is typed, which may be one.

use crate::access::Peer;
use crate::controller_client::path;
use crate::pki::Holder;
use crate::server::{CameFrom, NotAdmitted};
use axum::extract::{MatchedPath, RawPathParams, Request};
use axum::http::Method;
use axum::response::Response;
use godwit_types::ApiError;
use std::future::Future;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};

/// A longer body is not kept.
const BODY_LEN_MAX: usize = 4 << 10;
/// A longer path parameter or query is cut: no route has one.
const TEXT_LEN_MAX: usize = 256;

/// What an [`Auditor`] answers later.
pub type Later<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// The user whose login began the session that a local request comes from, where the kernel keeps that.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Login(pub u32);

impl Login {
    /// Of a process. Advisory: the process may have ended meanwhile.
    pub(crate) fn of_process(pid: i32) -> Option<Self> {
        let text = std::fs::read_to_string(format!("/proc/{pid}/loginuid")).ok()?;
        let uid: u32 = text.trim().parse().ok()?;
        (uid != u32::MAX).then_some(Self(uid))
    }
}

/// A request that changes something.
#[derive(Debug, Clone)]
pub struct Asked {
    pub peer: Peer,
    /// The serial number of the certificate that was shown.
    pub serial: Option<String>,
    /// Who logged in, of a local process.
    pub login: Option<Login>,
    /// Where it came from, over the network.
    pub from: Option<IpAddr>,
    pub method: Method,
    pub route: String,
    /// What the path names: a VM, host or migration.
    pub subject: Option<String>,
    /// What stands behind the question mark.
    pub query: Option<String>,
    /// It was refused before anybody looked at what it wants.
    pub is_refused: bool,
}

impl Asked {
    /// Whether somebody types to a guest: there are as many of these as keys.
    pub fn types(&self) -> bool {
        self.route == path::CONSOLE_TYPE
    }

    fn has_secret(&self) -> bool {
        self.types() || self.route == path::JOIN
    }
}

/// How it was answered.
#[derive(Debug, Clone)]
pub struct Answered {
    pub status: u16,
    /// The error, of a request that was refused or failed.
    pub error: Option<ApiError>,
    /// The request's JSON body, where it has one and is short.
    pub body: Option<String>,
}

/// Writes down who asked for what, and what came of it.
pub trait Auditor: Send + Sync {
    /// A request was let in, or turned away from a route that its peer may not call; it is carried out once this is
    /// done. The number is given back with the answer.
    fn asked(&self, asked: Asked) -> Later<'_, i64>;
    fn answered(&self, number: i64, answered: Answered) -> Later<'_, ()>;
    /// Somebody asked too often and was not let in: to be counted, no more, since there may be any number.
    fn turned_away(&self);
    /// Whether a request that was refused before anybody looked at it, or that types, is to be told of: not each time, since
    /// there may be any number. Counts it if not.
    fn is_news(&self, asked: &Asked) -> bool;
}

/// Where [`crate::JsonBody`] leaves what it has read.
#[derive(Debug, Clone, Default)]
pub(crate) struct BodySlot(Arc<Mutex<Option<String>>>);

impl BodySlot {
    pub(crate) fn keep(&self, bytes: &[u8]) {
        let short = (1..=BODY_LEN_MAX).contains(&bytes.len());
        if let Some(text) = short.then(|| std::str::from_utf8(bytes).ok()).flatten() {
            *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(text.to_owned());
        }
    }

    fn take(&self) -> Option<String> {
        let mut slot = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        slot.take()
    }
}

/// A request that the auditor has been told of and waits to hear the end of.
pub(crate) struct Entry {
    auditor: Arc<dyn Auditor>,
    number: i64,
    body: BodySlot,
}

impl Entry {
    /// Tells the auditor of a request that changes something; none where there is nothing to tell.
    pub(crate) async fn begin(
        auditor: Option<&Arc<dyn Auditor>>,
        request: &mut Request,
        is_let_in: bool,
    ) -> Option<Self> {
        let auditor = auditor?.clone();
        let asked = asked(request, is_let_in).await?;
        if (asked.is_refused || asked.types()) && !auditor.is_news(&asked) {
            return None;
        }
        let body = BodySlot::default();
        if !asked.has_secret() {
            request.extensions_mut().insert(body.clone());
        }
        let number = auditor.asked(asked).await;
        Some(Self {
            auditor,
            number,
            body,
        })
    }

    /// Tells it of the answer, which is given back.
    pub(crate) async fn end(self, response: Response) -> Response {
        let answered = Answered {
            status: response.status().as_u16(),
            error: response.extensions().get::<ApiError>().cloned(),
            body: self.body.take(),
        };
        self.auditor.answered(self.number, answered).await;
        response
    }
}

async fn asked(request: &mut Request, is_let_in: bool) -> Option<Asked> {
    let method = request.method().clone();
    if matches!(method, Method::GET | Method::HEAD | Method::OPTIONS) {
        return None;
    }
    let peer = request.extensions().get::<Peer>().cloned();
    let peer = peer.unwrap_or(Peer::Anonymous);
    let is_over = !is_let_in && request.extensions().get::<NotAdmitted>().is_some();
    let is_host = matches!(peer, Peer::Host(_));
    match peer {
        _ if is_over => {}
        // A host that leaves is told of: its site loses it.
        Peer::Host(_) if method == Method::DELETE => {}
        Peer::Host(_) | Peer::Controller => return None,
        Peer::Anonymous if !is_let_in => return None,
        _ => {}
    }
    let route = request.extensions().get::<MatchedPath>()?;
    let route = route.as_str().to_owned();
    Some(Asked {
        peer,
        serial: request
            .extensions()
            .get::<Holder>()
            .map(|h| h.serial.clone()),
        login: request.extensions().get::<Login>().copied(),
        from: request.extensions().get::<CameFrom>().map(|from| from.0),
        method,
        route,
        query: request.uri().query().map(cut),
        subject: subject(request).await,
        is_refused: is_over || (is_host && !is_let_in),
    })
}

/// The path's one parameter.
async fn subject(request: &mut Request) -> Option<String> {
    use axum::RequestExt as _;
    let params = request.extract_parts::<RawPathParams>().await.ok()?;
    params.iter().next().map(|(_, text)| cut(text))
}

fn cut(text: &str) -> String {
    text.chars().take(TEXT_LEN_MAX).collect()
}
