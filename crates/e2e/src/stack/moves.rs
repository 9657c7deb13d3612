//! Moves of a stack's VMs, and what is left of them afterwards.
//!
//! Owns nothing. Refuses: a move that ends otherwise than completed where one must complete.

use super::{LONG, SOON, Stack};
use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

impl Stack {
    /// Moves a VM and gives the report, which must say that it completed.
    pub fn migrate(&self, vm: &str, to: &str, arguments: &[&str]) -> Result<Value> {
        let id = self.begin(vm, to, arguments)?;
        self.completed(&id)
    }

    /// Begins a move and gives its id.
    pub fn begin(&self, vm: &str, to: &str, arguments: &[&str]) -> Result<String> {
        let command = ["vm", "migrate", vm, "--to", to, "--detach"];
        let begun = self.json("controller", &[&command, arguments].concat())?;
        Ok(begun["id"].as_str().context("no id")?.to_owned())
    }

    /// What a dry run of a move that nothing speaks against says. Any pause is allowed: the controller foresees the one
    /// of the VM's last migration, and that one can have been long on a busy machine.
    pub fn could_migrate(&self, vm: &str, to: &str) -> Result<Value> {
        let any_pause = ["--max-downtime", "60000"];
        let command = ["vm", "migrate", vm, "--to", to, "--dry-run"];
        self.json("controller", &[&command[..], &any_pause].concat())
    }

    /// A migration as the controller sees it.
    pub fn migration(&self, id: &str) -> Result<Value> {
        self.json("controller", &["migration", "show", id])
    }

    /// Waits until a migration copies memory.
    pub fn wait_precopy(&self, id: &str) -> Result<()> {
        self.until(&format!("migration {id} copies"), SOON, || {
            let report = self.migration(id)?;
            ensure!(
                report["outcome"].is_null(),
                "it is over already: {}",
                report["reason"]
            );
            Ok(report["phase"] == "precopy")
        })
    }

    /// Waits until a migration has ended, by a machine's word.
    pub fn ended(&self, machine: &str, id: &str) -> Result<Value> {
        let last = std::cell::RefCell::new(Value::Null);
        self.until(&format!("migration {id} ends"), LONG, || {
            let report = self.json(machine, &["migration", "show", id])?;
            let over = !report["outcome"].is_null() && report["outcome"] != "in-doubt";
            last.replace(report);
            Ok(over)
        })?;
        Ok(last.into_inner())
    }

    /// Waits until a migration has ended; it must have completed.
    pub fn completed(&self, id: &str) -> Result<Value> {
        let report = self.ended("controller", id)?;
        ensure!(
            report["outcome"] == "completed",
            "migration {id} did not complete: {}; {}",
            report["reason"],
            self.logs()
        );
        Ok(report)
    }

    /// Waits until a VM runs on a host by the controller's word and the other host has neither memory nor QEMU of it.
    pub fn runs_on(&self, vm: &str, host: &str) -> Result<()> {
        self.until(&format!("VM {vm} runs on host {host}"), SOON, || {
            let view = self.vm(vm)?;
            Ok(view["state"] == "running" && view["host"] == host)
        })?;
        self.is_clean(vm, if host == "a" { "b" } else { "a" })
    }

    /// Waits until a host has no memory, no QEMU and no right of a VM.
    pub fn is_clean(&self, vm: &str, host: &str) -> Result<()> {
        self.until(&format!("host {host} is clean of {vm}"), SOON, || {
            let files = self.ram_files(vm, host)?;
            ensure!(files.is_empty(), "RAM files: {files:?}");
            let processes = self.hypervisors(vm, host)?;
            ensure!(processes.is_empty(), "processes: {processes:?}");
            let known = self.json(host, &["vm", "list"])?;
            let mut known = known.as_array().into_iter().flatten();
            let holds =
                known.any(|one| one["spec"]["name"] == vm && one["claim"]["claim"] == "holds");
            Ok(!holds)
        })
    }
}
