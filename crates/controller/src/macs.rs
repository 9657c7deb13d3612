//! Which network card has which MAC address. Pure.
//!
//! Owns nothing: the addresses lie in the VMs' descriptions. A card for which none is given keeps the one that it had,
//! else gets the one made from the VM's name, else the next one that is free; it is then in the description, so that it
//! stays when others come and go. Refuses: an address that a card of any VM has already, in the inventory or by what hosts
//! tell; and the start of a VM with an address of one that is on, as two that hosts brought may have.

use crate::error::{Outcome, refuse};
use crate::state::State;
use godwit_types::vm::{mac_text, parse_mac};
use godwit_types::{ErrorCode, VmName, VmSpec};
use std::collections::{BTreeMap, BTreeSet};

type Mac = [u8; 6];

/// Free ones are looked for among as many as the last three bytes can tell apart.
const CHOICES: u32 = 1 << 24;

/// The description with an address for each card that no other card has.
pub fn allot(spec: VmSpec, state: &State) -> Outcome<VmSpec> {
    let before = state.vms.get(&spec.name).map(|vm| vm.spec.clone());
    allot_among(spec, before.as_ref(), &known(state))
}

/// Refuses a VM that has an address of one that is on.
pub fn must_be_alone(spec: &VmSpec, state: &State) -> Outcome<()> {
    let hosts = state.hosts.iter();
    let all = hosts.flat_map(|(host, entry)| entry.vms.values().map(move |vm| (host, vm)));
    let mut others = all.filter(|(_, vm)| vm.spec.name != spec.name && !vm.state.is_off());
    let own: BTreeSet<Mac> = macs(spec).collect();
    let clash = others.find_map(|(host, vm)| {
        let mac = macs(&vm.spec).find(|mac| own.contains(mac))?;
        Some((host, &vm.spec.name, mac))
    });
    match clash {
        None => Ok(()),
        Some((host, other, mac)) => refuse(
            ErrorCode::InvalidVm,
            format!(
                "VM {0} has the MAC address {1} that VM {other} on host {host} has, which is on: leave mac out of its description with 'godwit vm edit {0} FILE' to get another",
                spec.name,
                mac_text(mac)
            ),
        ),
    }
}

/// Descriptions of all VMs: those here, and of those that hosts have what is not here, or is on with it.
fn known(state: &State) -> Vec<&VmSpec> {
    let hosts = state.hosts.values();
    let told = hosts.flat_map(|host| host.vms.values());
    let told = told.filter(|vm| !vm.state.is_off() || !state.vms.contains_key(&vm.spec.name));
    let here = state.vms.values().map(|vm| &vm.spec);
    here.chain(told.map(|vm| &vm.spec)).collect()
}

fn allot_among(mut spec: VmSpec, before: Option<&VmSpec>, known: &[&VmSpec]) -> Outcome<VmSpec> {
    let others = known.iter().filter(|other| other.name != spec.name);
    let others = others.flat_map(|other| macs(other).map(|mac| (mac, &other.name)));
    let others: BTreeMap<Mac, &VmName> = others.collect();
    let mut own = BTreeSet::new();
    for text in spec.nics.iter().filter_map(|nic| nic.mac.as_deref()) {
        // What is no address was refused before.
        let Some(mac) = parse_mac(text) else { continue };
        if let Some(other) = others.get(&mac) {
            return refuse(
                ErrorCode::InvalidVm,
                format!(
                    "mac = \"{text}\" is taken by VM {other}: give VM {} another, or leave it out to get one that is free",
                    spec.name
                ),
            );
        }
        if !own.insert(mac) {
            return refuse(
                ErrorCode::InvalidVm,
                format!(
                    "mac = \"{text}\" is given to two network cards of VM {}: give one of them another, or leave it out to get one that is free",
                    spec.name
                ),
            );
        }
    }
    for index in 0..spec.nics.len() {
        if spec.nics.get(index).is_none_or(|nic| nic.mac.is_some()) {
            continue;
        }
        let had = before.and_then(|before| before.mac(index));
        let choices = had.into_iter().chain(choices(spec.default_mac(index)));
        let is_free = |mac: &Mac| !others.contains_key(mac) && !own.contains(mac);
        let Some(mac) = choices.into_iter().find(is_free) else {
            return refuse(
                ErrorCode::InvalidVm,
                format!(
                    "no MAC address 52:54:00:xx:xx:xx is free: give the cards of VM {} some of your own",
                    spec.name
                ),
            );
        };
        own.insert(mac);
        if let Some(nic) = spec.nics.get_mut(index) {
            nic.mac = Some(mac_text(mac));
        }
    }
    Ok(spec)
}

