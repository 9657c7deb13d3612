//! What the VM's thread does for a disk that is limited, or limited no more.
//!
//! Part of [`Vm`]. The VM's description says what its limits are: it is written first, and what serves the disk follows, now or when it
//! begins. Refuses: a VM that this host does not hold, one that moves, whose description is under way, and disks that QEMU itself serves.

use crate::disks::has_no_disk;
use crate::hypervisor::internal;
use crate::requests::Reply;
use crate::vm::Vm;
use godwit_store::save_json;
use godwit_types::disk_activity::LimitDisk;
use godwit_types::host_api::VmAnswer;
use godwit_types::{ApiError, ErrorCode};

impl Vm {
    pub(crate) fn limit_disk(&mut self, wish: &LimitDisk) -> Reply {
        self.refuse_while_closing()?;
        self.refuse_while_moving()?;
        let host = &self.config.host;
        wish.check().map_err(|error| error.on_host(host))?;
        self.must_hold()?;
        let mut spec = self.host_vm()?.spec;
        let disk = spec.disks.iter_mut().find(|disk| disk.name == wish.disk);
        let disk = disk.ok_or_else(|| has_no_disk(&self.config, &wish.disk))?;
        disk.limits = wish.limits;
        spec.check_boots().map_err(|why| {
            ApiError::new(ErrorCode::InvalidRequest, why.to_string()).on_host(host)
        })?;
        save_json(&self.paths.spec(), &spec).map_err(internal)?;
        if let Some(hyper) = &self.hyper {
            hyper.disks.limit(&spec.disks);
        }
        self.spec = Some(spec);
        let (vm, name) = (&self.config.vm, &wish.disk);
        let said = format!("disk '{name}' of VM '{vm}': {}", wish.limits);
        Ok(VmAnswer::Done(said))
    }
}
