//! The listeners: who is there, may they, and within which limits.
//!
//! Owns its connections and ends them at shutdown. Every request gets the extensions [`Peer`] and
//! [`Limits`]. Refuses: more than [`CONNECTIONS_MAX`] connections of one listener (handshakes, and those without a
//! certificate, have small pools of their own), a second request of a peer without certificate, heads that trickle,
//! peers and certificates that [`Admission`] does not admit (asked at every request, so that a revocation ends open
//! connections too, and what is being streamed on them), answers that nobody reads, and who tries a route that is open to
//! everybody too often. A certificate that is not admitted gives no better place than none.

use crate::access::{self, Peer, Rule};
use crate::audit::{Auditor, Entry, Login};
use crate::extract::Failure;
use crate::limits::{
    CONNECTIONS_MAX, HANDSHAKES_MAX, HANDSHAKES_PER_SOURCE, HEADER_LEN_MAX, Limits, STRANGERS_MAX,
    STRANGERS_PER_SOURCE,
};
use crate::listen::Place;
use crate::pki::{Holder, Role, now_unix_s};
use crate::places::Places;
use crate::revocations::Admission;
use crate::unproved::Unproved;
use crate::until::{Gone, Until};
use axum::Router;
use axum::extract::{MatchedPath, Request, State};
use axum::http::header::CONNECTION;
use axum::http::{HeaderValue, Method};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse as _, Response};
use godwit_types::text::cut;
use godwit_types::version::{PROTOCOL, PROTOCOL_HEADER, Range, VERSION};
use godwit_types::{ApiError, ErrorCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::sync::{Semaphore, watch};
use tokio_io_timeout::TimeoutStream;
use tokio_rustls::TlsAcceptor;
use tower::ServiceExt as _;

/// A longer path, in bytes, is cut where a sentence names it.
const PATH_SHOWN: usize = 128;
/// Open requests get this long at shutdown.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(1);
/// Pause after `accept` fails (no descriptors left), so that it is not tried in a tight loop.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// An HTTP interface, to be served on any number of listeners.
#[derive(Clone)]
pub struct Server {
    router: Router,
    admission: Arc<dyn Admission>,
    limits: Limits,
}

/// What lets connections in at one TLS listener.
#[derive(Clone)]
struct Doors {
    acceptor: TlsAcceptor,
    places: Arc<Places>,
    handshakes: Arc<Unproved>,
    strangers: Arc<Unproved>,
}

/// The address that a request came from over the network; set by the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CameFrom(pub IpAddr);

/// The certificate that was shown is not admitted; set by the server.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NotAdmitted;

/// Since when a connection is open; set by the server.
#[derive(Debug, Clone, Copy)]
struct OpenSince(Instant);

/// Who is at the other end of one connection.
#[derive(Clone)]
struct Who {
    since: OpenSince,
    peer: Peer,
    holder: Option<Holder>,
    login: Option<Login>,
    from: Option<CameFrom>,
    /// Whoever has no certificate that is admitted asks once: whatever the answer is, the connection ends with it.
    asks_once: bool,
}

impl Who {
    /// Who came over the network, by the certificate that was shown.
    fn from_afar(holder: Option<Holder>, from: IpAddr, since: OpenSince, asks_once: bool) -> Self {
        let peer = holder.as_ref().map(|holder| holder.role.peer());
        Self {
            asks_once,
            since,
            peer: peer.unwrap_or(Peer::Anonymous),
            holder,
            login: None,
            from: Some(CameFrom(from)),
        }
    }

    fn write_on(self, extensions: &mut axum::http::Extensions) {
        extensions.insert(self.since);
        extensions.insert(self.peer);
        self.holder.map(|holder| extensions.insert(holder));
        self.login.map(|login| extensions.insert(login));
        self.from.map(|from| extensions.insert(from));
    }
}

#[derive(Clone)]
struct Guard {
    rules: Arc<[Rule]>,
    admission: Arc<dyn Admission>,
    auditor: Option<Arc<dyn Auditor>>,
}

impl Server {
    /// A server of `router` whose every route has a rule in `rules`.
    pub fn new(router: Router, rules: &[Rule], admission: Arc<dyn Admission>) -> Self {
        Self::guarded(router, rules, admission, None)
    }

    /// The same, telling `auditor` of every request that changes something.
    pub fn audited(
        router: Router,
        rules: &[Rule],
        admission: Arc<dyn Admission>,
        auditor: Arc<dyn Auditor>,
    ) -> Self {
        Self::guarded(router, rules, admission, Some(auditor))
    }

    fn guarded(
        router: Router,
        rules: &[Rule],
        admission: Arc<dyn Admission>,
        auditor: Option<Arc<dyn Auditor>>,
    ) -> Self {
        let guard = Guard {
            rules: rules.into(),
            admission: Arc::clone(&admission),
            auditor,
        };
        let router = router
            .fallback(not_found)
            .method_not_allowed_fallback(wrong_method)
            .layer(from_fn_with_state(guard, check));
        Self {
            router,
            admission,
            limits: Limits::default(),
        }
    }

    /// The same with other time limits.
    pub fn with_limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }

    /// Serves a Unix socket until `stop` turns true or its sender is gone.
    pub async fn run_unix(self, listener: UnixListener, stop: watch::Receiver<bool>) {
        let accept = || async { listener.accept().await.map(|(stream, _)| stream) };
        let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
        let serve =
            move |server: Self, stream, stop| server.serve_unix(stream, places.clone(), stop);
        self.accept_loop(accept, serve, stop).await;
    }

    /// Waits until this machine has the address, then serves TLS there until `stop` turns true or its sender is gone.
    pub async fn run_tls_at(
        self,
        place: Place,
        config: Arc<rustls::ServerConfig>,
        mut stop: watch::Receiver<bool>,
    ) {
        let listener = tokio::select! {
            listener = place.listener() => listener,
            _ = stop.wait_for(|stop| *stop) => return,
        };
        self.run_tls(listener, config, stop).await;
    }

    /// Serves TLS until `stop` turns true or its sender is gone.
    pub async fn run_tls(
        self,
        listener: TcpListener,
        config: Arc<rustls::ServerConfig>,
        stop: watch::Receiver<bool>,
    ) {
        let accept = || listener.accept();
        let doors = Doors {
            acceptor: TlsAcceptor::from(config),
            places: Arc::default(),
            handshakes: Unproved::new(HANDSHAKES_MAX, HANDSHAKES_PER_SOURCE),
            strangers: Unproved::new(STRANGERS_MAX, STRANGERS_PER_SOURCE),
        };
        let serve =
            move |server: Self, accepted, stop| server.serve_tls(accepted, doors.clone(), stop);
        self.accept_loop(accept, serve, stop).await;
    }

    async fn accept_loop<Stream, Accepted, Served>(
        self,
        accept: impl Fn() -> Accepted,
        serve: impl Fn(Self, Stream, watch::Receiver<bool>) -> Served,
        mut stop: watch::Receiver<bool>,
    ) where
        Accepted: Future<Output = io::Result<Stream>>,
        Served: Future<Output = ()> + Send + 'static,
    {
        let mut open = tokio::task::JoinSet::new();
        loop {
            while open.try_join_next().is_some() {}
            let accepted = tokio::select! {
                accepted = accept() => accepted,
                _ = stop.wait_for(|stop| *stop) => break,
            };
            let Ok(stream) = accepted else {
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            };
            open.spawn(serve(self.clone(), stream, stop.clone()));
        }
        let _ = tokio::time::timeout(SHUTDOWN_GRACE, async {
            while open.join_next().await.is_some() {}
        })
        .await;
    }

    /// Over the limit the connection is closed at once.
    async fn serve_unix(
        self,
        stream: UnixStream,
        places: Arc<Semaphore>,
        stop: watch::Receiver<bool>,
    ) {
        let Ok(_place) = places.try_acquire_owned() else {
            return;
        };
        if let Ok(credentials) = stream.peer_cred() {
            let uid = credentials.uid();
            let login = credentials.pid().and_then(Login::of_process);
            let who = Who {
                since: OpenSince(Instant::now()),
                peer: Peer::Local { uid },
                holder: None,
                login,
                from: None,
                asks_once: false,
            };
            self.serve(stream, who, stop).await;
        }
    }

    /// Until its peer has shown a certificate, a connection has only a place that a newer one may take.
    async fn serve_tls(
        self,
        (stream, address): (TcpStream, SocketAddr),
        doors: Doors,
        stop: watch::Receiver<bool>,
    ) {
        let (from, since) = (address.ip().to_canonical(), OpenSince(Instant::now()));
        let _ = stream.set_nodelay(true);
        let mut turn = doors.handshakes.enter(from);
        let shaken = tokio::time::timeout(self.limits.handshake, doors.acceptor.accept(stream));
        let Some(Ok(Ok(stream))) = turn.unless_sent_away(shaken).await else {
            return;
        };
        let end = stream
            .get_ref()
            .1
            .peer_certificates()
            .and_then(<[_]>::first);
        let Ok(holder) = end.map(|der| Holder::read(der)).transpose() else {
            return;
        };
        let admitted = holder.as_ref();
        let Some(admitted) = admitted.filter(|holder| self.admission.admits(holder)) else {
            drop(turn);
            let mut turn = doors.strangers.enter(from);
            let who = Who::from_afar(holder, from, since, true);
            let served = self.serve(stream, who, stop);
            turn.unless_sent_away(served).await;
            return;
        };
        let Some(_place) = doors.places.take(admitted) else {
            return;
        };
        drop(turn);
        let who = Who::from_afar(holder, from, since, false);
        self.serve(stream, who, stop).await;
    }

    async fn serve<Stream: AsyncRead + AsyncWrite + Unpin + Send + 'static>(
        self,
        stream: Stream,
        who: Who,
        mut stop: watch::Receiver<bool>,
    ) {
        let (router, limits) = (self.router, self.limits);
        let asks_once = who.asks_once;
        let service = hyper::service::service_fn(move |mut request: hyper::Request<_>| {
            let extensions = request.extensions_mut();
            extensions.insert(limits);
            who.clone().write_on(extensions);
            router.clone().oneshot(request)
        });
        let mut patient = TimeoutStream::new(stream);
        patient.set_write_timeout(Some(limits.write));
        let connection = hyper::server::conn::http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(limits.head)
            .max_buf_size(HEADER_LEN_MAX)
            .keep_alive(!asks_once)
            .serve_connection(TokioIo::new(Box::pin(patient)), service);
        let mut connection = std::pin::pin!(connection);
        tokio::select! {
            _ = connection.as_mut() => return,
            _ = stop.wait_for(|stop| *stop) => connection.as_mut().graceful_shutdown(),
        }
        let _ = tokio::time::timeout(SHUTDOWN_GRACE, connection).await;
    }
}

