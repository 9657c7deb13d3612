//! Renewal against a controller of a test's own, over mutual TLS. Time comes in as a value.

use super::*;
use axum::routing::get;
use axum::{Extension, Json, Router};
use godwit_rpc::access::{Access, rule};
use godwit_rpc::pki::Holder;
use godwit_rpc::{Authority, JsonBody, Revocations, Server, tls};
use godwit_types::HostName;
use godwit_types::control_api::{Done, JoinResponse};
use std::sync::atomic::{AtomicBool, Ordering};

/// What a renewal is answered with.
#[derive(Default)]
struct Bends {
    /// A certificate of a life of its own.
    other_life: AtomicBool,
}

struct House {
    authority: Arc<Authority>,
    revocations: Arc<Revocations>,
    bends: Arc<Bends>,
    /// What hosts have shown to ask whether it is good, in turn.
    shown: Arc<Mutex<Vec<String>>>,
    address: SocketAddr,
    dir: tempfile::TempDir,
    _stop: watch::Sender<bool>,
}

async fn house() -> House {
    let authority = Arc::new(Authority::create(now_unix_s()).unwrap());
    let (signing, bends) = (authority.clone(), Arc::new(Bends::default()));
    let bent = bends.clone();
    let renew = move |Extension(holder): Extension<Holder>,
                      JsonBody(body): JsonBody<RenewRequest>| async move {
        let now = now_unix_s();
        let issued = match bent.other_life.load(Ordering::SeqCst) {
            true => signing.sign(&body.csr_pem, &holder.role, now),
            false => signing.sign_again(&body.csr_pem, &holder, now),
        };
        Json(JoinResponse {
            certificate_pem: issued.unwrap().certificate_pem,
            ca_pem: signing.certificate_pem().to_owned(),
        })
    };
    let shown = Arc::new(Mutex::new(Vec::new()));
    let noting = shown.clone();
    let standing = move |Extension(holder): Extension<Holder>| async move {
        noting.lock().unwrap().push(holder.serial);
        Json(Done {
            message: "good".into(),
        })
    };
    let router = Router::new().route("/v1/certificate", get(standing).post(renew));
    let rules = ["GET", "POST"].map(|method| rule(method, "/v1/certificate", Access::HOST));
    let revocations = Arc::new(Revocations::default());
    let server = Server::new(router, &rules, revocations.clone());
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let identity = authority.identity(&Role::Controller, now_unix_s()).unwrap();
    let (_stop, stopped) = watch::channel(false);
    let config = tls::server_config(&identity).unwrap();
    tokio::spawn(server.run_tls(listener, config, stopped));
    House {
        authority,
        revocations,
        bends,
        shown,
        address,
        dir: tempfile::tempdir().unwrap(),
        _stop,
    }
}

impl House {
    fn certificate(&self) -> Certificate {
        let role = Role::Host(HostName::new("a").unwrap());
        let identity = self.authority.identity(&role, now_unix_s()).unwrap();
        identity.save(self.dir.path()).unwrap();
        let current = Current::new(identity).unwrap();
        Certificate::new(current, self.dir.path().to_owned(), Some(self.address))
    }

    fn on_disk(&self) -> String {
        let identity = Identity::load(self.dir.path()).unwrap();
        identity.holder().unwrap().serial
    }
}

fn at(certificate: &Certificate, sixths: i64) -> i64 {
    let dates = certificate.info().dates;
    dates.made_unix_s + dates.life_s() / 6 * sixths
}

#[tokio::test]
async fn a_certificate_is_renewed_once_two_thirds_of_its_life_are_over() {
    let house = house().await;
    let certificate = house.certificate();
    let first = certificate.current.holder();
    assert_eq!(certificate.look(at(&certificate, 3)).await, None);
    assert_eq!(certificate.current.holder(), first, "not before");
    assert_eq!(certificate.look(at(&certificate, 4) + 10).await, None);
    let second = certificate.current.holder();
    assert_ne!(second.serial, first.serial);
    assert_eq!((&second.life, &second.role), (&first.life, &first.role));
    assert_eq!(house.on_disk(), second.serial);
    // It is shown as soon as it is there, so that the one before is refused.
    assert_eq!(house.shown.lock().unwrap().last(), Some(&second.serial));
    // And again, by the one that it has now.
    assert_eq!(certificate.look(at(&certificate, 5)).await, None);
    let third = certificate.current.holder();
    assert_ne!(third.serial, second.serial);
    assert_eq!(third.life, first.life);
}

