//! What is shown of a VM's guest: what it was told when it booted first, and what it says of itself.
//!
//! Pure text, owns nothing. A guest chooses its words, so they are shown beside what it may be believed. Refuses: to show keys and user data,
//! of which only the amount is told; `--json` has them.

use godwit_types::control_api::VmView;

/// A line each for what the guest was told, what it is called and runs, and the addresses of its cards; none where nothing is known.
pub fn guest_rows(vm: &VmView) -> Vec<(&'static str, String)> {
    let told = vm.spec.cloud_init.as_ref();
    let mut rows: Vec<_> = told
        .map(|told| ("cloud-init", told.to_string()))
        .into_iter()
        .collect();
    let Some(guest) = &vm.guest else {
        return rows;
    };
    let words: Vec<&str> = [&guest.hostname, &guest.os]
        .into_iter()
        .flatten()
        .map(String::as_str)
        .collect();
    if !words.is_empty() {
        rows.push(("guest", words.join(", ")));
    }
    for card in &guest.cards {
        let addresses: Vec<String> = card.addresses.iter().map(ToString::to_string).collect();
        rows.push((
            "address",
            format!("{}: {}", card.name, addresses.join(", ")),
        ));
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::tests::vm;
    use godwit_types::vm::VmState;
    use serde_json::json;

    #[test]
    fn a_guest_is_shown_in_its_own_words_and_one_that_says_nothing_is_not() {
        assert_eq!(guest_rows(&vm("web", VmState::Running, json!({}))), []);
        let said = json!({"guest": {"hostname": "web", "os": "Debian GNU/Linux 12", "cards": [
            {"name": "eth0", "addresses": ["192.0.2.10", "2001:db8::10"]}
        ]}});
        let mut web = vm("web", VmState::Running, said);
        let key = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5".to_owned();
        web.spec.cloud_init = Some(godwit_types::vm::CloudInit {
            user_data: Some("#!secret".into()),
            ssh_keys: vec![key],
            ..Default::default()
        });
        let wanted = [
            ("cloud-init", "user data of 8 bytes, 1 key".to_owned()),
            ("guest", "web, Debian GNU/Linux 12".to_owned()),
            ("address", "eth0: 192.0.2.10, 2001:db8::10".to_owned()),
        ];
        assert_eq!(guest_rows(&web), wanted);
    }
}
