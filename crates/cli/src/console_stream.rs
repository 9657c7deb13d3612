//! A guest's console as a stream that outlives connections, agents, VM processes and moves.
//!
//! Owns how far it was read. A stream that ends is opened again from there on, where the VM is then. Refuses: to go on with a VM
//! that is off, and to wait for ever for one that is out of reach.

use crate::connect::Reader;
use godwit_rpc::ClientError;
use godwit_rpc::sse::EventStream;
use godwit_types::console::{ConsolePiece, ConsolePlace, ConsoleQuery, ConsoleTyped};
use godwit_types::{ApiError, ErrorCode, HostName, VmName};
use std::time::Duration;
use tokio::sync::mpsc::Sender;
use tokio::time::Instant;

/// Longest silence of a stream, which is kept alive while the guest writes nothing.
const SILENCE: Duration = Duration::from_secs(60);
/// Pause before it is opened again.
const REOPEN_PAUSE: Duration = Duration::from_millis(300);
/// For so long that is not worth a word: a move takes less.
const WORTH_A_WORD: Duration = Duration::from_secs(2);
/// A VM that is out of reach for so long is given up.
const GIVEN_UP_AFTER: Duration = Duration::from_secs(120);

/// Whose console, and by whom it is reached.
pub struct Followed {
    pub reader: Reader,
    pub vm: VmName,
    /// The copy on this host, wherever else the VM may be.
    pub host: Option<HostName>,
}

/// What whoever sits there has to see.
#[derive(Debug)]
pub enum News {
    Piece(ConsolePiece),
    /// It is out of reach for a while already, for this reason.
    Lost(ApiError),
    /// Nothing follows, for this reason.
    End(ApiError),
}

impl Followed {
    /// Opens the stream from a place on.
    pub async fn open(&self, place: Option<ConsolePlace>) -> Result<EventStream, ClientError> {
        match &self.reader {
            Reader::Controller(client) => {
                let host = self.host.clone();
                let query = ConsoleQuery { place, host };
                client.console_events(&self.vm, &query).await
            }
            Reader::Agent(client) => {
                let query = ConsoleQuery { place, host: None };
                client.console_events(&self.vm, &query).await
            }
        }
    }

    /// Types to the guest.
    pub async fn type_in(&self, bytes: Vec<u8>) -> Result<(), ClientError> {
        let (vm, typed) = (&self.vm, ConsoleTyped { bytes });
        let done = match (&self.reader, &self.host) {
            (Reader::Controller(client), Some(host)) => {
                client.console_type_at(vm, host, &typed).await
            }
            (Reader::Controller(client), None) => client.console_type(vm, &typed).await,
            (Reader::Agent(client), _) => client.console_type(vm, &typed).await,
        };
        done.map(drop)
    }

    /// Why there is nothing to go on with, if so.
    async fn is_over(&self) -> Option<ApiError> {
        let vm = &self.vm;
        let (state, off) = match &self.reader {
            Reader::Controller(client) => {
                let state = client.vm(vm).await.map(|view| view.state);
                (state, format!("VM {vm} is off"))
            }
            Reader::Agent(client) => {
                let state = client.vm(vm).await.map(|vm| vm.state);
                (
                    state,
                    format!("VM {vm} is not on this host any more, or off"),
                )
            }
        };
        match state {
            Ok(state) if state.is_off() => Some(ApiError::new(ErrorCode::WrongState, off)),
            Err(ClientError::Refused(error)) if error.code == ErrorCode::UnknownVm => Some(error),
            _ => None,
        }
    }

    /// Tells of the stream until it is over or nobody listens.
    pub async fn run(&self, mut events: EventStream, news: Sender<News>) {
        let mut place = None;
        loop {
            let before = place.clone();
            if !self.is_lost(events, &mut place, &news).await {
                return;
            }
            if place == before {
                // It was refused, and may be again and again.
                tokio::time::sleep(REOPEN_PAUSE).await;
            }
            events = match self.again(place.as_ref(), &news).await {
                Some(events) => events,
                None => return,
            };
        }
    }

    /// Tells of a stream to its end; false where nobody listens.
    async fn is_lost(
        &self,
        mut events: EventStream,
        place: &mut Option<ConsolePlace>,
        news: &Sender<News>,
    ) -> bool {
        while let Ok(Some(event)) = events.next_while_heard(SILENCE).await {
            if event.name == "error" {
                break;
            }
            // What a newer peer says besides is no text.
            let Ok(piece) = serde_json::from_str::<ConsolePiece>(&event.data) else {
                continue;
            };
            *place = Some(piece.place());
            if news.send(News::Piece(piece)).await.is_err() {
                return false;
            }
        }
        true
    }

    async fn again(
        &self,
        place: Option<&ConsolePlace>,
        news: &Sender<News>,
    ) -> Option<EventStream> {
        let lost = Instant::now();
        let mut is_told = false;
        loop {
            if let Some(over) = self.is_over().await {
                let _ = news.send(News::End(over)).await;
                return None;
            }
            let why: ApiError = match self.open(place.cloned()).await {
                Ok(events) => return Some(events),
                Err(error) => error.into(),
            };
            let is_gone = self.host.is_some() && why.code == ErrorCode::WrongState;
            if is_gone || lost.elapsed() > GIVEN_UP_AFTER {
                let _ = news.send(News::End(why)).await;
                return None;
            }
            if lost.elapsed() > WORTH_A_WORD && !is_told {
                news.send(News::Lost(why)).await.ok()?;
                is_told = true;
            }
            tokio::time::sleep(REOPEN_PAUSE).await;
        }
    }
}