#[tokio::test]
async fn what_cannot_be_renewed_is_kept_and_told() {
    let house = house().await;
    let certificate = house.certificate();
    let first = certificate.current.holder();
    // A certificate of another life would make another host of this one.
    house.bends.other_life.store(true, Ordering::SeqCst);
    let told = certificate.look(at(&certificate, 5)).await.unwrap();
    assert!(told.contains("not this host's"), "{told}");
    // One that cannot be written is not shown either: the next start would not know it.
    house.bends.other_life.store(false, Ordering::SeqCst);
    std::fs::create_dir(house.dir.path().join("next.key")).unwrap();
    let told = certificate.look(at(&certificate, 5)).await.unwrap();
    assert!(told.contains("cannot write"), "{told}");
    assert_eq!(certificate.current.holder(), first);
    assert_eq!(house.on_disk(), first.serial);
    // One that has ended opens no connection.
    let told = certificate.look(at(&certificate, 7)).await.unwrap();
    assert!(told.contains("godwit host renew TOKEN"), "{told}");
}

#[tokio::test]
async fn a_controller_that_refuses_the_certificate_is_told_of() {
    let house = house().await;
    let certificate = house.certificate();
    house.revocations.revoke(certificate.current.holder().life);
    let told = certificate.look(now_unix_s()).await.unwrap();
    assert!(
        told.contains("does not accept it") && told.contains("revoked"),
        "{told}"
    );
    certificate.note(Some(told.clone()));
    assert_eq!(certificate.info().problem, Some(told));
    // One that does not answer says nothing of the certificate.
    let nobody = Some("127.0.0.1:9".parse().unwrap());
    let alone = Certificate::new(certificate.current.clone(), house.dir.path().into(), nobody);
    assert_eq!(alone.look(now_unix_s()).await, None);
}

#[tokio::test]
async fn what_a_person_brought_is_taken_without_a_restart() {
    let house = house().await;
    let certificate = house.certificate();
    let holder = certificate.current.holder();
    let request = Request::new().unwrap();
    let later = now_unix_s() + 5;
    let issued = house.authority.sign_again(&request.csr_pem, &holder, later);
    let ca_pem = house.authority.certificate_pem().to_owned();
    let brought = request.into_identity(issued.unwrap().certificate_pem, ca_pem);
    brought.unwrap().save(house.dir.path()).unwrap();
    assert_eq!(certificate.look(now_unix_s()).await, None);
    assert_eq!(certificate.current.holder().serial, house.on_disk());
    assert_ne!(certificate.current.holder().serial, holder.serial);
}

impl House {
    /// What 'godwit host renew' writes; good for so long.
    fn brought(&self, holder: &Holder, life: Duration) -> String {
        let ca = tempfile::tempdir().unwrap();
        self.authority.save(ca.path()).unwrap();
        let authority = Authority::load(ca.path()).unwrap().with_validity(life);
        let request = Request::new().unwrap();
        let issued = authority.sign_again(&request.csr_pem, holder, now_unix_s() + 1);
        let ca_pem = authority.certificate_pem().to_owned();
        let brought = request.into_identity(issued.unwrap().certificate_pem, ca_pem);
        brought.unwrap().save(self.dir.path()).unwrap();
        self.on_disk()
    }
}

#[tokio::test]
async fn an_agent_takes_a_certificate_that_ends_sooner_and_shows_it_before_it_says_so() {
    let house = house().await;
    let certificate = house.certificate();
    let before = certificate.current.holder();
    let brought = house.brought(&before, Duration::from_secs(3600));
    certificate.take_now().await.unwrap();
    let now = certificate.current.holder();
    assert_eq!(now.serial, brought);
    assert!(now.not_after_unix_s < before.not_after_unix_s);
    assert_eq!(*house.shown.lock().unwrap(), [brought]);
    // One of another life is not taken, whoever has put it there.
    let role = Role::Host(HostName::new("a").unwrap());
    let other = house.authority.identity(&role, now_unix_s() + 9).unwrap();
    other.save(house.dir.path()).unwrap();
    certificate.take_now().await.unwrap();
    assert_eq!(certificate.current.holder(), now);
}

#[tokio::test]
async fn a_certificate_of_a_clock_that_was_ahead_gives_way_to_one_that_ends_earlier() {
    let house = house().await;
    let (now, ahead) = (now_unix_s(), now_unix_s() + 300 * 86_400);
    let role = Role::Host(HostName::new("a").unwrap());
    let identity = house.authority.identity(&role, ahead).unwrap();
    identity.save(house.dir.path()).unwrap();
    let current = Current::new(identity).unwrap();
    let certificate = Certificate::new(current, house.dir.path().into(), Some(house.address));
    let told = certificate.look(now).await.unwrap();
    assert!(
        told.contains("not valid yet") && told.contains("godwit host renew TOKEN"),
        "{told}"
    );
    let holder = certificate.current.holder();
    let request = Request::new().unwrap();
    let issued = house.authority.sign_again(&request.csr_pem, &holder, now);
    let ca_pem = house.authority.certificate_pem().to_owned();
    let brought = request.into_identity(issued.unwrap().certificate_pem, ca_pem);
    brought.unwrap().save(house.dir.path()).unwrap();
    assert_eq!(certificate.look(now).await, None);
    assert_eq!(certificate.current.holder().serial, house.on_disk());
    assert!(!certificate.info().dates.is_not_valid_yet(now));
}
