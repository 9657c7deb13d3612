//! Settling a VM that is in doubt, by a person's word.
//!
//! Owns nothing; the VM's process decides by its record. Refuses, also to a controller: to run a VM on before the site was
//! asked, and against what crate `site` finds in the answers.

use crate::agent::{Agent, Reply};
use crate::boot;
use godwit_rpc::Peer;
use godwit_types::control_api::Done;
use godwit_types::host_api::{HostResolve, VmRequest};
use godwit_types::{ApiError, ErrorCode, HostName, VmName};
use std::sync::Arc;

impl Agent {
    /// Settles a VM that is in doubt, as `caller` says.
    pub(crate) async fn resolve(
        self: &Arc<Self>,
        name: &VmName,
        caller: &Peer,
        request: HostResolve,
    ) -> Reply<Done> {
        self.known(name)?;
        let run_here = request.run_on == *self.host() && !request.give_up;
        let confirm_fenced = request.confirm_fenced;
        if run_here {
            // A controller has had that host say no, or has found it silent.
            let has_its_no = *caller == Peer::Controller;
            let off = confirm_fenced.as_ref();
            self.must_not_be_known_better(name, off, has_its_no).await?;
        }
        let resolve = VmRequest::Resolve {
            run_here,
            confirm_fenced,
        };
        self.act(name, resolve).await
    }

    /// This host may have been removed, or its disk be an old copy, on which a doubt stands that ended long ago: whoever
    /// answers is heard before a person's word counts. Who is silent is what the person answers for.
    async fn must_not_be_known_better(
        self: &Arc<Self>,
        name: &VmName,
        off: Option<&HostName>,
        has_its_no: bool,
    ) -> Reply<()> {
        let held = self.records.read(name)?.held;
        let (mut asking, mut answers) = self.ask_about(name, held);
        while let Some(answer) = answers.join_next().await {
            boot::hear(&mut asking, answer);
        }
        match asking.refuses_word(name, off, has_its_no) {
            Some(why) => Err(ApiError::new(
                ErrorCode::WrongState,
                format!("VM {name} does not run on here by a person's word: {why}"),
            )
            .on_host(self.host())),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
#[path = "resolve_tests.rs"]
mod tests;
