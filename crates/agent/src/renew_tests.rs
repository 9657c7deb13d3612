//! What an agent has of a VM process that is to be of the installed version: one that becomes it, one that ends for it, none.

use crate::api::tests::{Served, put, refused};
use crate::test_support::{HEARD, RENEWS, stub_program, vm};

#[tokio::test(flavor = "multi_thread")]
async fn a_renewed_vm_has_another_process_and_one_without_a_process_has_nothing_to_renew() {
    let served = Served::new().await;
    let controller = served.controller();
    let web = vm("web");
    controller.put_vm(&put("web", 1)).await.unwrap();
    refused!(controller.renew(&web).await, WrongState);
    controller.start(&web).await.unwrap();
    let before = controller.vm(&web).await.unwrap();
    let said = served.local().renew(&web).await.unwrap().message;
    assert!(
        said.contains("the one before was of a version that it does not tell"),
        "{said}"
    );
    let after = controller.vm(&web).await.unwrap();
    assert_ne!(after.vm_process_pid, before.vm_process_pid);
    assert_eq!((after.state, after.claim), (before.state, before.claim));
    served.end("web");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_process_that_becomes_the_installed_program_is_the_same_process_afterwards() {
    let served = Served::new().await;
    let controller = served.controller();
    let web = vm("web");
    controller.put_vm(&put("web", 1)).await.unwrap();
    controller.start(&web).await.unwrap();
    let before = controller.vm(&web).await.unwrap();
    let run_dir = served.host.run_dir("web");
    std::fs::write(run_dir.join(RENEWS), "becomes").unwrap();
    served.local().renew(&web).await.unwrap();
    let after = controller.vm(&web).await.unwrap();
    assert_eq!(after.vm_process_pid, before.vm_process_pid);
    assert_eq!((after.state, after.claim), (before.state, before.claim));
    let program = stub_program().program;
    let heard = || std::fs::read_to_string(run_dir.join(HEARD)).unwrap();
    assert_eq!(heard(), format!("become {}\n", program.display()));

    // One that refuses is neither ended nor asked again.
    std::fs::write(run_dir.join(RENEWS), "refuses").unwrap();
    refused!(controller.renew(&web).await, WrongState);
    let last = controller.vm(&web).await.unwrap();
    assert_eq!(last.vm_process_pid, before.vm_process_pid);
    assert_eq!(heard().lines().count(), 1);
    served.end("web");
}
