//! Whether a person's word lets this host run a VM of which only another host knows the outcome.
//!
//! Part of [`HostSite`]. The word stands for the silent one alone. Refuses it: where that host answers, where somebody who
//! answers knows of a later holder, and at a host that was removed or is an older copy of itself.

use super::{Answerer, HostSite, Judged};
use crate::plant::Plant;
use godwit_types::{Generation, HostName, VmName};
use std::collections::BTreeMap;

impl HostSite {
    /// What this host knows, to ask the site about one VM that it held under `held`, beside the questions before a boot.
    pub fn asking_about(&self, vm: &VmName, held: Generation) -> Self {
        let mut asking = self.clone();
        asking.forget_answers();
        asking.wishes = BTreeMap::new();
        asking.refuted.retain(|refuted, _| refuted == vm);
        asking.wish(vm.clone(), held);
        asking
    }

    /// Why the VM does not run on here on a person's word that host `off` is powered off; nothing when nobody who answered
    /// speaks against it. To be asked once all were heard out. What that host did with the VM is lost by the word, and is no
    /// reason against it. A controller has asked it itself (`has_its_no`) before it carries the word.
    pub fn refuses_word(
        &self,
        vm: &VmName,
        off: Option<&HostName>,
        has_its_no: bool,
    ) -> Option<String> {
        if self.planted(Plant::WordUnheard) {
            return None;
        }
        if let Some(why) = self.not_itself() {
            return Some(why);
        }
        let held = self.wishes.get(vm).copied()?;
        let answers = |off: &&HostName| self.answers.contains_key(&Answerer::Host((*off).clone()));
        let gone = off.filter(|off| !answers(off));
        let against = self.against_but_for(vm, held, gone);
        if let Some(Judged::Never(why) | Judged::Yield(why)) = against {
            return Some(why);
        }
        if let Some(off) = off.filter(answers)
            && !has_its_no
        {
            return Some(format!(
                "host {off} answers, so that it is not powered off: what is in doubt ends by itself when the VM's processes on both hosts reach each other; power {off} off first to decide otherwise"
            ));
        }
        self.owes_a_word(vm, held)
    }
}
