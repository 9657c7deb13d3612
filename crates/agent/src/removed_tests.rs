//! Whom the word reaches that a host is gone for good.

use crate::agent::NEED;
use crate::api::tests::{Served, host_name};
use crate::test_support::{DIE, HEARD, vm};
use godwit_ownership::Power;
use godwit_types::host_api::RemovedHosts;

fn times_heard(served: &Served, name: &str) -> usize {
    let text = std::fs::read_to_string(served.host.run_dir(name).join(HEARD));
    let text = text.unwrap_or_default();
    text.lines().filter(|line| *line == "b is gone").count()
}

async fn live(served: &Served, name: &str) {
    let config = served.agent.vm_config(&vm(name));
    let vm = served.agent.supervisor.supervise(config);
    vm.need(NEED).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_process_that_was_away_hears_of_a_removed_host_later_and_once() {
    let served = Served::new().await;
    served.host.hold("web", Power::On);
    let die = served.host.run_dir("web").join(DIE);
    std::fs::write(&die, "not yet").unwrap();
    served.agent.take_up().unwrap();
    let removed = RemovedHosts {
        hosts: vec![host_name("b"), host_name("a")],
    };
    served.controller().removed_hosts(&removed).await.unwrap();
    assert_eq!(times_heard(&served, "web"), 0);
    std::fs::remove_file(&die).unwrap();
    live(&served, "web").await;
    served.agent.tell_of_the_removed().await;
    assert_eq!(times_heard(&served, "web"), 1);
    // A VM that is found later is told, too, and the first one not again.
    served.host.hold("db", Power::On);
    live(&served, "db").await;
    served.controller().removed_hosts(&removed).await.unwrap();
    assert_eq!(
        (times_heard(&served, "web"), times_heard(&served, "db")),
        (1, 1)
    );
    served.end("web");
    served.end("db");
}
