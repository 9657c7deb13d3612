//! The house's certificates: what goes into one and comes back, and what is refused.

use super::*;

const NOW: i64 = 1_800_000_000;

#[test]
fn a_role_goes_into_the_certificate_and_back() {
    let ca = Authority::create(NOW).unwrap();
    for role in [
        Role::Host(HostName::new("a").unwrap()),
        Role::Controller,
        Role::Operator(HostName::new("eve").unwrap()),
    ] {
        let holder = ca.identity(&role, NOW).unwrap().holder().unwrap();
        assert_eq!(holder.role, role);
        assert_eq!(holder.serial.len(), 2 * SERIAL_LEN);
        assert_eq!(holder.not_after_unix_s, NOW + CERTIFICATE_DAYS * DAY_S);
    }
}

#[test]
fn names_in_a_signing_request_are_ignored() {
    let ca = Authority::create(NOW).unwrap();
    let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).unwrap();
    let mut wish = CertificateParams::default();
    wish.subject_alt_names = vec![SanType::URI("godwit:controller".try_into().unwrap())];
    wish.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let csr = wish.serialize_request(&key).unwrap().pem().unwrap();
    let role = Role::Host(HostName::new("a").unwrap());
    let issued = ca.sign(&csr, &role, NOW).unwrap();
    let der = certificate_from_pem(&issued.certificate_pem).unwrap();
    assert_eq!(Holder::read(&der).unwrap().role, role);
    let (_, certificate) = X509Certificate::from_der(&der).unwrap();
    assert!(!certificate.is_ca());
}

#[test]
fn the_controllers_certificate_alone_has_a_dns_name() {
    let ca = Authority::create(NOW).unwrap();
    let dns_names = |role: &Role| {
        let identity = ca.identity(role, NOW).unwrap();
        let der = certificate_from_pem(&identity.certificate_pem).unwrap();
        let (_, certificate) = X509Certificate::from_der(&der).unwrap();
        let names = certificate.subject_alternative_name().unwrap().unwrap();
        let dns = names.value.general_names.iter().filter_map(|name| {
            let GeneralName::DNSName(name) = name else {
                return None;
            };
            Some((*name).to_owned())
        });
        dns.collect::<Vec<_>>()
    };
    assert_eq!(dns_names(&Role::Controller), [CONTROLLER_DNS]);
    let name = HostName::new(CONTROLLER_DNS).unwrap();
    for role in [Role::Host(name.clone()), Role::Operator(name)] {
        assert!(dns_names(&role).is_empty(), "{role}");
    }
}

#[test]
fn a_certificate_for_another_key_is_refused() {
    let ca = Authority::create(NOW).unwrap();
    let (mine, other) = (Request::new().unwrap(), Request::new().unwrap());
    let issued = ca.sign(&other.csr_pem, &Role::Controller, NOW).unwrap();
    let ca_pem = ca.certificate_pem().to_owned();
    assert!(mine.into_identity(issued.certificate_pem, ca_pem).is_err());
}

#[test]
fn garbage_is_not_a_request() {
    let ca = Authority::create(NOW).unwrap();
    for bad in ["", "hello", ca.certificate_pem()] {
        assert!(ca.sign(bad, &Role::Controller, NOW).is_err());
    }
}

#[test]
fn a_renewed_certificate_is_another_one_of_the_same_life() {
    let ca = Authority::create(NOW).unwrap();
    let role = Role::Host(HostName::new("a").unwrap());
    let first = ca.identity(&role, NOW).unwrap().holder().unwrap();
    assert_eq!(first.life, first.serial);
    assert_eq!(first.dates().made_unix_s, NOW);
    let mut last = first.clone();
    for renewal in 1..4 {
        let request = Request::new().unwrap();
        let now = NOW + renewal * 200 * DAY_S;
        let issued = ca.sign_again(&request.csr_pem, &last, now).unwrap();
        let der = certificate_from_pem(&issued.certificate_pem).unwrap();
        let next = Holder::read(&der).unwrap();
        assert_eq!((&next.role, &next.life), (&role, &first.serial));
        assert_ne!(next.serial, last.serial);
        assert_eq!(next.dates().made_unix_s, now);
        last = next;
    }
    let short = ca.with_validity(Duration::from_secs(60));
    let holder = short.identity(&role, NOW).unwrap().holder().unwrap();
    assert_eq!(holder.dates().life_s(), 60);
    assert_eq!(short.dates().ends_unix_s, NOW + CA_DAYS * DAY_S);
}

