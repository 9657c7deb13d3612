//! Certificates over real sockets: renewed, given anew after their end, and given back.

use crate::scripted::{Agent, DEADLINE, House, code, host, refused, vm};
use godwit_rpc::controller_client::path;
use godwit_rpc::pki::{Request, now_unix_s};
use godwit_rpc::revocations::made_before;
use godwit_rpc::{Authority, Client, ClientError, ControllerClient, Identity, Role};
use godwit_types::control_api::{
    HostState, JoinRequest, JoinResponse, OperatorRequest, RenewRequest,
};
use godwit_types::site::{SiteQuestion, Standing};
use godwit_types::vm::VmState;
use godwit_types::{ApiError, ErrorCode};
use serde_json::Value;

const YEAR_S: i64 = 365 * 86_400;

fn client(house: &House, identity: &Identity) -> ControllerClient {
    let client = Client::tls(house.address(), identity, Role::Controller);
    ControllerClient::new(client.unwrap())
}

async fn renewed(house: &House, identity: &Identity) -> Result<Identity, ClientError> {
    let request = Request::new().unwrap();
    let csr_pem = request.csr_pem.clone();
    let answer = client(house, identity)
        .renew_certificate(&RenewRequest { csr_pem })
        .await?;
    Ok(request
        .into_identity(answer.certificate_pem, answer.ca_pem)
        .unwrap())
}

/// What host a had a year ago: the certificate of its life that has ended since.
fn ended(house: &House, agent: &Agent) -> Identity {
    let authority = Authority::load(&house.config.state_dir).unwrap();
    let (request, holder) = (Request::new().unwrap(), agent.identity.holder().unwrap());
    let long_ago = now_unix_s() - 2 * YEAR_S;
    let issued = authority.sign_again(&request.csr_pem, &holder, long_ago);
    let ca_pem = authority.certificate_pem().to_owned();
    request
        .into_identity(issued.unwrap().certificate_pem, ca_pem)
        .unwrap()
}

/// Its agent shows this one from now on.
async fn come_back_as(house: &House, agent: &mut Agent, identity: Identity) {
    if !agent.is_cut() {
        agent.cut().await;
        house.until_host("a", HostState::Unreachable).await;
    }
    agent.identity = identity;
    agent.heal().await;
    house.until_host("a", HostState::Connected).await;
}

/// Asks to go on as this host, by what is shown of this identity.
async fn go_on(
    house: &House,
    name: &str,
    former: &Identity,
    key: &Request,
) -> Result<JoinResponse, ClientError> {
    let token = house.token().await;
    let former = former.shown_as_former(token.secret(), &key.csr_pem);
    let request = JoinRequest {
        secret: token.secret().to_owned(),
        name: host(name),
        agent_address: "127.0.0.1:9".parse().unwrap(),
        csr_pem: key.csr_pem.clone(),
        former: Some(former.unwrap()),
    };
    house.joining(&token).join(&request).await
}

#[tokio::test]
async fn a_host_that_renews_its_certificate_stays_the_host_that_was_enrolled() {
    let house = House::new().await;
    let (mut a, b) = (house.host("a").await, house.host("b").await);
    house.running("web", "a").await;
    let first = a.identity.holder().unwrap();
    let first_identity = a.identity.clone();
    let lost = renewed(&house, &a.identity).await.unwrap();
    assert_ne!(lost.holder().unwrap().serial, first.serial);
    // The old one is good until a new one is used: an answer that was lost on its way is missed by nobody.
    client(&house, &a.identity).certificate().await.unwrap();
    let mut identity = a.identity.clone();
    for _ in 0..3 {
        identity = renewed(&house, &identity).await.unwrap();
    }
    let last = identity.holder().unwrap();
    assert_eq!((last.role, last.life), (first.role, first.serial.clone()));
    assert_ne!(last.serial, first.serial);
    // It answers with the new one, and is believed.
    come_back_as(&house, &mut a, identity.clone()).await;
    house.until_vm("web", VmState::Running, "a").await;
    assert_eq!(
        house.client().site().await.unwrap().sentences,
        Vec::<String>::new()
    );
    // With the life all its certificates are revoked.
    house.client().remove_host(&host("b"), false).await.unwrap();
    let error = renewed(&house, &b.identity).await.unwrap_err();
    assert!(error.to_string().contains("revoked"), "{error}");
    let stop = godwit_types::control_api::StopRequest { force: true };
    house.client().stop(&vm("web"), &stop).await.unwrap();
    house.client().delete_vm(&vm("web")).await.unwrap();
    house.client().remove_host(&host("a"), false).await.unwrap();
    for known in [&identity, &first_identity] {
        let error = client(&house, known).certificate().await.unwrap_err();
        assert!(error.to_string().contains("revoked"), "{error}");
    }
}

