//! Carries what a VM process says to the other host of a migration, and brings the replies back.
//!
//! Owns nothing but its tasks, one per message. Most messages are said once: a VM process asks again by itself. The last
//! word of a migration it says once, and a host that does not hear it waits for its link in vain: that is said again until
//! it is heard. Refuses: to go on with that for longer than any host waits for a link, and to tell the log of each message
//! that is not heard: it is told when a host stops hearing, when the reason changes, and when it
//! hears again.

use crate::supervisor::{Supervised, lock};
use godwit_ownership::PeerMessage;
use godwit_types::host_api::{OutboxMessage, VmRequest};
use godwit_types::migration::GIVEN_UP_WITHIN;
use godwit_types::{ApiError, HostName, VmName};
use serde::Deserialize;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Longest time to carry one message to the other host and to hand back its replies.
const CARRY_WAIT: Duration = Duration::from_secs(5);
/// Pause before what was not heard, or not understood, is said again.
pub(crate) const AGAIN_EACH: Duration = Duration::from_secs(1);

/// Carries a message to another host's agent and brings its replies.
pub type Carrier = Arc<
    dyn Fn(
            VmName,
            OutboxMessage,
        )
            -> Pin<Box<dyn Future<Output = Result<Vec<serde_json::Value>, ApiError>> + Send>>
        + Send
        + Sync,
>;

/// Carries each message in a task of its own.
pub(crate) fn carry_all(vm: &Arc<Supervised>, messages: Vec<OutboxMessage>, carrier: &Carrier) {
    for message in messages {
        tokio::spawn(carry(Arc::clone(vm), message, Arc::clone(carrier)));
    }
}

async fn carry(vm: Arc<Supervised>, message: OutboxMessage, carrier: Carrier) {
    let (name, peer) = (&vm.config().vm, message.peer.host.clone());
    let Some(replies) = delivered(&vm, &message, &carrier).await else {
        return;
    };
    for message in replies {
        let request = VmRequest::Peer {
            from: peer.clone(),
            message,
        };
        if let Err(error) = vm.ask(&request, CARRY_WAIT).await {
            tracing::warn!(vm = %name, %error, "a reply could not be handed over");
        }
    }
}

/// The other host's replies; none where it was not reached.
async fn delivered(
    supervised: &Supervised,
    message: &OutboxMessage,
    carrier: &Carrier,
) -> Option<Vec<serde_json::Value>> {
    let (vm, peer) = (&supervised.config().vm, &message.peer.host);
    let is_last = is_last_word(&message.message);
    let began = Instant::now();
    loop {
        let sent = carrier(vm.clone(), message.clone());
        let error = match tokio::time::timeout(CARRY_WAIT, sent).await {
            Ok(Ok(replies)) => {
                if hears(&supervised.deaf_peer, peer) {
                    tracing::info!(%vm, %peer, "the other host hears again");
                }
                return Some(replies);
            }
            Ok(Err(error)) => error.to_string(),
            Err(_) => "it does not answer".to_owned(),
        };
        if is_deaf(&supervised.deaf_peer, peer, &error) {
            tracing::warn!(%vm, %peer, %error, "a message to the other host was not delivered");
        }
        if !is_last {
            return None;
        }
        if began.elapsed() >= GIVEN_UP_WITHIN {
            tracing::warn!(%vm, %peer, %error, "the other host was not told that the migration is over: it gives up by itself");
            return None;
        }
        tokio::time::sleep(AGAIN_EACH).await;
    }
}

/// Notes who does not hear, and why. Returns whether that is news.
fn is_deaf(noted: &Mutex<Option<(HostName, String)>>, peer: &HostName, why: &str) -> bool {
    let now = Some((peer.clone(), why.to_owned()));
    std::mem::replace(&mut *lock(noted), now.clone()) != now
}

/// Notes who hears. Returns whether it did not before.
fn hears(noted: &Mutex<Option<(HostName, String)>>, peer: &HostName) -> bool {
    lock(noted).take_if(|(deaf, _)| deaf == peer).is_some()
}

/// Whether a message ends its migration, and is said once: a VM process asks again by itself for everything else, and
/// one that does not hear this waits for its link in vain.
fn is_last_word(message: &serde_json::Value) -> bool {
    let said = PeerMessage::deserialize(message);
    matches!(
        said,
        Ok(PeerMessage::Failed { .. } | PeerMessage::Abort { .. })
    )
}