async fn check(State(guard): State<Guard>, mut request: Request, next: Next) -> Response {
    let standing = guard.standing(&request);
    let admitted = guard.admit(&request, standing);
    // The connection ends with this answer.
    let is_over = standing != Standing::Good;
    if is_over {
        request.extensions_mut().insert(NotAdmitted);
    }
    let admitted = admitted.and_then(|how| understood(&request).map(|()| how));
    // Before anything is written down of somebody who is not known.
    let admitted = admitted.and_then(|how| guard.may_try(&request).map(|()| how));
    let wanted = guard.while_wanted(&request);
    // A task of its own: a client that goes away in the middle leaves nothing half done and nothing unsaid.
    let task = tokio::spawn(async move {
        let entry = Entry::begin(guard.auditor.as_ref(), &mut request, admitted.is_ok()).await;
        let refused = match admitted {
            Ok(Admitted::Yes) => None,
            Ok(Admitted::Unwanted(why)) => {
                request.extensions_mut().insert(why);
                None
            }
            Err(error) => Some(Failure(error).into_response()),
        };
        let response = match refused {
            Some(refused) => refused,
            None => answer(request, next).await,
        };
        match entry {
            Some(entry) => entry.end(response).await,
            None => response,
        }
    });
    let mut response = task.await.unwrap_or_else(|_| own_fault());
    if is_over {
        let close = HeaderValue::from_static("close");
        response.headers_mut().insert(CONNECTION, close);
    }
    Until::ends(response, wanted)
}

