//! The rest between two looks of what looks again and again until the agent ends.
//!
//! Owns nothing. Refuses: to rest on once the agent ends, or once nobody is left who could say that it does.

use std::time::Duration;
use tokio::sync::watch;

/// Rests for so long; says sooner that the agent ends.
pub(crate) async fn stops_within(stop: &mut watch::Receiver<bool>, pause: Duration) -> bool {
    let stopped = stop.wait_for(|stop| *stop);
    tokio::time::timeout(pause, stopped).await.is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const FOR_EVER: Duration = Duration::from_secs(3600);

    #[tokio::test]
    async fn a_rest_ends_with_the_agent_and_with_whoever_could_say_so() {
        let (sender, mut stop) = watch::channel(false);
        assert!(!stops_within(&mut stop, Duration::ZERO).await);
        let resting = tokio::spawn(async move { stops_within(&mut stop, FOR_EVER).await });
        sender.send_replace(true);
        assert!(resting.await.unwrap());
        let mut stop = sender.subscribe();
        assert!(
            stops_within(&mut stop, Duration::ZERO).await,
            "it was told before"
        );
        sender.send_replace(false);
        drop(sender);
        assert!(stops_within(&mut stop, FOR_EVER).await);
    }
}
