//! Hosts as the tests of the site's rules enrol them.

use godwit_types::HostName;
use godwit_types::site::SiteHost;

pub fn host(name: &str) -> HostName {
    HostName::new(name).unwrap()
}

/// A host whose certificate's number is its name, on a machine that nobody has seen yet.
pub fn enrolled(name: &str) -> SiteHost {
    SiteHost {
        name: host(name),
        address: "192.0.2.1:1".parse().unwrap(),
        serial: name.to_owned(),
        counter: 0,
        machine_id: String::new(),
    }
}