/// A fault in a handler is an answer.
async fn answer(request: Request, next: Next) -> Response {
    let task = tokio::spawn(next.run(request));
    task.await.unwrap_or_else(|_| own_fault())
}

fn own_fault() -> Response {
    let message = "this request met a fault of Godwit's own: see the log";
    Failure(ApiError::new(ErrorCode::Internal, message)).into_response()
}

/// Nothing is changed by words that may mean something else here. Reading is always allowed: so are versions found out.
fn understood(request: &Request) -> Result<(), ApiError> {
    let said = request.headers().get(PROTOCOL_HEADER);
    let theirs = said.map_or(Some(Range::FIRST), |said| said.to_str().ok()?.parse().ok());
    let speaks = theirs.filter(|theirs| PROTOCOL.common(*theirs).is_some());
    if speaks.is_some() || request.method() == Method::GET {
        return Ok(());
    }
    let theirs = theirs.map_or("nothing that can be read".into(), |theirs| {
        theirs.to_string()
    });
    let message = format!(
        "this is Godwit {VERSION}, which speaks protocol {PROTOCOL}, and the request is in {theirs}: install the same version on both sides"
    );
    Err(ApiError::new(ErrorCode::Incompatible, message))
}

/// What the certificate that was shown is worth by now; of nobody who shows none is it anything but good.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Standing {
    Good,
    Ended,
    Revoked,
}