#[tokio::test]
async fn a_host_whose_certificate_has_ended_goes_on_with_its_records() {
    let house = House::new().await;
    let mut a = house.host("a").await;
    house.running("web", "a").await;
    let generation = a.generation("web");
    let former = ended(&house, &a);
    a.cut().await;
    house.until_host("a", HostState::Unreachable).await;
    let error = client(&house, &former).certificate().await.unwrap_err();
    assert!(!matches!(error, ClientError::Refused(_)), "{error}");

    let key = Request::new().unwrap();
    let answer = go_on(&house, "a", &former, &key).await.unwrap();
    let identity = key
        .into_identity(answer.certificate_pem, answer.ca_pem)
        .unwrap();
    let (was, is) = (a.identity.holder().unwrap(), identity.holder().unwrap());
    assert_eq!((is.role, &is.life), (was.role, &was.serial));
    come_back_as(&house, &mut a, identity).await;
    house.until_vm("web", VmState::Running, "a").await;
    assert_eq!(house.vm("web").await.generation, generation);
    assert_eq!(
        house.client().site().await.unwrap().sentences,
        Vec::<String>::new()
    );
}

#[tokio::test]
async fn another_machine_does_not_go_on_as_an_enrolled_host() {
    let house = House::new().await;
    let (a, b) = (house.host("a").await, house.host("b").await);
    let key = Request::new().unwrap();
    // Another host's, one of another life of the name, and one of another site.
    let error = go_on(&house, "a", &b.identity, &key).await.unwrap_err();
    assert!(error.to_string().contains("is that of host b"), "{error}");
    let authority = Authority::load(&house.config.state_dir).unwrap();
    let role = Role::Host(host("a"));
    let other = authority.identity(&role, now_unix_s()).unwrap();
    let error = go_on(&house, "a", &other, &key).await.unwrap_err();
    assert!(error.to_string().contains("former host a"), "{error}");
    let elsewhere = Authority::create(now_unix_s()).unwrap();
    let stranger = elsewhere.identity(&role, now_unix_s()).unwrap();
    let error = go_on(&house, "a", &stranger, &key).await.unwrap_err();
    assert!(error.to_string().contains("another CA"), "{error}");
    // What was shown by the right one revokes that certificate alone, once and for all, as soon as its answer has come.
    let answer = go_on(&house, "a", &a.identity, &key).await.unwrap();
    let new = key.into_identity(answer.certificate_pem, answer.ca_pem);
    client(&house, &new.unwrap()).certificate().await.unwrap();
    let error = client(&house, &a.identity).certificate().await.unwrap_err();
    assert!(error.to_string().contains("revoked"), "{error}");
    assert!(renewed(&house, &b.identity).await.is_ok());
    // One that was removed does not come back so.
    let key = Request::new().unwrap();
    house.client().remove_host(&host("b"), false).await.unwrap();
    let error = go_on(&house, "b", &b.identity, &key).await.unwrap_err();
    assert!(error.to_string().contains("no host b"), "{error}");
}

