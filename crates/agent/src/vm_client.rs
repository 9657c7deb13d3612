//! Talking to a VM process over its Unix socket: one JSON line out, one JSON line in.
//!
//! A connection is owned by whoever opened it and used for one request at a time. Refuses: answers longer than
//! [`MESSAGE_LEN_MAX`] and waits without an end.

use godwit_rpc::wiped::Wiped;
use godwit_types::host_api::{MESSAGE_LEN_MAX, VmAnswer, VmRequest};
use godwit_types::{ApiError, ErrorCode};
use serde::Serialize;
use std::path::Path;
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;

/// Why a VM process gave no answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VmClientError {
    /// Nothing listens on its socket.
    #[error("the VM process does not listen: {0}")]
    Connect(std::io::Error),
    /// The connection broke: it died or ended.
    #[error("the VM process ended before it answered")]
    Ended,
    /// It did not answer in time.
    #[error("the VM process did not answer within {0:?}")]
    Silent(Duration),
    /// What it said is no answer.
    #[error("the VM process said what is no answer: {0}")]
    Nonsense(String),
}

impl VmClientError {
    /// The same as people and scripts see it.
    pub fn api(&self, vm: &impl std::fmt::Display) -> ApiError {
        let message =
            format!("VM '{vm}': {self}; its agent starts another one within seconds, try again");
        ApiError::new(ErrorCode::Hypervisor, message)
    }
}

/// A connection to a VM process.
pub struct VmConnection {
    stream: BufReader<UnixStream>,
    pid: Option<i32>,
}

impl VmConnection {
    /// Connects to the socket at `path`.
    pub async fn open(path: &Path, patience: Duration) -> Result<Self, VmClientError> {
        let connect = tokio::time::timeout(patience, UnixStream::connect(path)).await;
        let stream = connect
            .map_err(|_| VmClientError::Silent(patience))?
            .map_err(VmClientError::Connect)?;
        let pid = stream.peer_cred().ok().and_then(|peer| peer.pid());
        Ok(Self {
            stream: BufReader::new(stream),
            pid,
        })
    }

    /// Process id of the VM process, as the kernel knows it.
    pub fn pid(&self) -> Option<i32> {
        self.pid
    }

    /// Sends one request and waits for its answer.
    pub async fn call(
        &mut self,
        request: &VmRequest,
        patience: Duration,
    ) -> Result<VmAnswer, VmClientError> {
        let line = to_line(request)?;
        tokio::time::timeout(patience, self.exchange(line.as_ref()))
            .await
            .map_err(|_| VmClientError::Silent(patience))?
    }

    async fn exchange(&mut self, line: &[u8]) -> Result<VmAnswer, VmClientError> {
        let sent = self.stream.get_mut().write_all(line).await;
        sent.map_err(|_| VmClientError::Ended)?;
        let mut answer = Vec::new();
        let limit = MESSAGE_LEN_MAX as u64 + 1;
        let read = (&mut self.stream)
            .take(limit)
            .read_until(b'\n', &mut answer)
            .await;
        read.map_err(|_| VmClientError::Ended)?;
        if answer.pop() != Some(b'\n') {
            let too_long = answer.len() >= MESSAGE_LEN_MAX;
            return Err(if too_long {
                VmClientError::Nonsense(format!("more than {MESSAGE_LEN_MAX} bytes"))
            } else {
                VmClientError::Ended
            });
        }
        serde_json::from_slice(&answer).map_err(|error| VmClientError::Nonsense(error.to_string()))
    }
}

/// It may hold a migration's key.
fn to_line(request: &impl Serialize) -> Result<Wiped, VmClientError> {
    let mut line =
        Wiped::json(request).map_err(|error| VmClientError::Nonsense(error.to_string()))?;
    line.push(b"\n");
    Ok(line)
}

/// Opens a connection, asks one thing, closes it; an `Error` answer becomes the error.
pub async fn ask(
    path: &Path,
    vm: &impl std::fmt::Display,
    request: &VmRequest,
    patience: Duration,
) -> Result<VmAnswer, ApiError> {
    let answer = async {
        VmConnection::open(path, patience)
            .await?
            .call(request, patience)
            .await
    };
    match answer.await {
        Ok(VmAnswer::Error(error)) => Err(error),
        Ok(answer) => Ok(answer),
        Err(error) => Err(error.api(vm)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::UnixListener;

    async fn answered_with(text: Vec<u8>) -> Result<VmAnswer, VmClientError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vm.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let server = tokio::spawn(async move {
            let (stream, _) = listener.accept().await.unwrap();
            let mut stream = BufReader::new(stream);
            let mut line = String::new();
            stream.read_line(&mut line).await.unwrap();
            assert_eq!(line.trim(), r#"{"request":"status"}"#);
            // The peer may hang up before all of an overlong answer is written.
            let _ = stream.get_mut().write_all(&text).await;
        });
        let mut connection = VmConnection::open(&path, Duration::from_secs(5))
            .await
            .unwrap();
        let result = connection
            .call(&VmRequest::Status, Duration::from_secs(5))
            .await;
        drop(connection);
        server.await.unwrap();
        result
    }

    #[tokio::test]
    async fn an_answer_is_read() {
        let answer = answered_with(b"{\"answer\":\"done\",\"body\":\"yes\"}\n".to_vec()).await;
        assert!(matches!(answer, Ok(VmAnswer::Done(text)) if text == "yes"));
    }

    #[tokio::test]
    async fn a_process_that_ends_is_told_from_nonsense() {
        assert!(matches!(
            answered_with(b"{\"ans".to_vec()).await,
            Err(VmClientError::Ended)
        ));
        assert!(matches!(
            answered_with(b"[]\n".to_vec()).await,
            Err(VmClientError::Nonsense(_))
        ));
        let long = vec![b'x'; MESSAGE_LEN_MAX + 10];
        assert!(matches!(
            answered_with(long).await,
            Err(VmClientError::Nonsense(_))
        ));
    }

    #[tokio::test]
    async fn nothing_listening_is_an_error() {
        let opened =
            VmConnection::open(Path::new("/nonexistent/vm.sock"), Duration::from_secs(1)).await;
        assert!(matches!(opened, Err(VmClientError::Connect(_))));
    }
}
