//! `godwit vm`: everything about VMs.
//!
//! Owns nothing. Refuses: descriptions that are not valid, before anybody is asked.

use crate::args::{Global, VmCommand, VmLimitDisk, VmMigrate, VmResizeDisk, VmStop, without};
use crate::commands::{console, site};
use crate::connect::{Reader, controller, reader, tell_own};
use crate::exit::{CANNOT_KEEP, CommandResult, Failure, REFUSED};
use crate::figures::seconds;
use crate::output::Output;
use crate::plain;
use crate::wait::{of_vm, saying};
use crate::watch::{failure, watch};
use godwit_rpc::controller_client::MigrateAnswer;
use godwit_rpc::{AgentClient, ClientError, ControllerClient};
use godwit_store::read_regular;
use godwit_types::control_api::{Done, KeepRequest, ResolveRequest, StopRequest, VmView};
use godwit_types::disk_activity::LimitDisk;
use godwit_types::disk_resize::ResizeDisk;
use godwit_types::migration::{MigrateRequest, PreflightReport};
use godwit_types::vm::{DiskLimits, USER_DATA_LEN_MAX, VmState};
use godwit_types::{ErrorCode, HostName, MigrationId, VmName, VmSpec};
use std::fmt::Display;
use std::path::Path;
use std::time::{Duration, Instant};

mod cloned;
mod disk_bar;
mod move_disk;
mod snapshot;
mod start;
mod stop;

/// Carries a command out.
pub async fn run(command: VmCommand, global: &Global, output: &Output) -> CommandResult {
    match command {
        VmCommand::Create { file } => {
            let spec = read_spec(&file)?;
            let view = controller(global)?.create_vm(&spec).await;
            made(view, output, "created; start it with 'godwit vm start")
        }
        VmCommand::Edit { vm, file } => {
            let spec = read_spec(&file)?;
            same_name(&vm, &spec, &file)?;
            let view = controller(global)?.edit_vm(&spec).await;
            made(view, output, "changed; start it with 'godwit vm start")
        }
        VmCommand::List => list(global, output).await,
        VmCommand::Show { vm } => show(&vm, global, output).await,
        VmCommand::Start { vm, on } => start::start(&vm, on, global, output).await,
        VmCommand::Stop(arguments) => stopped(arguments, global, output).await,
        VmCommand::Reset { vm } => {
            let reset = async |client: &ControllerClient| client.reset(&vm).await;
            order(&vm, reset, global, output).await
        }
        VmCommand::Renew { vm, host, .. } => renew(vm, host, global, output).await,
        VmCommand::Pause { vm } => {
            let pause = async |client: &ControllerClient| client.pause(&vm).await;
            order(&vm, pause, global, output).await
        }
        VmCommand::Resume { vm } => {
            let resume = async |client: &ControllerClient| client.resume(&vm).await;
            order(&vm, resume, global, output).await
        }
        VmCommand::Delete { vm } => delete(&vm, global, output).await,
        VmCommand::ForgetRecord { vm, yes } => site::forget_record(&vm, yes, global, output).await,
        VmCommand::Resolve {
            vm,
            keep: Some(host),
            ..
        } => {
            let request = KeepRequest { host };
            let keep = async |client: &ControllerClient| client.keep(&vm, &request).await;
            order(&vm, keep, global, output).await
        }
        VmCommand::Resolve {
            vm,
            run_on,
            give_up_on,
            confirm_fenced,
            keep: None,
        } => {
            let request = ResolveRequest {
                give_up: give_up_on.is_some(),
                run_on: run_on
                    .or(give_up_on)
                    .ok_or_else(|| Failure::new(ErrorCode::InvalidRequest, "no host was named"))?,
                confirm_fenced,
            };
            told(resolve(&vm, &request, global).await?, output)
        }
        VmCommand::MoveDisk(arguments) => move_disk::move_disk(arguments, global, output).await,
        VmCommand::ResizeDisk(arguments) => resize_disk(arguments, global, output).await,
        VmCommand::LimitDisk(arguments) => limit_disk(arguments, global, output).await,
        VmCommand::Clone(arguments) => cloned::clone_vm(arguments, global, output).await,
        VmCommand::Snapshot(command) => snapshot::snapshot(command, global, output).await,
        VmCommand::Migrate(arguments) => migrate(arguments, global, output).await,
        VmCommand::Console { vm, host, print } => {
            console::console(vm, host, print, global, output).await
        }
    }
}

