//! The HTTP client: one connection per request, a deadline on each, answers and errors decoded.
//!
//! Owns nothing but its set-up. It tells apart what certainly was not done ([`ClientError::NotReached`],
//! [`ClientError::Refused`]) from what may have been. Refuses: answers over [`ANSWER_LEN_MAX`], or over what
//! [`Client::with_answer_max`] says, before they are read.

use crate::limits::{ANSWER_LEN_MAX, ANSWER_WAIT, CONNECT_WAIT};
use crate::pki::{Fingerprint, Identity, PkiError, Role};
use crate::revocations::Admission;
use crate::sse::EventStream;
use crate::tls;
use crate::wiped::Wiped;
use godwit_types::site::{STAMP_HEADER, Stamp};
use godwit_types::version::{PROTOCOL, PROTOCOL_HEADER};
use godwit_types::{ApiError, ErrorCode};
use http_body_util::{BodyExt as _, Full};
use hyper::body::{Body as _, Bytes, Incoming};
use hyper::client::conn::http1;
use hyper::{Method, Request, Response};
use hyper_util::rt::TokioIo;
use rustls_pki_types::ServerName;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::future::Future;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio::task::AbortHandle;
use tokio::time::Instant;
use tokio_rustls::TlsConnector;

/// Why a call failed.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// No connection was made: nothing was done there.
    #[error("cannot reach {peer}: {cause}")]
    NotReached { peer: String, cause: String },
    /// The answer did not come in time; the request may have been carried out.
    #[error("{peer} did not answer within {seconds} s")]
    Deadline {
        peer: String,
        /// The deadline, s.
        seconds: f64,
    },
    /// The connection broke before the answer; the request may have been carried out.
    #[error("the connection to {peer} broke: {cause}")]
    Broken { peer: String, cause: String },
    /// An answer that cannot be read; the request may have been carried out.
    #[error("{peer} gave an answer that cannot be read: {cause}")]
    Answer { peer: String, cause: String },
    /// An answer that is longer than any honest one; the request may have been carried out.
    #[error(
        "{peer} gave an answer of more than {max} bytes, which is not read: see what is wrong there"
    )]
    TooLong { peer: String, max: usize },
    /// The peer refused, and says why.
    #[error("{0}")]
    Refused(ApiError),
}

impl ClientError {
    /// Whether the peer may have carried the request out.
    pub fn may_be_done(&self) -> bool {
        !matches!(self, Self::NotReached { .. } | Self::Refused(_))
    }

    /// The code that a person or script sees.
    pub fn code(&self) -> ErrorCode {
        match self {
            Self::NotReached { .. } | Self::Broken { .. } => ErrorCode::HostUnreachable,
            Self::Deadline { .. } => ErrorCode::DeadlineMissed,
            Self::Answer { .. } | Self::TooLong { .. } => ErrorCode::Internal,
            Self::Refused(error) => error.code,
        }
    }
}

impl From<ClientError> for ApiError {
    fn from(error: ClientError) -> Self {
        match error {
            ClientError::Refused(error) => error,
            other => ApiError::new(other.code(), other.to_string()),
        }
    }
}

/// Gives a controller's last word, for the header of each of its commands.
pub type Stamps = Arc<dyn Fn() -> Stamp + Send + Sync>;

/// How often a command whose stamp was overtaken on its way by a later one of the same controller is said again.
const OVERTAKEN_MAX: usize = 5;

/// Where and as whom requests go.
#[derive(Clone)]
pub struct Client {
    way: Way,
    name: String,
    stamps: Option<Stamps>,
    answer_max: usize,
}

#[derive(Clone)]
enum Way {
    Unix(PathBuf),
    Tls(SocketAddr, Arc<rustls::ClientConfig>),
}

/// Ends a connection's driver task with its last user.
pub(crate) struct Driver(AbortHandle);

impl Drop for Driver {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Client {
    /// Over a Unix socket.
    pub fn unix(path: &Path) -> Self {
        Self {
            way: Way::Unix(path.to_owned()),
            name: path.display().to_string(),
            stamps: None,
            answer_max: ANSWER_LEN_MAX,
        }
    }

    /// Over TLS, as `identity`, to `peer` and nobody else.
    pub fn tls(address: SocketAddr, identity: &Identity, peer: Role) -> Result<Self, PkiError> {
        Self::tls_admitted(address, identity, peer, None)
    }

