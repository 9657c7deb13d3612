//! What the VM's thread does for a disk that is limited, or limited no more.
//!
//! Part of [`Vm`]. The VM's description says what its limits are: it is written first, and what serves the disk follows, now or when it
//! begins. Refuses: a VM that this host does not hold, one that moves, whose description is under way, and disks that QEMU itself serves.

use crate::hypervisor::internal;
use crate::requests::Reply;
use crate::vm::Vm;
use godwit_store::save_json;
use godwit_types::disk_activity::LimitDisk;
use godwit_types::host_api::{SPEC_FILE, VmAnswer};
use godwit_types::{ApiError, ErrorCode};

impl Vm {
    pub(crate) fn limit_disk(&mut self, wish: &LimitDisk) -> Reply {
        self.refuse_while_closing()?;
        self.refuse_while_moving()?;
        let host = self.config.host.clone();
        let (vm, name) = (&self.config.vm, &wish.disk);
        wish.check().map_err(|error| error.on_host(&host))?;
        let refused = |code, message: String| Err(ApiError::new(code, message).on_host(&host));
        if self
            .core
            .record()
            .power()
            .and(self.core.record().may_run())
            .is_none()
        {
            let message = format!("VM '{vm}' is not held by host '{host}' now");
            return refused(ErrorCode::WrongState, message);
        }
        let mut spec = self.host_vm()?.spec;
        let Some(disk) = spec.disks.iter_mut().find(|disk| disk.name == *name) else {
            let message = format!("VM '{vm}' has no disk '{name}'");
            return refused(ErrorCode::InvalidRequest, message);
        };
        disk.limits = wish.limits;
        if let Err(why) = spec.check_boots() {
            return refused(ErrorCode::InvalidRequest, why.to_string());
        }
        save_json(&self.paths.state.join(SPEC_FILE), &spec).map_err(internal)?;
        if let Some(hyper) = &self.hyper {
            hyper.disks.limit(&spec.disks);
        }
        self.spec = Some(spec);
        let said = format!("disk '{name}' of VM '{}': {}", self.config.vm, wish.limits);
        Ok(VmAnswer::Done(said))
    }
}