/// Has the controller carry out one command about a VM, and says what became of it.
async fn order(
    vm: &VmName,
    ordered: impl AsyncFnOnce(&ControllerClient) -> Result<Done, ClientError>,
    global: &Global,
    output: &Output,
) -> CommandResult {
    let client = controller(global)?;
    told(saying(of_vm(&client, vm), ordered(&client)).await, output)
}

async fn delete(vm: &VmName, global: &Global, output: &Output) -> CommandResult {
    let delete = async |client: &ControllerClient| client.delete_vm(vm).await;
    order(vm, delete, global, output).await
}

async fn resize_disk(arguments: VmResizeDisk, global: &Global, output: &Output) -> CommandResult {
    let VmResizeDisk { vm, disk, size_gib } = arguments;
    let wish = ResizeDisk { disk, size_gib };
    let resize = async |client: &ControllerClient| client.resize_disk(&vm, &wish).await;
    order(&vm, resize, global, output).await
}

async fn limit_disk(arguments: VmLimitDisk, global: &Global, output: &Output) -> CommandResult {
    let VmLimitDisk {
        vm,
        disk,
        iops,
        mib_per_s,
        none: _,
    } = arguments;
    let limits = DiskLimits { iops, mib_per_s };
    let wish = LimitDisk { disk, limits };
    let limit = async |client: &ControllerClient| client.limit_disk(&vm, &wish).await;
    order(&vm, limit, global, output).await
}

/// By the controller, or by this host's own agent while no controller answers.
async fn renew_one(vm: &VmName, global: &Global) -> Result<Result<Done, ClientError>, Failure> {
    Ok(match reader(global).await? {
        Reader::Controller(client) => saying(of_vm(&client, vm), client.renew(vm)).await,
        Reader::Agent(client) => client.renew(vm).await,
    })
}

async fn renew(
    vm: Option<VmName>,
    host: Option<HostName>,
    global: &Global,
    output: &Output,
) -> CommandResult {
    match vm {
        Some(vm) => told(renew_one(&vm, global).await?, output),
        None => renew_all(host.as_ref(), global, output).await,
    }
}

/// Renews one VM process after the other; one that cannot be is told and keeps none of the others from it.
async fn renew_all(host: Option<&HostName>, global: &Global, output: &Output) -> CommandResult {
    let is_on = |state: VmState| !state.is_off();
    let vms: Vec<VmName> = match reader(global).await? {
        Reader::Controller(client) => {
            let vms = client.vms().await.map_err(failure)?.into_iter();
            let wanted =
                vms.filter(|vm| is_on(vm.state) && (host.is_none() || vm.host.as_ref() == host));
            wanted.map(|vm| vm.spec.name).collect()
        }
        Reader::Agent(client) => {
            must_be(&client, host).await?;
            let vms = client.vms().await.map_err(failure)?.into_iter();
            let wanted = vms.filter(|vm| is_on(vm.state));
            wanted.map(|vm| vm.spec.name).collect()
        }
    };
    if vms.is_empty() {
        output.line("No VM is running there.");
    }
    let mut last = Ok(());
    for vm in vms {
        if let Err(error) = told(renew_one(&vm, global).await?, output) {
            plain::tell(&error.error.message);
            last = Err(error);
        }
    }
    last
}

/// By the controller, or by this host's own agent while no controller answers.
async fn resolve(
    vm: &VmName,
    request: &ResolveRequest,
    global: &Global,
) -> Result<Result<Done, ClientError>, Failure> {
    Ok(match reader(global).await? {
        Reader::Controller(client) => saying(of_vm(&client, vm), client.resolve(vm, request)).await,
        Reader::Agent(client) => client.resolve(vm, request).await,
    })
}

async fn stopped(arguments: VmStop, global: &Global, output: &Output) -> CommandResult {
    let (vm, force) = (&arguments.vm, arguments.force);
    let seconds = |given: Option<u64>| given.map(Duration::from_secs);
    match (seconds(arguments.timeout), seconds(arguments.wait)) {
        (Some(within), _) => stop::ask_first(vm, force, within, global, output).await,
        (None, Some(within)) => stop::and_wait(vm, force, within, global, output).await,
        (None, None) => told(stop(vm, force, arguments.host, global).await?, output),
    }
}

/// By the controller; the copy of a named host also by that host's own agent while no controller answers.
async fn stop(
    vm: &VmName,
    force: bool,
    host: Option<HostName>,
    global: &Global,
) -> Result<Result<Done, ClientError>, Failure> {
    let request = StopRequest { force };
    let Some(host) = host else {
        let client = controller(global)?;
        return Ok(saying(of_vm(&client, vm), client.stop(vm, &request)).await);
    };
    Ok(match reader(global).await? {
        Reader::Controller(client) => {
            saying(of_vm(&client, vm), client.stop_at(vm, &host, &request)).await
        }
        Reader::Agent(client) => {
            must_be(&client, Some(&host)).await?;
            client.stop(vm, &request).await
        }
    })
}

