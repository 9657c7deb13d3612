//! Listening on an address that this machine may not have yet: a daemon that is started at boot may come before DHCP, and
//! before IPv6 is sure that nobody else has the address.
//!
//! Owns nothing. Refuses: an address that is in use, at the first try.

use std::io::{self, ErrorKind};
use std::net::{SocketAddr, UdpSocket};
use std::time::Duration;
use tokio::net::TcpListener;

/// Pause between two tries to bind.
const TRY_EACH: Duration = Duration::from_millis(250);

/// An address to listen on, which this machine has or will have.
#[derive(Debug)]
pub enum Place {
    /// The socket is bound.
    Here(TcpListener),
    /// This machine does not have the address yet.
    Awaited(SocketAddr),
}

impl Place {
    /// Listens on an address, or finds that this machine does not have it yet.
    pub async fn open(address: SocketAddr) -> io::Result<Self> {
        match TcpListener::bind(address).await {
            Ok(listener) => Ok(Self::Here(listener)),
            Err(error) if error.kind() == ErrorKind::AddrNotAvailable => {
                tracing::warn!(
                    "this machine does not have the address of {address} yet: it is listened on as soon as it does"
                );
                Ok(Self::Awaited(address))
            }
            Err(error) => Err(error),
        }
    }

    /// Where it listens, or is to listen.
    pub fn address(&self) -> io::Result<SocketAddr> {
        match self {
            Self::Here(listener) => listener.local_addr(),
            Self::Awaited(address) => Ok(*address),
        }
    }

    /// Waits until it listens.
    pub(crate) async fn listener(self) -> TcpListener {
        let address = match self {
            Self::Here(listener) => return listener,
            Self::Awaited(address) => address,
        };
        let mut told = ErrorKind::AddrNotAvailable;
        loop {
            match TcpListener::bind(address).await {
                Ok(listener) => {
                    tracing::info!("{address} is listened on now");
                    return listener;
                }
                Err(error) if error.kind() == told => {}
                Err(error) => {
                    tracing::error!(%error, "cannot listen on {address} yet");
                    told = error.kind();
                }
            }
            tokio::time::sleep(TRY_EACH).await;
        }
    }
}

/// Whether this machine has the address.
pub fn is_here(address: SocketAddr) -> bool {
    let tried = UdpSocket::bind(SocketAddr::new(address.ip(), 0));
    !matches!(tried, Err(error) if error.kind() == ErrorKind::AddrNotAvailable)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Nobody's: it is for documentation.
    const NOT_HERE: &str = "192.0.2.1:8472";

    #[tokio::test]
    async fn an_address_that_is_not_here_yet_is_awaited_and_one_in_use_is_refused() {
        let nowhere: SocketAddr = NOT_HERE.parse().unwrap();
        let place = Place::open(nowhere).await.unwrap();
        assert!(matches!(place, Place::Awaited(address) if address == nowhere));
        assert_eq!(place.address().unwrap(), nowhere);
        assert!(!is_here(nowhere));
        let here = Place::open("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let taken = here.address().unwrap();
        assert!(is_here(taken), "another socket of it is in nobody's way");
        let error = Place::open(taken).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::AddrInUse);
    }

    #[tokio::test]
    async fn one_that_was_awaited_is_listened_on_once_it_can_be() {
        let holder = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = holder.local_addr().unwrap();
        let waits = Place::Awaited(address).listener();
        tokio::pin!(waits);
        let first = std::future::poll_fn(|cx| std::task::Poll::Ready(waits.as_mut().poll(cx)));
        assert!(first.await.is_pending(), "it is in use");
        drop(holder);
        assert_eq!(waits.await.local_addr().unwrap(), address);
    }
}
