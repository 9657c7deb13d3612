//! The ways to the destination: which of our addresses reaches which of its, and which of them work now.
//!
//! Owns nothing. All ways are tried at once, so that a dead one costs nothing when another works. Refuses: a way between
//! two families of addresses, and more than [`ROUTES_MAX`] of them. The controller gives only addresses that the
//! destination host is known by; a stranger that has one of them learns the migration's name and fails its proof.

use super::ending::Ending;
use super::maker::start_thread;
use godwit_transport::{ConnectOptions, Dialed, TransportError, Tuning, dial, interface_of};
use std::net::{IpAddr, SocketAddr};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// Longest time to make one connection: short, since a healed link is found by trying again, not by waiting for the
/// kernel's ever longer pauses.
pub(super) const DIAL_WAIT: Duration = Duration::from_secs(2);
/// Once one way works the others get this long, and a few round trips.
const OTHERS_WAIT: Duration = Duration::from_millis(50);
/// Most ways that are tried.
const ROUTES_MAX: usize = 32;
/// What an interface that does not tell its speed is taken for, in bytes per second.
const USUAL_BYTES_PER_S: u64 = 1_250_000_000;
/// Among how many channels of one way its bandwidth is shared: as many as carry most of it at a time.
const SHARING: u32 = 4;

/// How the destination is reached.
#[derive(Debug, Clone)]
pub struct Route {
    pub from: Option<IpAddr>,
    pub to: SocketAddr,
    /// The interface that has our address, where there are several.
    interface: Option<u32>,
    bytes_per_s: u64,
}

impl Route {
    fn new(from: Option<IpAddr>, to: SocketAddr) -> Self {
        let interface = from.and_then(interface_of);
        Self {
            from,
            to,
            bytes_per_s: interface
                .as_ref()
                .and_then(|(_, name)| speed_of(name))
                .unwrap_or(USUAL_BYTES_PER_S),
            interface: interface.map(|(index, _)| index),
        }
    }

    /// Makes a connection that keeps to this way. Where the interface alone does not lead there, the routing table
    /// decides.
    pub fn dial(&self, deadline: Instant) -> Result<Dialed, TransportError> {
        let options = ConnectOptions {
            bind: self.from,
            interface: self.interface,
            tuning: Tuning {
                bandwidth_bytes_per_s: self.bytes_per_s,
                channels: SHARING,
                ..Tuning::default()
            },
        };
        let half = deadline.saturating_duration_since(Instant::now()) / 2;
        let first_by = match self.interface {
            Some(_) => deadline - half,
            None => deadline,
        };
        let first = dial(self.to, &options, first_by);
        if first.is_ok() || self.interface.is_none() {
            return first;
        }
        let anywhere = ConnectOptions {
            interface: None,
            ..options
        };
        dial(self.to, &anywhere, deadline)
    }
}

/// What the interface's card can carry, in bytes per second.
fn speed_of(interface: &str) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/sys/class/net/{interface}/speed")).ok()?;
    let mbit_per_s: u64 = text.trim().parse().ok()?;
    (mbit_per_s > 0).then(|| mbit_per_s.saturating_mul(125_000))
}

/// Pairs our addresses with the destination's of the same family, so that each of either side has its part.
pub fn routes(ours: &[IpAddr], theirs: &[SocketAddr]) -> Vec<Route> {
    if ours.is_empty() {
        let any = theirs.iter().map(|to| Route::new(None, *to));
        return any.take(ROUTES_MAX).collect();
    }
    let mut routes = Vec::new();
    for v4 in [true, false] {
        let ours: Vec<_> = ours.iter().filter(|from| from.is_ipv4() == v4).collect();
        let theirs: Vec<_> = theirs.iter().filter(|to| to.is_ipv4() == v4).collect();
        if ours.is_empty() || theirs.is_empty() {
            continue;
        }
        let pairs = ours.iter().cycle().zip(theirs.iter().cycle());
        for (from, to) in pairs.take(ours.len().max(theirs.len())) {
            routes.push(Route::new(Some(**from), **to));
        }
    }
    routes.truncate(ROUTES_MAX);
    keep_to_interfaces_only_where_there_are_several(&mut routes);
    routes
}

/// One interface needs no help from us, and its host's routing may be cleverer than ours.
fn keep_to_interfaces_only_where_there_are_several(routes: &mut [Route]) {
    let first = routes.first().and_then(|route| route.interface);
    if routes.iter().all(|route| route.interface == first) {
        routes.iter_mut().for_each(|route| route.interface = None);
    }
}

/// A way that works, and the connection that showed it.
#[derive(Debug)]
pub struct Reached {
    pub route: Route,
    pub dialed: Dialed,
}

