//! An agent with VM processes of a version less and of one more: what they leave out and what they say beyond today's words.

use crate::agent::NEED;
use crate::api::tests::Served;
use crate::test_support::{BOOTED, DIALECT, HEARD, TestHost, vm};
use godwit_ownership::Power;
use godwit_types::Generation;
use godwit_types::control_api::{ResolveRequest, StopRequest};
use godwit_types::site::{Claim, SurveyRequest};
use godwit_types::vm::VmState;

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_process_one_version_older_or_newer_lives_with_this_agent() {
    for dialect in ["older", "newer"] {
        let host = TestHost::new();
        host.hold("web", Power::On);
        std::fs::write(host.run_dir("web").join(DIALECT), dialect).unwrap();
        let served = Served::of_host(host).await;
        served.agent.take_up().unwrap();
        let web = vm("web");
        let process = served.agent.supervisor.find(&web).unwrap();
        process.need(NEED).await.unwrap();
        let controller = served.controller();
        let shown = controller.vm(&web).await.unwrap();
        assert_eq!(shown.generation, Generation(1), "{dialect}");
        assert_eq!(shown.vm_process_pid.is_none(), dialect == "older");
        controller.start(&web).await.unwrap();
        let listed = served.local().vms().await.unwrap();
        assert_eq!(listed[0].state, VmState::Running, "{dialect}");
        let level = Generation(9);
        let said = controller.survey(&web, &SurveyRequest { level }).await;
        let claim = said.unwrap().claim;
        assert!(matches!(claim, Claim::Holds { .. }), "{claim:?}");
        assert_eq!(controller.console(&web).await.unwrap().text, "login:");
        let resolve = ResolveRequest {
            run_on: served.host.config.name.clone(),
            give_up: false,
            confirm_fenced: None,
        };
        controller.resolve(&web, &resolve).await.unwrap();
        controller
            .stop(&web, &StopRequest { force: true })
            .await
            .unwrap();
        let now = controller.vm(&web).await.unwrap();
        assert_eq!(now.state, VmState::Stopped, "{dialect}");
        let heard = std::fs::read_to_string(served.host.run_dir("web").join(HEARD)).unwrap();
        assert_eq!(heard.lines().collect::<Vec<_>>(), ["resolve"]);
        assert!(!served.host.run_dir("web").join(BOOTED).exists());
        served.end("web");
    }
}
