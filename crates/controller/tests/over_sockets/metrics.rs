//! What a monitoring system reads, over a real socket: every line is valid, and the facts are those of the lists.

use crate::migrations::{begin, house, watch_to_the_end};
use crate::scripted::{DEADLINE, House, hand_over, host, refused, to};
use godwit_rpc::controller_client::path;
use godwit_rpc::{Client, Role};
use godwit_types::control_api::HostState;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;

/// The samples by name and labels, as written.
type Samples = BTreeMap<String, f64>;

/// As Prometheus asks: no client of Godwit's own.
async fn scrape(house: &House) -> Samples {
    let mut stream = UnixStream::connect(&house.config.socket).await.unwrap();
    let request = "GET /metrics HTTP/1.1\r\nHost: controller\r\nConnection: close\r\n\r\n";
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    let head = head.to_ascii_lowercase();
    assert!(head.starts_with("http/1.1 200"), "{head}");
    let is_text = "content-type: text/plain; version=0.0.4; charset=utf-8";
    assert!(head.contains(is_text), "{head}");
    read(body)
}

fn is_name(name: &str) -> bool {
    let mut bytes = name.bytes();
    bytes.next().is_some_and(|first| first.is_ascii_lowercase())
        && bytes.all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_')
}

/// The end of the labels that begin with `text`, after their closing brace.
fn after_labels(text: &str) -> &str {
    let mut rest = text;
    loop {
        let (name, value) = rest.split_once("=\"").expect("a label without value");
        assert!(is_name(name), "{text}");
        let mut escaped = false;
        let end = value.find(|c| match c {
            _ if escaped => {
                assert!("\\\"n".contains(c), "{text}");
                escaped = false;
                false
            }
            '\\' => {
                escaped = true;
                false
            }
            c => c == '"',
        });
        rest = &value[end.expect("a value without end") + 1..];
        match rest.strip_prefix(',') {
            Some(next) => rest = next,
            None => return rest.strip_prefix('}').expect("labels without end"),
        }
    }
}

/// Reads the text, and fails at any line that the format does not know, or a family without HELP and TYPE or in two places.
fn read(text: &str) -> Samples {
    assert!(text.ends_with('\n'));
    let (mut families, mut samples) = (BTreeSet::new(), Samples::new());
    let mut lines = text.lines().peekable();
    while let Some(line) = lines.next() {
        let (family, help) = line
            .strip_prefix("# HELP ")
            .and_then(|rest| rest.split_once(' '))
            .expect(line);
        assert!(is_name(family) && family.starts_with("godwit_"), "{line}");
        assert!(help.ends_with('.'), "{line}");
        assert!(families.insert(family.to_owned()), "{family} stands twice");
        let kind = lines
            .next()
            .and_then(|line| line.strip_prefix(&format!("# TYPE {family} ")));
        assert!(matches!(kind, Some("gauge" | "counter")), "{family}");
        assert_eq!(
            kind == Some("counter"),
            family.ends_with("_total"),
            "{family}"
        );
        while let Some(line) = lines.next_if(|line| !line.starts_with('#')) {
            let rest = line.strip_prefix(family).expect(line);
            let value = match rest.strip_prefix('{') {
                Some(labels) => after_labels(labels),
                None => rest,
            };
            let key = line.strip_suffix(value).unwrap().to_owned();
            let value = value.strip_prefix(' ').expect(line).parse().expect(line);
            assert_eq!(samples.insert(key, value), None, "{line} stands twice");
        }
    }
    samples
}

#[tokio::test]
async fn a_monitoring_system_reads_hosts_vms_and_moves() {
    let (house, a, mut b) = house().await;
    let client = house.client();
    let samples = scrape(&house).await;
    let version = godwit_types::version::VERSION;
    let info = client.host(&host("a")).await.unwrap().info;
    let free = (info.memory_free_mib << 20) as f64;
    for (key, value) in [
        (
            format!("godwit_build_info{{version=\"{version}\"}}").as_str(),
            1.0,
        ),
        ("godwit_in_charge", 1.0),
        ("godwit_alarms", 0.0),
        (r#"godwit_host_up{host="a"}"#, 1.0),
        (r#"godwit_host_memory_free_bytes{host="a"}"#, free),
        (r#"godwit_host_cpus{host="b"}"#, f64::from(info.cpus)),
        (r#"godwit_vm_state{vm="web",host="a",state="running"}"#, 1.0),
        (
            r#"godwit_vm_memory_bytes{vm="web",host="a"}"#,
            f64::from(64 << 20),
        ),
        ("godwit_migrations_running", 0.0),
        (r#"godwit_migrations_ended_total{outcome="completed"}"#, 0.0),
    ] {
        assert_eq!(samples.get(key), Some(&value), "{key}: {samples:?}");
    }
    let id = begin(&house, &to("b")).await;
    let samples = scrape(&house).await;
    assert_eq!(samples["godwit_migrations_running"], 1.0);
    let done = r#"godwit_migration_done_ratio{vm="web",from="a",to="b"}"#;
    assert!(samples.contains_key(done), "{samples:?}");
    for agent in [&a, &b] {
        let mut script = agent.script();
        let report = script.reports.get_mut(&id).unwrap();
        (report.total_s, report.switchover_ms) = (3.5, 250.0);
    }
    hand_over(&a, &b, "web", &id);
    watch_to_the_end(&house, &id).await;
    let samples = scrape(&house).await;
    for (key, value) in [
        ("godwit_migrations_running", 0.0),
        (r#"godwit_migrations_ended_total{outcome="completed"}"#, 1.0),
        (r#"godwit_migrations_ended_total{outcome="failed"}"#, 0.0),
        (
            r#"godwit_migrations_duration_seconds_total{outcome="completed"}"#,
            3.5,
        ),
        (
            r#"godwit_migrations_downtime_seconds_total{outcome="completed"}"#,
            0.25,
        ),
        (r#"godwit_vm_state{vm="web",host="b",state="running"}"#, 1.0),
    ] {
        assert_eq!(samples.get(key), Some(&value), "{key}: {samples:?}");
    }
    assert!(!samples.contains_key(done), "{samples:?}");
    b.cut().await;
    house.until_host("b", HostState::Unreachable).await;
    let asked = a.calls("load");
    let samples = scrape(&house).await;
    assert_eq!(samples[r#"godwit_host_up{host="b"}"#], 0.0);
    let stale = r#"godwit_host_memory_free_bytes{host="b"}"#;
    assert!(!samples.contains_key(stale), "{samples:?}");
    let unreachable = r#"godwit_vm_state{vm="web",host="b",state="unreachable"}"#;
    assert_eq!(samples[unreachable], 1.0);
    assert_eq!(a.calls("load"), asked, "a scrape asks no host");
}

#[tokio::test]
async fn what_a_host_says_of_itself_stays_in_its_line_and_no_host_reads_the_page() {
    let (house, a, _b) = house().await;
    let hostile = "1\"} 7\ngodwit_in_charge 0";
    a.script().info.as_mut().unwrap().version = hostile.to_owned();
    house
        .until(async |house: &House| {
            let view = house.client().host(&host("a")).await.unwrap();
            view.info.version != godwit_types::version::VERSION
        })
        .await;
    let samples = scrape(&house).await;
    assert_eq!(samples["godwit_in_charge"], 1.0);
    let client = Client::tls(house.address(), &a.identity, Role::Controller).unwrap();
    let answer: Result<Value, _> = client.get(path::METRICS, DEADLINE).await;
    refused!(answer, NotAllowed);
}