#[tokio::test]
async fn who_has_an_old_key_of_a_renewed_host_is_refused_by_everybody_and_does_not_go_on() {
    let mut house = House::new().await;
    let (mut a, mut b) = (house.host("a").await, house.host("b").await);
    // b is away while the others hear of it.
    b.cut().await;
    house.until_host("b", HostState::Unreachable).await;
    let old = a.identity.clone();
    let new = renewed(&house, &old).await.unwrap();
    come_back_as(&house, &mut a, new.clone()).await;
    client(&house, &new).certificate().await.unwrap();
    let refused = |error: ClientError| assert!(error.to_string().contains("revoked"), "{error}");
    refused(client(&house, &old).certificate().await.unwrap_err());
    refused(renewed(&house, &old).await.unwrap_err());
    // Before it boots it hears what it is.
    let question = SiteQuestion {
        instance: a.instance(),
        knows: a.knows(),
        wishes: Vec::new(),
    };
    let answer = client(&house, &old).site_ask(&question).await.unwrap();
    let told = (answer.standing, answer.replaced);
    assert_eq!(told, (Standing::OldCopy, true));
    let key = Request::new().unwrap();
    let error = go_on(&house, "a", &old, &key).await.unwrap_err();
    let text = error.to_string();
    assert!(
        text.contains("later certificate") && text.contains("godwit host remove a"),
        "{text}"
    );
    // The other hosts learn it, also one that was away, and a controller that starts again knows it.
    let holder = new.holder().unwrap();
    let before = made_before(&holder.life, holder.order);
    b.heal().await;
    house.until_host("b", HostState::Connected).await;
    house
        .until(async |_: &House| b.script().revoked.contains(&before))
        .await;
    house.stop().await;
    house.start().await;
    refused(client(&house, &old).certificate().await.unwrap_err());
    client(&house, &new).certificate().await.unwrap();
    house.until_host("a", HostState::Connected).await;
}

#[tokio::test]
async fn a_host_whose_new_certificate_was_lost_on_its_way_goes_on_with_another_token() {
    let house = House::new().await;
    let a = house.host("a").await;
    for _ in 0..2 {
        let key = Request::new().unwrap();
        go_on(&house, "a", &a.identity, &key).await.unwrap();
        // Nobody has the answer: what the host has is good, and its agent goes on with it.
        client(&house, &a.identity).certificate().await.unwrap();
    }
    house.until_host("a", HostState::Connected).await;
}

#[tokio::test]
async fn an_operator_who_is_removed_is_refused_at_once_and_not_renewed() {
    let mut house = House::new().await;
    let operator = async |name: &str| {
        let key = Request::new().unwrap();
        let (name, csr_pem) = (host(name), key.csr_pem.clone());
        let request = OperatorRequest { name, csr_pem };
        let answer = house.client().add_operator(&request).await.unwrap();
        key.into_identity(answer.certificate_pem, answer.ca_pem)
            .unwrap()
    };
    let (eve, jane) = (operator("eve").await, operator("jane").await);
    let eve_now = renewed(&house, &eve).await.unwrap();
    let names = async |house: &House| -> Vec<String> {
        let all = house.client().operators().await.unwrap();
        all.into_iter().map(|one| one.name).collect()
    };
    assert_eq!(names(&house).await, ["admin", "eve", "jane"]);
    // A stream that is open ends; those of others go on.
    let mut told = client(&house, &eve_now).events().await.unwrap();
    let mut others = client(&house, &jane).events().await.unwrap();
    let admin = Identity::load(&house.made.operator_dir).unwrap();
    let error = client(&house, &admin).remove_operator(&host("eve")).await;
    assert_eq!(
        code(error),
        ErrorCode::NotAllowed,
        "only where the controller is"
    );
    house.client().remove_operator(&host("eve")).await.unwrap();
    let end = loop {
        match told.next(DEADLINE).await {
            Ok(Some(_)) => {}
            end => break end,
        }
    };
    assert!(matches!(end, Ok(None)), "{end:?}");
    for revoked in [&eve, &eve_now] {
        let error = client(&house, revoked).vms().await.unwrap_err();
        assert!(
            error.to_string().contains("godwit operator add eve"),
            "{error}"
        );
        assert_eq!(code(renewed(&house, revoked).await), ErrorCode::NotAllowed);
    }
    let _a = house.host("a").await;
    assert!(others.next(DEADLINE).await.unwrap().is_some());
    assert_eq!(names(&house).await, ["admin", "jane"]);
    // For good; and the name may be given out anew, in the same second, too.
    house.stop().await;
    house.start().await;
    assert_eq!(
        code(client(&house, &eve_now).vms().await),
        ErrorCode::NotAllowed
    );
    let request = Request::new().unwrap();
    let (name, csr_pem) = (host("eve"), request.csr_pem.clone());
    let answer = house
        .client()
        .add_operator(&OperatorRequest { name, csr_pem })
        .await;
    let answer = answer.unwrap();
    let again = request.into_identity(answer.certificate_pem, answer.ca_pem);
    client(&house, &again.unwrap()).vms().await.unwrap();
    assert_eq!(names(&house).await, ["admin", "eve", "jane"]);
    // The last one, too: the local socket stays.
    for name in ["admin", "eve", "jane"] {
        house.client().remove_operator(&host(name)).await.unwrap();
    }
    assert!(names(&house).await.is_empty());
}