/// Tries all ways at once and gives those that work, of one family: of the one that has more of them.
pub fn reach(routes: &[Route], ending: &Ending) -> Result<Vec<Reached>, TransportError> {
    let deadline = Instant::now() + DIAL_WAIT;
    let (results, received) = channel();
    for (index, route) in routes.iter().cloned().enumerate() {
        let results = results.clone();
        let work = move || {
            let dialed = route.dial(deadline);
            // Nobody waits for the slow ones once the others are known.
            let _ = results.send((index, route, dialed));
        };
        start_thread("dial", "start a thread to connect with", work)?;
    }
    drop(results);
    let mut failure = nothing_answered(routes);
    let (mut reached, mut until) = (Vec::new(), deadline);
    loop {
        match ending.wait(&received, until)? {
            Ok((index, route, Ok(dialed))) => {
                if reached.is_empty() {
                    until = until.min(Instant::now() + OTHERS_WAIT + 3 * dialed.rtt());
                }
                reached.push((index, Reached { route, dialed }));
            }
            Ok((_, _, Err(error))) => failure = error,
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => break,
        }
    }
    if reached.is_empty() {
        return Err(failure);
    }
    reached.sort_by_key(|(index, _)| *index);
    let v4 = |way: &(usize, Reached)| way.1.route.to.is_ipv4();
    let keep_v4 = 2 * reached.iter().filter(|way| v4(way)).count() >= reached.len();
    reached.retain(|way| v4(way) == keep_v4);
    Ok(reached.into_iter().map(|(_, way)| way).collect())
}

/// Silence is a link that is lost for now; to have no way at all is not.
fn nothing_answered(routes: &[Route]) -> TransportError {
    match routes.first() {
        Some(route) => TransportError::Connect {
            peer: route.to,
            source: std::io::ErrorKind::TimedOut.into(),
        },
        None => TransportError::System {
            doing: "reach the destination",
            source: std::io::Error::other(
                "the two hosts have no migration addresses of the same family",
            ),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_transport::Class;
    use rustix::net;
    use std::os::fd::OwnedFd;

    #[test]
    fn routes_keep_to_one_family() {
        let ours = ["10.0.0.1".parse().unwrap(), "fd00::1".parse().unwrap()];
        let theirs = [
            "[fd00::2]:1".parse().unwrap(),
            "10.0.0.2:1".parse().unwrap(),
        ];
        let routes = routes(&ours, &theirs);
        assert_eq!(routes.len(), 2);
        assert!(routes.iter().all(|route| {
            route
                .from
                .is_some_and(|from| from.is_ipv4() == route.to.is_ipv4())
        }));
    }

    #[test]
    fn no_common_family_is_no_route() {
        let ours = ["10.0.0.1".parse().unwrap()];
        assert!(routes(&ours, &["[fd00::2]:1".parse().unwrap()]).is_empty());
    }

    #[test]
    fn every_address_of_either_side_has_its_part() {
        let four: Vec<IpAddr> = (1..=4).map(|last| [10, 0, 0, last].into()).collect();
        let one = ["10.0.0.9:1".parse().unwrap()];
        let ways = routes(&four, &one);
        assert_eq!(ways.len(), 4);
        assert!(four.iter().all(|a| ways.iter().any(|w| w.from == Some(*a))));
        let theirs: Vec<SocketAddr> = (5..=8).map(|n| ([10, 0, 0, n], 1).into()).collect();
        let ways = routes(&four, &theirs);
        assert!(theirs.iter().all(|a| ways.iter().any(|w| w.to == *a)));
        assert_eq!(routes(&four[..1], &theirs).len(), 4);
    }

    #[test]
    fn silence_is_a_lost_link_and_no_way_at_all_is_not() {
        let silent = routes(&[], &["192.0.2.1:9".parse().unwrap()]);
        assert_eq!(nothing_answered(&silent).class(), Class::Lost);
        assert_eq!(nothing_answered(&[]).class(), Class::Local);
    }

    /// An address that refuses as long as its socket lives: it is bound and does not listen.
    fn nobody_listens() -> (OwnedFd, SocketAddr) {
        let socket = net::socket(net::AddressFamily::INET, net::SocketType::STREAM, None).unwrap();
        net::bind(&socket, &SocketAddr::from(([127, 0, 0, 2], 0))).unwrap();
        let address = net::getsockname(&socket).unwrap();
        (socket, SocketAddr::try_from(address).unwrap())
    }

    #[test]
    fn a_way_that_does_not_work_costs_nothing_where_another_does() {
        let open = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let (_closed, dead) = nobody_listens();
        let ways = routes(&[], &[dead, open.local_addr().unwrap()]);
        let ending = Ending::default();
        let reached = reach(&ways, &ending).unwrap();
        assert_eq!(reached.len(), 1);
        assert_eq!(reached[0].route.to, open.local_addr().unwrap());
        assert!(reach(&ways[..1], &ending).is_err());
        ending.raise(None);
        let cancelled = reach(&ways, &ending).map(|_| ()).unwrap_err();
        assert_eq!(cancelled.class(), Class::Cancelled);
    }

    #[test]
    fn no_more_ways_are_tried_than_there_may_be() {
        let many: Vec<SocketAddr> = (1..=200).map(|n| ([10, 0, 0, n], 1).into()).collect();
        assert_eq!(routes(&[], &many).len(), ROUTES_MAX);
        let ours = ["10.0.1.1".parse().unwrap()];
        assert_eq!(routes(&ours, &many).len(), ROUTES_MAX);
    }
}
