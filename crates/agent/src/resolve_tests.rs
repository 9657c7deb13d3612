//! A person's word at a host, with a stub VM process and a site whose answers the test gives.

use super::*;
use crate::api::tests::{Served, host_name};
use crate::boot::{Asker, Whom};
use crate::test_support::{HEARD, TestHost, holds_web, vm};
use godwit_ownership::Phase;
use godwit_types::control_api::ResolveRequest;
use godwit_types::site::{Claim, GiftOvertaken, RecordSaid, SiteAnswer, Stamp, Standing};
use godwit_types::{Generation, MigrationId};
use std::path::PathBuf;

/// Host a of three, which gave its VM to host b under generation 2.
fn in_doubt() -> TestHost {
    let host = TestHost::new().beside(&["b", "c"]);
    host.hold("web", godwit_ownership::Power::On);
    let gave = Phase::Gave {
        generation: Generation(2),
        migration: MigrationId::new("m1").unwrap(),
        to: host_name("b"),
    };
    host.record("web", Generation(1), gave);
    host
}

/// Host c answers as said; nobody else does.
fn only_c(says: Option<SiteAnswer>) -> Asker {
    Arc::new(move |whom, _| {
        let is_c = matches!(&whom, Whom::Host(host) if host.name == host_name("c"));
        let answer = says.clone().filter(|_| is_c);
        let nobody = || ApiError::new(ErrorCode::HostUnreachable, "nobody is there");
        Box::pin(async move { answer.ok_or_else(nobody) })
    })
}

fn runs_on_at_a() -> ResolveRequest {
    ResolveRequest {
        run_on: host_name("a"),
        give_up: false,
        confirm_fenced: Some(host_name("b")),
    }
}

fn heard(served: &Served) -> usize {
    let path: PathBuf = served.host.run_dir("web").join(HEARD);
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.lines().filter(|line| *line == "resolve").count()
}

async fn served(says: Option<SiteAnswer>) -> Served {
    let served = Served::of(in_doubt(), only_c(says), false).await;
    served.agent.take_up().unwrap();
    served
}

fn c_says() -> SiteAnswer {
    SiteAnswer {
        from: Some(host_name("c")),
        ..SiteAnswer::default()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_persons_word_runs_no_vm_on_that_another_host_holds_since_or_at_a_removed_host() {
    let holder = SiteAnswer {
        records: vec![holds_web(9)],
        ..c_says()
    };
    let removed = SiteAnswer {
        standing: Standing::Removed,
        stamp: Stamp {
            epoch: 9,
            number: 1,
        },
        ..c_says()
    };
    for (says, words) in [(holder, "host c holds it"), (removed, "was removed")] {
        let served = served(Some(says)).await;
        let refused = served.local().resolve(&vm("web"), &runs_on_at_a()).await;
        let refused = refused.unwrap_err();
        assert_eq!(refused.code(), ErrorCode::WrongState);
        assert!(refused.to_string().contains(words), "{refused}");
        assert_eq!(heard(&served), 0);
        // A controller may have forgotten the holder, or not have heard it since it was started.
        let controller = served.controller();
        let refused = controller.resolve(&vm("web"), &runs_on_at_a()).await;
        assert!(refused.unwrap_err().to_string().contains(words));
        assert_eq!(heard(&served), 0);
        served.end("web");
    }
}

/// A host whose record is damaged does not know that it gave or took the VM, and its no would end the only memory, or let an
/// hours-old one run on.
#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_record_is_not_put_aside_while_another_host_waits_for_the_end_of_a_handover_with_this_one()
 {
    let (generation, a) = (Generation(2), host_name("a"));
    let waits = [
        (
            Claim::Promised {
                generation,
                from: a.clone(),
            },
            Some("has the guest's memory"),
        ),
        (
            Claim::Gave {
                generation,
                to: a.clone(),
            },
            Some("as it was then"),
        ),
        (
            Claim::Gave {
                generation,
                to: host_name("b"),
            },
            None,
        ),
        (Claim::Moved { generation, to: a }, None),
    ];
    for (claim, words) in waits {
        let record = RecordSaid {
            claim,
            ..holds_web(2)
        };
        let says = SiteAnswer {
            records: vec![record],
            ..c_says()
        };
        let host = TestHost::new().beside(&["b", "c"]);
        host.hold("web", godwit_ownership::Power::On);
        let served = Served::of(host, only_c(Some(says)), false).await;
        let path = served.host.config.vms_dir().join("web/ownership");
        std::fs::write(&path, "noise").unwrap();
        let said = served.local().forget_record(&vm("web")).await;
        match words {
            Some(words) => {
                let refused = said.unwrap_err();
                assert_eq!(refused.code(), ErrorCode::InDoubt, "{refused}");
                let text = refused.to_string();
                assert!(text.contains("host c") && text.contains(words), "{text}");
                assert_eq!(std::fs::read(&path).unwrap(), b"noise", "it stays");
            }
            None => drop(said.unwrap()),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_persons_word_runs_a_vm_on_where_nobody_who_answers_knows_better() {
    for says in [None, Some(c_says())] {
        let served = served(says).await;
        let said = served.local().resolve(&vm("web"), &runs_on_at_a()).await;
        assert_eq!(said.unwrap().message, "runs on");
        assert_eq!(heard(&served), 1);
        served.end("web");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_is_said_to_be_off_and_answers_counts_for_a_controller_that_has_its_no() {
    let from_c = ResolveRequest {
        confirm_fenced: Some(host_name("c")),
        ..runs_on_at_a()
    };
    let served = served(Some(c_says())).await;
    let refused = served.local().resolve(&vm("web"), &from_c).await;
    assert!(refused.unwrap_err().to_string().contains("not powered off"));
    let said = served.controller().resolve(&vm("web"), &from_c).await;
    assert_eq!(said.unwrap().message, "runs on");
    served.end("web");
}

#[tokio::test(flavor = "multi_thread")]
async fn giving_up_asks_nobody() {
    let removed = SiteAnswer {
        standing: Standing::Removed,
        ..c_says()
    };
    let served = served(Some(removed)).await;
    let gives_up = ResolveRequest {
        give_up: true,
        ..runs_on_at_a()
    };
    let said = served.local().resolve(&vm("web"), &gives_up).await;
    assert_eq!(said.unwrap().message, "runs on");
    served.end("web");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_controller_alone_tells_a_host_that_its_gift_is_overtaken() {
    let served = served(None).await;
    let overtaken = GiftOvertaken {
        by: Generation(9),
        with_guest: false,
    };
    let refused = served.local().gift_overtaken(&vm("web"), &overtaken).await;
    assert_eq!(refused.unwrap_err().code(), ErrorCode::NotAllowed);
    let told = served
        .controller()
        .gift_overtaken(&vm("web"), &overtaken)
        .await;
    assert!(told.unwrap().message.contains("given up"));
    served.end("web");
}
