//! The load client against a real Redis on a lab host: right answers count as right, wrong ones are found.

use std::io::Write;
use std::net::{IpAddr, SocketAddr};
use std::process::{Child, Stdio};
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use godwit_testkit::lab::{Lab, LabConfig};
use godwit_testkit::load::client::{connect, key_name};
use godwit_testkit::load::pace::Progress;
use godwit_testkit::load::resp::{Reply, ReplyReader, write_command};
use godwit_testkit::load::run::{LoadConfig, run};
use godwit_testkit::load::series::Workload;
use godwit_testkit::load::values;

const VALUE_BYTES: usize = 4000;
const KEYS: u64 = 262; // what 1 MiB holds

struct Server {
    lab: Lab,
    redis: Child,
    address: SocketAddr,
}

fn server() -> Server {
    let lab = Lab::new(LabConfig {
        hosts: 1,
        ..LabConfig::default()
    })
    .expect("a lab");
    let host = lab.host(0).expect("a");
    let redis = host
        .command("redis-server")
        .args("--save --appendonly no --protected-mode no --bind * -::* --dir /tmp".split(' '))
        .stdout(Stdio::null())
        .spawn()
        .expect("redis-server starts");
    let address = SocketAddr::new(IpAddr::from([127, 0, 0, 1]), 6379);
    let deadline = Instant::now() + Duration::from_secs(10);
    while host
        .in_network(|| connect(address))
        .expect("its network")
        .is_err()
    {
        assert!(Instant::now() < deadline, "Redis does not answer");
        std::thread::sleep(Duration::from_millis(5)); // a listening port cannot be waited on, only tried
    }
    Server {
        lab,
        redis,
        address,
    }
}

impl Server {
    /// A run of two seconds at 200 operations a second; `meddle` is called with each second that has passed.
    fn load(&self, mut meddle: impl FnMut(u32) + Send) -> Workload {
        let config = LoadConfig {
            address: self.address,
            data_mib: 1,
            value_bytes: VALUE_BYTES,
            connections: 4,
            probe: Duration::from_millis(300),
            rate_ops_per_s: Some(200.0),
            fraction: 0.5,
            duration: Duration::from_secs(2),
            write_share: 0.5,
            verify_all: true,
        };
        let progress = |progress: Progress| {
            if let Progress::Second(second) = progress {
                meddle(second.t);
            }
        };
        let host = self.lab.host(0).expect("a");
        host.in_network(|| run(&config, &AtomicBool::new(false), progress))
            .expect("its network")
            .expect("a run")
    }

    /// Overwrites every key behind the load's back.
    fn overwrite_all(&self, value_of: impl Fn(u64, &mut [u8]) + Sync) {
        let host = self.lab.host(0).expect("a");
        let mut stream = host
            .in_network(|| connect(self.address))
            .expect("its network")
            .expect("connected");
        let mut replies = ReplyReader::new(stream.try_clone().expect("a second handle"));
        let mut value = vec![0; VALUE_BYTES];
        for key in 0..KEYS {
            value_of(key, &mut value);
            write_command(&mut stream, &[b"SET", key_name(key).as_bytes(), &value]).expect("sent");
            stream.flush().expect("sent");
            assert_eq!(replies.read().expect("answered"), Reply::Status(b"OK"));
        }
    }
}

#[test]
fn a_healthy_server_gives_a_sound_run() {
    let workload = server().load(|_| ());
    assert!(
        workload.is_sound() && workload.connections_lost == 0,
        "{workload:?}"
    );
    assert_eq!(workload.keys, KEYS);
    assert!(
        workload.verified_reads >= KEYS,
        "every key was read at the end"
    );
    let sent: u64 = workload.seconds.iter().map(|second| second.ops).sum();
    assert!(
        (380..=404).contains(&sent),
        "400 were due, {sent} were answered"
    );
    assert!(
        workload
            .seconds
            .iter()
            .enumerate()
            .all(|(index, second)| second.t as usize == index)
    );
}

#[test]
fn values_that_went_back_in_time_are_lost_writes() {
    let server = server();
    let workload = server.load(|t| {
        if t == 1 {
            server.overwrite_all(|key, value| values::make(value, key, 0));
        }
    });
    assert!(
        workload.lost_writes > 10 && workload.damaged_reads == 0,
        "{workload:?}"
    );
}

#[test]
fn one_wrong_byte_is_a_damaged_read() {
    let server = server();
    let workload = server.load(|t| {
        if t == 1 {
            server.overwrite_all(|key, value| {
                values::make(value, key, 0);
                value[VALUE_BYTES - 1] ^= 1;
            });
        }
    });
    assert!(workload.damaged_reads > 10, "{workload:?}");
}

#[test]
fn a_server_that_dies_is_seen_as_lost_connections() {
    let mut server = server();
    let pid = server.redis.id() as i32;
    let workload = server.load(|t| {
        if t == 0 {
            // SAFETY: ends the Redis that this test started; no memory is involved.
            unsafe { libc::kill(pid, libc::SIGKILL) };
        }
    });
    assert_eq!(workload.connections_lost, 4, "{workload:?}");
    assert!(server.redis.wait().is_ok());
}