#[test]
fn only_a_later_one_of_the_same_ca_role_and_life_takes_the_place_of_an_identity() {
    let (ca, other) = (
        Authority::create(NOW).unwrap(),
        Authority::create(NOW).unwrap(),
    );
    let role = |name| Role::Operator(HostName::new(name).unwrap());
    let before = ca.identity(&role("eve"), NOW).unwrap();
    let holder = before.holder().unwrap();
    let made = |ca: &Authority, holder: &Holder, at| {
        let request = Request::new().unwrap();
        let issued = ca.sign_again(&request.csr_pem, holder, at).unwrap();
        let ca_pem = ca.certificate_pem().to_owned();
        request.into_successor(issued.certificate_pem, ca_pem, &before)
    };
    assert!(made(&ca, &holder, NOW + 1).is_ok());
    let jane = Holder {
        role: role("jane"),
        ..holder.clone()
    };
    let born = Holder {
        life: "ab".repeat(SERIAL_LEN),
        ..holder.clone()
    };
    for (refused, why) in [
        (made(&other, &holder, NOW + 1), "another CA"),
        (made(&ca, &jane, NOW + 1), "operator jane"),
        (made(&ca, &born, NOW + 1), "a life of its own"),
        (
            before
                .must_succeed(&made(&ca, &holder, NOW + 1).unwrap())
                .map(|()| before.clone()),
            "not the later one",
        ),
    ] {
        let error = refused.unwrap_err().to_string();
        assert!(
            error.contains(why) && error.contains("nothing was kept"),
            "{error}"
        );
    }
    assert!(before.must_succeed(&before).is_err());
}

#[test]
fn what_follows_a_certificate_of_a_clock_that_was_ahead_is_good_now_and_counts_as_the_later_one() {
    let ca = Authority::create(NOW).unwrap();
    let role = Role::Host(HostName::new("a").unwrap());
    let ahead = ca.identity(&role, NOW + 300 * DAY_S).unwrap();
    let was = ahead.holder().unwrap();
    let next = |holder: &Holder| {
        let request = Request::new().unwrap();
        let issued = ca.sign_again(&request.csr_pem, holder, NOW).unwrap();
        let ca_pem = ca.certificate_pem().to_owned();
        request
            .into_identity(issued.certificate_pem, ca_pem)
            .unwrap()
    };
    let right = next(&was);
    let is = right.holder().unwrap();
    assert!(!is.dates().is_not_valid_yet(NOW));
    assert!(is.order > was.order, "{is:?}");
    right.must_succeed(&ahead).unwrap();
    ahead.must_succeed(&right).unwrap_err();
    // Also where the earlier one had been in use.
    let revocations = crate::Revocations::default();
    revocations.revoke(crate::revocations::made_before(&was.life, was.order));
    assert!(crate::Admission::admits(&revocations, &is));
    assert_eq!(next(&is).holder().unwrap().order, is.order + 1);
}

#[test]
fn a_life_in_a_signing_request_is_ignored() {
    let ca = Authority::create(NOW).unwrap();
    let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).unwrap();
    let mut wish = CertificateParams::default();
    let life = format!("{LIFE}{}", "ab".repeat(SERIAL_LEN));
    wish.distinguished_name
        .push(DnType::OrganizationalUnitName, life);
    let csr = wish.serialize_request(&key).unwrap().pem().unwrap();
    let issued = ca.sign(&csr, &Role::Controller, NOW).unwrap();
    let der = certificate_from_pem(&issued.certificate_pem).unwrap();
    assert_eq!(Holder::read(&der).unwrap().life, issued.serial);
}

#[test]
fn unknown_roles_are_no_roles() {
    for bad in [
        "",
        "godwit:",
        "godwit:root",
        "godwit:host:",
        "godwit:host:../x",
        "host:a",
    ] {
        assert_eq!(Role::from_uri(bad), None, "{bad}");
    }
}
