//! Copies of a VM's disks for another VM, made by the VM's process.
//!
//! Part of [`Agent`]; owns nothing. Refuses: a description that is not valid, and to begin while the host shuts down.

use super::{ACT, Agent, NEED, Reply, unexpected};
use godwit_types::clones::{CloneDisks, Cloning};
use godwit_types::host_api::{VmAnswer, VmRequest};
use godwit_types::{ApiError, ErrorCode, VmName};

impl Agent {
    /// Has disks copied, or goes on with that.
    pub(crate) async fn clone_disks(&self, vm: &VmName, wish: CloneDisks) -> Reply<Cloning> {
        let checked = wish.spec.check();
        checked.map_err(|error| ApiError::new(ErrorCode::InvalidVm, error.to_string()))?;
        self.closing.refuse(self.host())?;
        self.ask_of_clone(vm, VmRequest::CloneDisks(Box::new(wish)))
            .await
    }

    /// How far they are.
    pub(crate) async fn cloning(&self, vm: &VmName) -> Reply<Cloning> {
        self.ask_of_clone(vm, VmRequest::Cloning).await
    }

    async fn ask_of_clone(&self, vm: &VmName, request: VmRequest) -> Reply<Cloning> {
        let process = self.known(vm)?;
        process.need(NEED).await?;
        match process.ask(&request, ACT).await? {
            VmAnswer::Cloning(cloning) => Ok(*cloning),
            _ => Err(unexpected(vm)),
        }
    }
}