    /// As [`Client::tls`], and the peer's certificate must be admitted each time: a removed host does not stand in for
    /// the one that took its name.
    pub fn tls_admitted(
        address: SocketAddr,
        identity: &Identity,
        peer: Role,
        admission: Option<Arc<dyn Admission>>,
    ) -> Result<Self, PkiError> {
        let name = format!("{peer} at {address}");
        let config = tls::client_config(identity, peer, admission)?;
        Ok(Self {
            way: Way::Tls(address, config),
            name,
            stamps: None,
            answer_max: ANSWER_LEN_MAX,
        })
    }

    /// To a controller that is known by its CA's fingerprint only.
    pub fn joining(address: SocketAddr, fingerprint: Fingerprint) -> Result<Self, PkiError> {
        Ok(Self {
            way: Way::Tls(address, tls::joining_config(fingerprint)?),
            name: format!("the controller at {address}"),
            stamps: None,
            answer_max: ANSWER_LEN_MAX,
        })
    }

    /// The same, with a controller's last word in every command.
    pub fn with_stamps(mut self, stamps: Stamps) -> Self {
        self.stamps = Some(stamps);
        self
    }

    /// The same, for answers of at most so many bytes.
    pub fn with_answer_max(mut self, bytes: usize) -> Self {
        self.answer_max = bytes;
        self
    }

    /// Whom it talks to, for messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    pub async fn get<T: DeserializeOwned>(
        &self,
        path: &str,
        deadline: Duration,
    ) -> Result<T, ClientError> {
        self.call::<(), T>(Method::GET, path, None, deadline).await
    }

    pub async fn delete<T: DeserializeOwned>(
        &self,
        path: &str,
        deadline: Duration,
    ) -> Result<T, ClientError> {
        self.call::<(), T>(Method::DELETE, path, None, deadline)
            .await
    }

    pub async fn post<B: Serialize, T: DeserializeOwned>(
        &self,
        path: &str,
        body: &B,
        deadline: Duration,
    ) -> Result<T, ClientError> {
        self.call(Method::POST, path, Some(body), deadline).await
    }

    pub async fn put<B: Serialize, T: DeserializeOwned>(
        &self,
        path: &str,
        body: &B,
        deadline: Duration,
    ) -> Result<T, ClientError> {
        self.call(Method::PUT, path, Some(body), deadline).await
    }

    /// Opens a stream of server-sent events; `deadline` is for its beginning.
    pub async fn events(&self, path: &str, deadline: Duration) -> Result<EventStream, ClientError> {
        let (_, request) = self.stamped(Method::GET, path, Bytes::new())?;
        let (driver, response) = self.within(deadline, self.send(request)).await?;
        if response.status().is_success() {
            return Ok(EventStream::new(
                self.name.clone(),
                driver,
                response.into_body(),
            ));
        }
        let decoded = self.decode::<()>(response, deadline).await;
        Err(decoded.err().unwrap_or_else(|| self.answer("no events")))
    }