/// How a request is let in.
enum Admitted {
    Yes,
    /// Its peer's certificate is wanted no more: only to be told so.
    Unwanted(access::Unwanted),
}

fn ended_text(holder: &Holder) -> String {
    format!(
        "the certificate of {} has ended while its connection was open: connect again with a new one",
        holder.role
    )
}

fn revoked_text(holder: &Holder) -> String {
    let role = &holder.role;
    match role {
        Role::Operator(name) => format!(
            "the certificate of {role} was revoked: get another one where the controller is, with 'godwit operator add {name}'"
        ),
        _ => format!(
            "the certificate of {role} was revoked, by removing it or by using a later one: if this machine is no old copy, join again"
        ),
    }
}

impl Guard {
    /// Who comes over the network to a route that is open to everybody may not come too often.
    fn may_try(&self, request: &Request) -> Result<(), ApiError> {
        let extensions = request.extensions();
        let path = extensions.get::<MatchedPath>().map(MatchedPath::as_str);
        let Some(CameFrom(from)) = extensions.get::<CameFrom>() else {
            return Ok(());
        };
        if !access::is_open_to_all(&self.rules, request.method().as_str(), path) {
            return Ok(());
        }
        self.admission.may_try(*from).inspect_err(|_| {
            if let Some(auditor) = &self.auditor {
                auditor.turned_away();
            }
        })
    }

    /// Ends when the certificate that is shown is not wanted any more; none where it is not at stake.
    fn while_wanted(&self, request: &Request) -> Option<Gone> {
        let holder = request.extensions().get::<Holder>()?.clone();
        let mut changes = self.admission.changes()?;
        let admission = self.admission.clone();
        Some(Box::pin(async move {
            let left = holder.not_after_unix_s.saturating_sub(now_unix_s());
            let ends = tokio::time::sleep(Duration::from_secs(u64::try_from(left).unwrap_or(0)));
            tokio::pin!(ends);
            while admission.admits(&holder) {
                tokio::select! {
                    () = &mut ends => return,
                    changed = changes.changed() => if changed.is_err() {
                        return std::future::pending().await;
                    }
                }
            }
        }))
    }