/// An agent answers for its own host only.
pub async fn must_be(client: &AgentClient, host: Option<&HostName>) -> CommandResult {
    let Some(host) = host else { return Ok(()) };
    let own = client.host().await.map_err(failure)?.name;
    match own == *host {
        true => Ok(()),
        false => Err(Failure::new(
            ErrorCode::HostUnreachable,
            format!(
                "no controller answers, and this is host {own}: run this on host {host}, or where the controller runs"
            ),
        )),
    }
}

/// The user data that a description names: beside that, where its path does not begin at the root. Only a regular file is read.
fn read_user_data(description: &Path, named: &str) -> Result<String, String> {
    let path = description.parent().unwrap_or(Path::new("")).join(named);
    let path_shown = path.display();
    let cannot =
        |why: &dyn Display| format!("cannot read {path_shown}, the `user_data_file`: {why}");
    // One byte more shows that it is too long.
    let read = read_regular(&path, USER_DATA_LEN_MAX as u64);
    let read = read.map_err(|error| cannot(&error))?;
    let content = read.ok_or_else(|| cannot(&"there is no such file"))?;
    if content.len() > USER_DATA_LEN_MAX {
        return Err(format!(
            "{path_shown}, the `user_data_file`, has more than {USER_DATA_LEN_MAX} bytes: have it fetch the rest, as with `#include`"
        ));
    }
    String::from_utf8(content).map_err(|_| cannot(&"it is no text in UTF-8"))
}

fn read_spec(file: &Path) -> Result<VmSpec, Failure> {
    let text = std::fs::read_to_string(file).map_err(|error| {
        let message = format!(
            "cannot read {}: {error}; give the path of a VM description",
            file.display()
        );
        Failure::new(ErrorCode::InvalidVm, message)
    })?;
    VmSpec::from_toml_with(&text, |named| read_user_data(file, named)).map_err(|why| {
        let message = format!("{}: {why}", file.display());
        Failure::new(ErrorCode::InvalidVm, message)
    })
}

fn same_name(vm: &VmName, spec: &VmSpec, file: &Path) -> CommandResult {
    if *vm == spec.name {
        return Ok(());
    }
    let message = format!(
        "{} describes VM '{}', not '{vm}': names do not change",
        file.display(),
        spec.name
    );
    Err(Failure::new(ErrorCode::InvalidVm, message))
}

fn told(done: Result<Done, ClientError>, output: &Output) -> CommandResult {
    output.show(&done.map_err(failure)?, |output, done| {
        output.line(&done.message)
    });
    Ok(())
}

fn made(view: Result<VmView, ClientError>, output: &Output, what: &str) -> CommandResult {
    let mut view = view.map_err(failure)?;
    hide_user_data(&mut view.spec);
    output.show(&view, |output, view| {
        let name = &view.spec.name;
        output.line(format!("VM '{name}' is {what} {name}'"));
    });
    Ok(())
}

/// Leaves how long it is. Who wants to see the text asks for that VM alone: answers to other commands are kept in logs of scripts.
fn hide_user_data(spec: &mut VmSpec) {
    let told = spec.cloud_init.as_mut();
    if let Some(text) = told.and_then(|told| told.user_data.as_mut()) {
        *text = format!("{} bytes", text.len());
    }
}

async fn list(global: &Global, output: &Output) -> CommandResult {
    match reader(global).await? {
        Reader::Controller(client) => {
            let alarms = site::alarms(&client, output).await;
            let mut vms = client.vms().await.map_err(failure)?;
            vms.iter_mut().for_each(|vm| hide_user_data(&mut vm.spec));
            output.show(&vms, |output, vms| output.vms(vms));
            return alarms;
        }
        Reader::Agent(client) => {
            let mut vms = client.vms().await.map_err(failure)?;
            vms.iter_mut().for_each(|vm| hide_user_data(&mut vm.spec));
            tell_own(global, output);
            output.show(&vms, |output, vms| output.host_vms(vms));
        }
    }
    Ok(())
}

async fn show(vm: &VmName, global: &Global, output: &Output) -> CommandResult {
    match reader(global).await? {
        Reader::Controller(client) => {
            let alarms = site::alarms(&client, output).await;
            let view = client.vm(vm).await.map_err(failure)?;
            output.show(&view, |output, view| output.vm(view));
            return alarms;
        }
        Reader::Agent(client) => {
            let view = client.vm(vm).await.map_err(failure)?;
            tell_own(global, output);
            output.show(&view, |output, view| {
                output.host_vms(std::slice::from_ref(view))
            });
        }
    }
    Ok(())
}