    async fn call<B: Serialize, T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Option<&B>,
        deadline: Duration,
    ) -> Result<T, ClientError> {
        // It may hold a migration's key or a token.
        let bytes = match body {
            Some(body) => Bytes::from_owner(Wiped::json(body).map_err(|error| invalid(&error))?),
            None => Bytes::new(),
        };
        let end = Instant::now() + deadline;
        let mut said = None;
        for _ in 0..OVERTAKEN_MAX {
            let (stamp, request) = self.stamped(method.clone(), path, bytes.clone())?;
            let sent = tokio::time::timeout_at(end, self.send(request)).await;
            let (_driver, response) = sent.map_err(|_| self.late(deadline))??;
            match self.decode(response, deadline).await {
                Err(error) if error.code() == ErrorCode::StaleController && stamp != said => {
                    said = stamp;
                }
                decoded => return decoded,
            }
        }
        Err(self.answer("other commands overtook this one again and again"))
    }

    async fn within<T>(
        &self,
        deadline: Duration,
        work: impl Future<Output = Result<T, ClientError>>,
    ) -> Result<T, ClientError> {
        match tokio::time::timeout(deadline, work).await {
            Ok(result) => result,
            Err(_) => Err(self.late(deadline)),
        }
    }

    fn late(&self, deadline: Duration) -> ClientError {
        ClientError::Deadline {
            peer: self.name.clone(),
            seconds: deadline.as_secs_f64(),
        }
    }

    /// A request, with the stamp that it carries if it is a controller's command.
    fn stamped(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
    ) -> Result<(Option<Stamp>, Request<Full<Bytes>>), ClientError> {
        let stamps = self.stamps.as_ref().filter(|_| method != Method::GET);
        let stamp = stamps.map(|stamps| stamps());
        let mut request = Request::builder()
            .method(method)
            .uri(path)
            .header("host", "godwit")
            .header("content-type", "application/json")
            .header(PROTOCOL_HEADER, PROTOCOL.header());
        if let Some(stamp) = stamp {
            request = request.header(STAMP_HEADER, stamp.to_string());
        }
        let request = request.body(Full::new(body));
        Ok((stamp, request.map_err(|error| invalid(&error))?))
    }

    async fn send(
        &self,
        request: Request<Full<Bytes>>,
    ) -> Result<(Driver, Response<Incoming>), ClientError> {
        let (driver, mut sender) = match &self.way {
            Way::Unix(path) => self.drive(UnixStream::connect(path).await).await?,
            Way::Tls(address, config) => self.drive(connect_tls(*address, config).await).await?,
        };
        let response = sender.send_request(request).await;
        Ok((driver, response.map_err(|error| self.broken(&error))?))
    }

    async fn drive<Stream: AsyncRead + AsyncWrite + Unpin + Send + 'static>(
        &self,
        stream: std::io::Result<Stream>,
    ) -> Result<(Driver, http1::SendRequest<Full<Bytes>>), ClientError> {
        let not_reached = |cause: String| ClientError::NotReached {
            peer: self.name.clone(),
            cause,
        };
        let stream = stream.map_err(|error| not_reached(self.why_not(&error)))?;
        let (sender, connection) = http1::handshake(TokioIo::new(stream))
            .await
            .map_err(|error| not_reached(error.to_string()))?;
        let task = tokio::spawn(async move {
            let _ = connection.await;
        });
        Ok((Driver(task.abort_handle()), sender))
    }

    async fn decode<T: DeserializeOwned>(
        &self,
        response: Response<Incoming>,
        deadline: Duration,
    ) -> Result<T, ClientError> {
        let status = response.status();
        let bytes = self
            .within(ANSWER_WAIT, self.read(response.into_body(), deadline))
            .await?;
        if status.is_success() {
            return serde_json::from_slice(&bytes).map_err(|error| self.answer(&error.to_string()));
        }
        Err(match serde_json::from_slice::<ApiError>(&bytes) {
            Ok(error) => ClientError::Refused(error.bounded()),
            Err(_) => self.answer(&format!("status {status} without an error of ours")),
        })
    }

    /// Reads an answer as long as more of it comes within `deadline`: a long list may take its time on a slow link.
    async fn read(&self, mut body: Incoming, deadline: Duration) -> Result<Vec<u8>, ClientError> {
        let too_long = || ClientError::TooLong {
            peer: self.name.clone(),
            max: self.answer_max,
        };
        if body.size_hint().lower() > self.answer_max as u64 {
            return Err(too_long());
        }
        let mut bytes = Vec::new();
        loop {
            let next = tokio::time::timeout(deadline, body.frame()).await;
            let Some(frame) = next.map_err(|_| self.late(deadline))? else {
                return Ok(bytes);
            };
            let frame = frame.map_err(|error| self.broken(&error))?;
            let Ok(piece) = frame.into_data() else {
                continue;
            };
            if bytes.len().saturating_add(piece.len()) > self.answer_max {
                return Err(too_long());
            }
            bytes.extend_from_slice(&piece);
        }
    }

    fn why_not(&self, error: &std::io::Error) -> String {
        let denied = error.kind() == std::io::ErrorKind::PermissionDenied;
        match self.way {
            Way::Unix(_) if denied => {
                "you may not: join the group godwit ('usermod -aG godwit USER', then log in again), or use sudo".into()
            }
            _ => cause(error),
        }
    }

    fn broken(&self, cause: &(dyn std::error::Error + 'static)) -> ClientError {
        ClientError::Broken {
            peer: self.name.clone(),
            cause: chain(cause),
        }
    }

    pub(crate) fn answer(&self, cause: &str) -> ClientError {
        ClientError::Answer {
            peer: self.name.clone(),
            cause: cause.to_owned(),
        }
    }
}

