//! The hosts that may take VMs of a host that is being emptied.
//!
//! Owns nothing. Refuses: the host itself, one that is being emptied, too, or closed, and one that was not asked for.

use super::patience::Away;
use crate::app::{App, now};
use crate::placement::place;
use godwit_types::drain::DrainView;
use godwit_types::host::HostInfo;
use godwit_types::{ApiError, ErrorCode, HostName};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

pub(super) type Taker = HostInfo;

/// Whether a host may take VMs of this drain, should it answer.
fn is_taker(app: &App, view: &DrainView, host: &HostName) -> bool {
    let asked = &view.request.to;
    *host != view.host
        && !app.drains.is_draining(host)
        && (asked.is_empty() || asked.contains(host))
}

/// Hosts that may take VMs. One that is closed is to be off soon.
pub(super) fn takers(app: &App, view: &DrainView) -> Vec<Taker> {
    let state = app.state();
    let hosts = state.hosts.iter();
    let hosts = hosts.filter(|(name, entry)| entry.is_connected() && is_taker(app, view, name));
    let infos = hosts.filter_map(|(_, entry)| entry.info.clone());
    infos.filter(|info| !info.closing).collect()
}

/// Why nobody takes a VM; empty where somebody might.
pub(super) fn no_takers(app: &App, view: &DrainView, takers: &[Taker]) -> Vec<ApiError> {
    if !takers.is_empty() {
        return Vec::new();
    }
    let state = app.state();
    let hosts = state.hosts.iter();
    let hosts = hosts.filter(|(name, entry)| entry.is_connected() && is_taker(app, view, name));
    let closed = hosts.filter_map(|(_, entry)| place::closed(entry.info.as_ref()?));
    let mut reasons: Vec<ApiError> = closed.collect();
    if reasons.is_empty() {
        reasons.push(ApiError::new(
            ErrorCode::HostUnreachable,
            "no other host answers and takes VMs: see 'godwit host list'",
        ));
    }
    reasons
}

/// Hosts that might take VMs but do not answer, and for how long; one that was not heard yet since `began`. One that is
/// closed goes down and comes back: from now on.
pub(super) fn away(app: &App, view: &DrainView, began: Instant) -> BTreeMap<Away, Duration> {
    let state = app.state();
    let hosts = state.hosts.iter();
    let hosts = hosts.filter(|(name, _)| is_taker(app, view, name));
    hosts
        .filter_map(|(name, entry)| {
            let seen = u64::try_from(entry.last_seen_unix_s).unwrap_or(0);
            let closes = entry.is_connected();
            let away = match state.book.was_heard(name) {
                _ if closes => {
                    place::closed(entry.info.as_ref()?)?;
                    Duration::ZERO
                }
                true => Duration::from_secs(now().saturating_sub(seen)),
                false => began.elapsed(),
            };
            let host = name.clone();
            Some((Away { host, closes }, away))
        })
        .collect()
}