    /// The handshake has looked at this once; a connection may be older.
    fn standing(&self, request: &Request) -> Standing {
        let extensions = request.extensions();
        let Some(holder) = extensions.get::<Holder>() else {
            return Standing::Good;
        };
        if holder.not_after_unix_s < now_unix_s() {
            return Standing::Ended;
        }
        let admits = match extensions.get::<OpenSince>() {
            Some(OpenSince(since)) => self.admission.admits_on(holder, *since),
            None => self.admission.admits(holder),
        };
        match admits {
            true => Standing::Good,
            false => Standing::Revoked,
        }
    }

    fn admit(&self, request: &Request, standing: Standing) -> Result<Admitted, ApiError> {
        let extensions = request.extensions();
        let peer = extensions.get::<Peer>().unwrap_or(&Peer::Anonymous);
        let path = extensions.get::<MatchedPath>().map(MatchedPath::as_str);
        let method = request.method().as_str();
        let holder = extensions.get::<Holder>();
        if let Some(holder) = holder.filter(|_| standing == Standing::Ended) {
            return Err(ApiError::new(ErrorCode::NotAllowed, ended_text(holder)));
        }
        let revoked = holder.filter(|_| standing == Standing::Revoked);
        if let Some(holder) = revoked
            && !access::is_open_to_removed(&self.rules, method, path)
        {
            return Err(ApiError::new(ErrorCode::NotAllowed, revoked_text(holder)));
        }
        access::decide(&self.rules, peer, method, path)?;
        Ok(match revoked {
            Some(holder) => Admitted::Unwanted(self.admission.why_unwanted(holder)),
            None => Admitted::Yes,
        })
    }
}

async fn not_found(request: Request) -> Failure {
    Failure(ApiError::new(
        ErrorCode::NotFound,
        format!("there is no {}", shown(request.uri().path())),
    ))
}

async fn wrong_method(request: Request) -> Failure {
    let (method, path) = (request.method(), shown(request.uri().path()));
    Failure(ApiError::new(
        ErrorCode::MethodNotAllowed,
        format!("{method} is not a method of {path}"),
    ))
}

/// A path as a sentence has it.
fn shown(path: &str) -> String {
    let mut path = path.to_owned();
    cut(&mut path, PATH_SHOWN);
    path
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::access::{Access, rule};
    use crate::revocations::Revocations;
    use axum::body::Body;
    use axum::http::StatusCode;
    use axum::routing::get;

    /// The handshake looks at a certificate's end, and a connection may stay open for longer.
    #[tokio::test]
    async fn a_certificate_that_ended_while_its_connection_was_open_is_refused() {
        let rules = [rule("GET", "/whoami", Access::HOST)];
        let router = Router::new().route("/whoami", get(|| async {}));
        let server = Server::new(router, &rules, Arc::new(Revocations::default()));
        let asked = async |not_after_unix_s| {
            let holder = Holder {
                role: Role::Host("a".parse().unwrap()),
                serial: "02".into(),
                life: "01".into(),
                made_unix_s: 0,
                order: 0,
                not_after_unix_s,
            };
            let from = IpAddr::from([127, 0, 0, 1]);
            let mut request = Request::get("/whoami").body(Body::empty()).unwrap();
            Who::from_afar(Some(holder), from, OpenSince(Instant::now()), false)
                .write_on(request.extensions_mut());
            server
                .router
                .clone()
                .oneshot(request)
                .await
                .unwrap()
                .status()
        };
        assert_eq!(asked(now_unix_s() + 3600).await, StatusCode::OK);
        assert_eq!(asked(now_unix_s() - 1).await, StatusCode::FORBIDDEN);
    }
}