async fn connect_tls(
    address: SocketAddr,
    config: &Arc<rustls::ClientConfig>,
) -> std::io::Result<tokio_rustls::client::TlsStream<TcpStream>> {
    let connected = tokio::time::timeout(CONNECT_WAIT, async {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        let name = ServerName::IpAddress(address.ip().into());
        TlsConnector::from(config.clone())
            .connect(name, stream)
            .await
    });
    connected.await.unwrap_or_else(|_| {
        let why = format!("no connection within {} s", CONNECT_WAIT.as_secs());
        Err(std::io::Error::new(std::io::ErrorKind::TimedOut, why))
    })
}

fn invalid(error: &(dyn std::error::Error + 'static)) -> ClientError {
    ClientError::Refused(ApiError::new(
        ErrorCode::InvalidRequest,
        format!("the request is not valid: {error}"),
    ))
}

/// An error with its sources, joined.
pub(crate) fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    plain(&text)
}

/// As people read it: a library's words for a connection that ended early, and where it documents them, say nothing here.
fn plain(text: &str) -> String {
    let (text, _) = text.split_once(": https://").unwrap_or((text, ""));
    text.replace(
        "peer closed connection without sending TLS close_notify",
        "it ended before the answer was complete",
    )
}

/// Why no connection was made, as part of a sentence.
fn cause(error: &std::io::Error) -> String {
    use rustls::{CertificateError, Error};
    let tls = error.get_ref().and_then(|inner| inner.downcast_ref());
    match tls {
        Some(Error::InvalidCertificate(CertificateError::UnknownIssuer)) => {
            "its certificate is from another CA: the join token or certificate used here is another controller's, or somebody is in between".into()
        }
        _ => plain(&error.to_string()),
    }
}

/// What a client's method comes to.
pub(crate) type Reply<T> = Result<T, ClientError>;

/// How long the client waits, by kind of call.
#[derive(Debug, Clone, Copy)]
pub struct Deadlines {
    pub read: Duration,
    pub act: Duration,
    /// Starting a hypervisor, hashing files, checking a host.
    pub slow: Duration,
}

impl Default for Deadlines {
    fn default() -> Self {
        Self {
            read: Duration::from_secs(3),
            act: Duration::from_secs(15),
            slow: Duration::from_secs(60),
        }
    }
}

/// Puts a name into a path; names have no characters that need escaping.
pub(crate) fn fill(path: &str, name: impl std::fmt::Display) -> String {
    let (Some(open), Some(close)) = (path.find('{'), path.find('}')) else {
        return path.to_owned();
    };
    let (before, after) = (path.get(..open), path.get(close + 1..));
    format!(
        "{}{name}{}",
        before.unwrap_or_default(),
        after.unwrap_or_default()
    )
}

/// The methods of a client, one for each route: parameters, answer, verb, which of its clients, path with body, deadline.
macro_rules! calls {
    ($client:ident
        $($(#[$doc:meta])* $name:ident($($arg:ident: $ty:ty),*) -> $answer:ty
            = $verb:ident $by:ident ($path:expr $(, $body:expr)?) in $time:ident;)*
    ) => {
        impl $client {
            $($(#[$doc])*
            pub async fn $name(&self, $($arg: $ty),*) -> Reply<$answer> {
                self.$by.$verb(&$path, $($body,)? self.deadlines.$time).await
            })*
        }
    };
}
pub(crate) use calls;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_cut_short_is_told_in_one_sentence() {
        let ended = std::io::Error::new(
            std::io::ErrorKind::UnexpectedEof,
            "peer closed connection without sending TLS close_notify: https://docs.rs/rustls/latest/rustls/manual",
        );
        let broken = Client::unix(Path::new("/run/b")).broken(&ended);
        let wanted = "the connection to /run/b broke: it ended before the answer was complete";
        assert_eq!(broken.to_string(), wanted);
        assert_eq!(cause(&ended), "it ended before the answer was complete");
    }

    #[test]
    fn who_may_not_open_the_socket_is_told_how_to() {
        let denied = std::io::Error::from(std::io::ErrorKind::PermissionDenied);
        let told = Client::unix(Path::new("/run/b")).why_not(&denied);
        assert!(
            told.contains("group godwit") && told.contains("sudo"),
            "{told}"
        );
    }
}