fn macs(spec: &VmSpec) -> impl Iterator<Item = Mac> + '_ {
    (0..spec.nics.len()).filter_map(|index| spec.mac(index))
}

/// This one and all others with the same first half, in order, round and round once.
fn choices(first: Mac) -> impl Iterator<Item = Mac> {
    let [a, b, c, d, e, f] = first;
    let start = u32::from_be_bytes([0, d, e, f]);
    (0..CHOICES).map(move |step| {
        let [_, d, e, f] = (start.wrapping_add(step) % CHOICES).to_be_bytes();
        [a, b, c, d, e, f]
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::HostEntry;
    use godwit_types::host_api::HostVm;
    use godwit_types::site::Claim;
    use godwit_types::vm::VmState;
    use godwit_types::{Generation, HostName};

    /// A VM with one card for each text; an empty one leaves the address out.
    fn vm(name: &str, macs: &[&str]) -> VmSpec {
        let mut text = format!("name = \"{name}\"\nvcpus = 1\nmemory_mib = 64\nkernel = \"/k\"\n");
        for mac in macs {
            text.push_str("[[nic]]\nport_group = \"vm\"\n");
            if !mac.is_empty() {
                text.push_str(&format!("mac = \"{mac}\"\n"));
            }
        }
        VmSpec::from_toml(&text).unwrap()
    }

    fn allot(spec: VmSpec, known: &[VmSpec]) -> Outcome<VmSpec> {
        let before = known.iter().find(|other| other.name == spec.name);
        allot_among(spec, before, &Vec::from_iter(known))
    }

    /// Two names from which the same address is made.
    fn namesakes() -> (String, String) {
        let mut seen = BTreeMap::new();
        for number in 0.. {
            let name = format!("vm{number}");
            if let Some(other) = seen.insert(vm(&name, &[""]).default_mac(0), name.clone()) {
                return (other, name);
            }
        }
        unreachable!("24 bits do not tell endless names apart")
    }

    #[test]
    fn two_vms_whose_names_make_the_same_mac_get_different_ones() {
        let (a, b) = namesakes();
        let first = allot(vm(&a, &[""]), &[]).unwrap();
        assert_eq!(first.nics[0].mac, Some(mac_text(first.default_mac(0))));
        let second = allot(vm(&b, &[""]), std::slice::from_ref(&first)).unwrap();
        assert_eq!(second.default_mac(0), first.default_mac(0));
        assert_ne!(second.mac(0), first.mac(0));
        assert!(second.nics[0].mac.is_some());
        // An older database has none written down; its VM keeps what it has all the same.
        let again = allot(vm(&b, &[""]), &[vm(&a, &[""])]).unwrap();
        assert_eq!(again, second);
    }

    #[test]
    fn a_given_mac_that_another_vm_has_is_refused_with_its_name() {
        let db = vm("db", &["52:54:00:00:00:01"]);
        let error = allot(vm("web", &["52:54:00:00:00:01"]), &[db]).unwrap_err();
        assert_eq!(error.code, ErrorCode::InvalidVm);
        assert!(error.message.contains("taken by VM db"), "{error}");
        let made = vm("db", &[""]);
        let same = mac_text(made.default_mac(0)).to_uppercase();
        let error = allot(vm("web", &[&same]), &[made]).unwrap_err();
        assert!(error.message.contains("taken by VM db"), "{error}");
        let twice = vm("web", &["52:54:00:00:00:01", "52:54:00:00:00:01"]);
        let error = allot(twice, &[]).unwrap_err();
        assert!(
            error.message.contains("two network cards of VM web"),
            "{error}"
        );
    }

    #[test]
    fn an_edited_vm_keeps_the_mac_that_it_was_allotted() {
        let (a, b) = namesakes();
        let first = allot(vm(&a, &[""]), &[]).unwrap();
        let second = allot(vm(&b, &[""]), std::slice::from_ref(&first)).unwrap();
        // The other one is gone, and the address made from the name is free again.
        let edited = allot(vm(&b, &["", ""]), std::slice::from_ref(&second)).unwrap();
        assert_eq!(edited.mac(0), second.mac(0));
        assert_ne!(edited.mac(1), edited.mac(0));
        assert_eq!(
            allot(edited.clone(), std::slice::from_ref(&edited)).unwrap(),
            edited
        );
    }

    #[test]
    fn a_made_mac_does_not_take_one_that_another_card_of_the_vm_is_given() {
        let made = mac_text(vm("web", &[""]).default_mac(0));
        let spec = allot(vm("web", &["", &made]), &[]).unwrap();
        assert_eq!(spec.nics[1].mac.as_deref(), Some(made.as_str()));
        assert_ne!(spec.mac(0), spec.mac(1));
    }

    /// Host a answers and has this VM, which nobody described here.
    fn told(spec: VmSpec, on: VmState) -> State {
        let mut state = State::default();
        let mut entry = HostEntry::new("127.0.0.1:1".parse().unwrap(), String::new());
        let vm = HostVm {
            state: on,
            generation: Generation(1),
            claim: Claim::No,
            migration: None,
            accelerator: None,
            vm_process_pid: None,
            vm_process: None,
            qemu_pid: None,
            note: None,
            spec,
            disks: Vec::new(),
            images: Vec::new(),
            guest: None,
        };
        entry.vms.insert(vm.spec.name.clone(), vm);
        state.hosts.insert(HostName::new("a").unwrap(), entry);
        state
    }

    #[test]
    fn a_mac_that_only_a_host_tells_of_is_taken_too() {
        let mac = "52:54:00:00:00:01";
        let state = told(vm("far", &[mac]), VmState::Stopped);
        let error = super::allot(vm("web", &[mac]), &state).unwrap_err();
        assert!(error.message.contains("taken by VM far"), "{error}");
        let made = told(
            vm("far", &[&mac_text(vm("web", &[""]).default_mac(0))]),
            VmState::Stopped,
        );
        let web = super::allot(vm("web", &[""]), &made).unwrap();
        assert_ne!(web.mac(0), Some(web.default_mac(0)));
    }

    #[test]
    fn a_vm_does_not_start_with_the_mac_of_one_that_is_on() {
        let mac = "52:54:00:00:00:01";
        let web = vm("web", &[mac]);
        let state = told(vm("far", &[mac]), VmState::Running);
        let error = must_be_alone(&web, &state).unwrap_err();
        assert!(error.message.contains("VM far on host a"), "{error}");
        must_be_alone(&vm("far", &[mac]), &state).unwrap();
        must_be_alone(&web, &told(vm("far", &[mac]), VmState::Stopped)).unwrap();
    }

    #[test]
    fn the_next_one_after_the_last_is_the_first() {
        let mut choices = choices([0x52, 0x54, 0, 0xff, 0xff, 0xff]);
        choices.next();
        assert_eq!(choices.next(), Some([0x52, 0x54, 0, 0, 0, 0]));
    }
}