#[tokio::test]
async fn an_operator_that_an_older_version_made_is_removed_by_name() {
    let mut house = House::new().await;
    house.stop().await;
    house.execute("DELETE FROM operators").await;
    house.start().await;
    let admin = Identity::load(&house.made.operator_dir).unwrap();
    assert!(house.client().operators().await.unwrap().is_empty());
    let told = house
        .client()
        .remove_operator(&host("admin"))
        .await
        .unwrap();
    assert!(told.message.contains("was known here"), "{told:?}");
    assert_eq!(
        code(client(&house, &admin).vms().await),
        ErrorCode::NotAllowed
    );
    // One that was seen is known.
    let made = Authority::load(&house.config.state_dir).unwrap();
    let later = made.identity(&Role::Operator(host("admin")), now_unix_s() + 2);
    let later = later.unwrap();
    client(&house, &later).vms().await.unwrap();
    let seen = house.client().operators().await.unwrap();
    assert_eq!(seen[0].life, later.holder().unwrap().life);
}

#[tokio::test]
async fn operators_are_made_where_the_controller_is_and_renew_from_afar() {
    let house = House::new().await;
    let key = Request::new().unwrap();
    let request = OperatorRequest {
        name: host("eve"),
        csr_pem: key.csr_pem.clone(),
    };
    let admin = Identity::load(&house.made.operator_dir).unwrap();
    let error = client(&house, &admin).add_operator(&request).await;
    refused!(error, NotAllowed);
    let answer = house.client().add_operator(&request).await.unwrap();
    let eve = key
        .into_identity(answer.certificate_pem, answer.ca_pem)
        .unwrap();
    let eve = renewed(&house, &eve).await.unwrap();
    assert_eq!(
        eve.holder().unwrap().role,
        Role::Operator(host("eve")),
        "the role is the CA's to say"
    );
    assert!(client(&house, &eve).vms().await.unwrap().is_empty());
}

#[tokio::test]
async fn a_host_leaves_by_its_own_certificate_once_it_holds_nothing() {
    let house = House::new().await;
    let a = house.host("a").await;
    house.running("web", "a").await;
    let own = client(&house, &a.identity);
    let error = own.leave().await.unwrap_err();
    assert!(error.to_string().contains("web"), "{error}");
    let stop = godwit_types::control_api::StopRequest { force: true };
    house.client().stop(&vm("web"), &stop).await.unwrap();
    house.client().delete_vm(&vm("web")).await.unwrap();
    own.leave().await.unwrap();
    assert!(house.client().hosts().await.unwrap().is_empty());
    let error = own.leave().await;
    assert!(matches!(
        error,
        Err(ClientError::Refused(ApiError {
            code: ErrorCode::NotAllowed,
            ..
        }))
    ));
    // The name is free again.
    let _a = house.host("a").await;
}

#[tokio::test]
async fn a_name_that_is_taken_is_refused_by_where_its_host_is() {
    let house = House::new().await;
    let a = house.host("a").await;
    let key = Request::new().unwrap();
    let address = "127.0.0.1:9".parse().unwrap();
    let error = house.join("a", address, &key).await.unwrap_err();
    let text = error.to_string();
    assert!(text.contains(&a.address.to_string()), "{text}");
    assert!(text.contains("and answers"), "{text}");
    assert!(text.contains("godwit host leave"), "{text}");
}

#[tokio::test]
async fn an_address_that_tries_tokens_is_slowed_and_people_here_are_not() {
    let house = House::new().await;
    let token = house.token().await;
    let (key, address) = (Request::new().unwrap(), "127.0.0.1:9".parse().unwrap());
    let request = JoinRequest {
        secret: "wrong".into(),
        name: host("a"),
        agent_address: address,
        csr_pem: key.csr_pem.clone(),
        former: None,
    };
    let mut slowed = false;
    for _ in 0..1000 {
        match code(house.joining(&token).join(&request).await) {
            ErrorCode::BadToken => {}
            ErrorCode::NotAllowed => {
                slowed = true;
                break;
            }
            other => panic!("{other}"),
        }
    }
    assert!(slowed);
    let local = Client::unix(&house.config.socket);
    let asked = local.post::<_, Value>(path::JOIN, &request, DEADLINE).await;
    refused!(asked, BadToken);
}
