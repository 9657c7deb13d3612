//! A guest's console over real sockets, from a host that is followed.

use crate::scripted::{House, host, refused, spec, vm};
use godwit_rpc::sse::{Event, EventStream};
use godwit_types::ApiError;
use godwit_types::console::{ConsolePiece, ConsoleQuery};
use godwit_types::control_api::StartRequest;
use std::time::Duration;

const LONG: Duration = Duration::from_secs(60);

async fn all(mut events: EventStream) -> Vec<Event> {
    let mut all = Vec::new();
    while let Some(event) = events.next(LONG).await.unwrap() {
        all.push(event);
    }
    all
}

#[tokio::test]
async fn a_console_is_followed_at_its_host_until_that_says_why_not() {
    let house = House::new().await;
    let (a, client) = (house.host("a").await, house.client());
    client.create_vm(&spec("web")).await.unwrap();
    let whole = ConsoleQuery::default();
    let off = client.console_events(&vm("web"), &whole).await.map(drop);
    refused!(off, WrongState);
    let request = StartRequest::default();
    client.start(&vm("web"), &request).await.unwrap();
    let events = client.console_events(&vm("web"), &whole).await.unwrap();
    let told = all(events).await;
    let [console, error] = told.as_slice() else {
        panic!("{told:?}");
    };
    let piece: ConsolePiece = serde_json::from_str(&console.data).unwrap();
    assert_eq!(
        (piece.bytes.as_slice(), &piece.host),
        (&b"login:"[..], &Some(host("a")))
    );
    assert_eq!(
        (console.name.as_str(), error.name.as_str()),
        ("console", "error")
    );
    let error: ApiError = serde_json::from_str(&error.data).unwrap();
    assert_eq!(error.message, "VM 'web' is not running");
    assert_eq!(error.host.as_deref(), Some("a"));
    let place = Some(piece.place());
    let host = Some(host("a"));
    let later = ConsoleQuery { place, host };
    let events = client.console_events(&vm("web"), &later).await.unwrap();
    let piece: ConsolePiece = serde_json::from_str(&all(events).await[0].data).unwrap();
    assert_eq!((piece.from, piece.bytes.as_slice()), (6, &b""[..]));
    let asked = a.script().calls.clone();
    let asked: Vec<_> = asked
        .iter()
        .filter(|call| call.starts_with("follow"))
        .collect();
    assert_eq!(asked, ["follow ", "follow text=a1&after=6"]);
}