async fn migrate(arguments: VmMigrate, global: &Global, output: &Output) -> CommandResult {
    let request = MigrateRequest {
        to: arguments.to,
        encryption: arguments.encryption.map(Into::into),
        max_downtime_ms: arguments.max_downtime,
        deadline_s: arguments.deadline,
        max_bandwidth_mbit_per_s: arguments.max_bandwidth,
        max_guest_slowdown_percent: arguments.max_guest_slowdown,
        prepare: arguments.prepare,
        must_keep: arguments.must_keep,
        dry_run: arguments.dry_run,
        disks: arguments.disks.into_iter().collect(),
        method: arguments.method.into(),
        without: without(arguments.no_incremental, arguments.no_hot_blocks),
    };
    let client = controller(global)?;
    let asked = Instant::now();
    let begins = client.migrate(&arguments.vm, &request);
    let begun = saying(of_vm(&client, &arguments.vm), begins).await;
    match begun.map_err(failure)? {
        MigrateAnswer::Checked(report) => checked(&report, output),
        MigrateAnswer::Begun(begun) if arguments.detach => {
            output.show(&begun, |output, begun| {
                output.line(format!(
                    "migration {0} has begun; watch it with 'godwit migration watch {0}'",
                    begun.id
                ));
                begun.warnings.iter().for_each(|text| warn(text));
            });
            Ok(())
        }
        MigrateAnswer::Begun(begun) => {
            let id = MigrationId::new(begun.id.clone())
                .map_err(|error| Failure::new(ErrorCode::Internal, error.to_string()))?;
            if !output.json {
                begun.warnings.iter().for_each(|text| warn(text));
                plain::tell(&format!(
                    "migration {id}: began after {} of checks; Ctrl-C stops watching; the migration continues",
                    seconds(asked.elapsed().as_secs_f64())
                ));
            }
            watch(&Reader::Controller(client), &id, output).await
        }
    }
}

/// What will probably not be kept; the migration goes on.
fn warn(text: &str) {
    crate::plain::tell(&format!("WARNING: {text}"));
}

fn checked(report: &PreflightReport, output: &Output) -> CommandResult {
    output.show(report, |output, report| output.preflight(report));
    match (report.refusals.is_empty(), report.cannot_keep.is_empty()) {
        (true, true) => Ok(()),
        (true, false) => Err(Failure::told(CANNOT_KEEP)),
        (false, _) => Err(Failure::told(REFUSED)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(user_data_file: &str) -> String {
        format!(
            "name = \"web\"\nvcpus = 1\nmemory_mib = 64\nkernel = \"/k\"\n[cloud_init]\nuser_data_file = \"{user_data_file}\"\n"
        )
    }

    #[test]
    fn a_list_of_vms_says_how_long_user_data_is_and_not_what() {
        let read = |_: &str| Ok("#!secret".to_owned());
        let mut spec = VmSpec::from_toml_with(&told("web.sh"), read).unwrap();
        hide_user_data(&mut spec);
        let shown = serde_json::to_string(&spec).unwrap();
        assert!(shown.contains("8 bytes"), "{shown}");
        assert!(!shown.contains("secret"), "{shown}");
    }

    /// The command waited for ever for who would write into a pipe.
    #[test]
    fn a_user_data_file_that_is_no_file_is_refused_at_once() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        rustix::fs::mkfifoat(rustix::fs::CWD, at("pipe"), 0o600.into()).unwrap();
        std::fs::write(at("long"), "#".repeat(USER_DATA_LEN_MAX + 1)).unwrap();
        std::fs::write(at("bytes"), b"#!\xff").unwrap();
        std::fs::write(at("web.sh"), "#!/bin/sh\n").unwrap();
        for (name, why) in [
            ("pipe", "it is a named pipe, not a file"),
            ("none", "there is no such file"),
            ("long", "has more than 16384 bytes"),
            ("bytes", "it is no text in UTF-8"),
        ] {
            std::fs::write(at("web.toml"), told(name)).unwrap();
            let refused = read_spec(&at("web.toml")).unwrap_err().error.message;
            assert!(refused.contains(why), "{refused}");
        }
        std::fs::write(at("web.toml"), told("web.sh")).unwrap();
        let user_data = read_spec(&at("web.toml")).unwrap().cloud_init.unwrap();
        assert_eq!(user_data.user_data.as_deref(), Some("#!/bin/sh\n"));
    }
}
