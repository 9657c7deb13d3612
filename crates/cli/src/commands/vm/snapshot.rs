//! `godwit vm snapshot`: has snapshots of a VM's disks taken, gone back to and deleted, and lists them as a tree.
//!
//! Owns nothing. Refuses nothing by itself.

use super::{controller, order};
use crate::args::{Global, VmSnapshotCommand};
use crate::exit::CommandResult;
use crate::figures::{amount, moment};
use crate::output::Output;
use crate::wait::{of_vm, saying};
use crate::watch::failure;
use godwit_rpc::ControllerClient;
use godwit_types::snapshots::{Quiesce, SnapshotRequest, SnapshotView, Snapshots, TakeSnapshot};
use godwit_types::text::listed;
use godwit_types::{SnapshotName, VmName};

pub(super) async fn snapshot(
    command: VmSnapshotCommand,
    global: &Global,
    output: &Output,
) -> CommandResult {
    match command {
        VmSnapshotCommand::Create {
            vm,
            name,
            text,
            quiesce,
            no_quiesce,
        } => {
            let quiesce = match (quiesce, no_quiesce) {
                (true, _) => Quiesce::Always,
                (false, true) => Quiesce::Never,
                (false, false) => Quiesce::IfPossible,
            };
            let wish = TakeSnapshot {
                name,
                text,
                quiesce,
            };
            let take = async |client: &ControllerClient| client.take_snapshot(&vm, &wish).await;
            order(&vm, take, global, output).await
        }
        VmSnapshotCommand::List { vm } => list(&vm, global, output).await,
        VmSnapshotCommand::Revert { vm, name } => {
            let wish = SnapshotRequest { name };
            let revert = async |client: &ControllerClient| client.revert_snapshot(&vm, &wish).await;
            order(&vm, revert, global, output).await
        }
        VmSnapshotCommand::Delete { vm, name } => {
            let wish = SnapshotRequest { name };
            let delete = async |client: &ControllerClient| client.delete_snapshot(&vm, &wish).await;
            order(&vm, delete, global, output).await
        }
    }
}

async fn list(vm: &VmName, global: &Global, output: &Output) -> CommandResult {
    let client = controller(global)?;
    let found = saying(of_vm(&client, vm), client.snapshots(vm)).await;
    let found = found.map_err(failure)?;
    output.show(&found, |output, found| {
        if found.snapshots.is_empty() {
            output.line(format!("VM '{vm}' has no snapshots"));
        } else {
            let header = ["SNAPSHOT", "TAKEN", "LIKE", "OWN IMAGES", "DISKS", "TEXT"];
            output.table(&header, rows(found));
        }
        if let Some(left) = left_of_deleted(found) {
            output.line(left);
        }
    });
    Ok(())
}

fn left_of_deleted(found: &Snapshots) -> Option<String> {
    let left = match found.unneeded_images {
        0 => return None,
        1 => "one image of deleted snapshots is merged while the guest runs".to_owned(),
        images => format!("{images} images of deleted snapshots are merged while the guest runs"),
    };
    Some(match found.why_unmerged.as_str() {
        "" => left,
        why => format!("{left}; not yet, since {why}"),
    })
}

/// A tree: what came after a snapshot is below it and further to the right.
fn rows(found: &Snapshots) -> Vec<Vec<String>> {
    let mut rows = Vec::new();
    let mut waiting: Vec<(&SnapshotView, usize)> =
        after(found, None).rev().map(|one| (one, 0)).collect();
    // What is told may be wrong: each has one row at most.
    while let Some((snapshot, depth)) = waiting.pop()
        && rows.len() < found.snapshots.len()
    {
        let is_now = found.after.as_ref() == Some(&snapshot.name);
        let mark = if is_now {
            "  <- the disks came after it"
        } else {
            ""
        };
        rows.push(vec![
            format!("{}{}{mark}", "  ".repeat(depth), snapshot.name),
            moment(snapshot.made_unix_s),
            like(snapshot).to_owned(),
            amount(snapshot.bytes),
            disks(snapshot),
            snapshot.text.clone(),
        ]);
        let name = Some(&snapshot.name);
        waiting.extend(after(found, name).rev().map(|one| (one, depth + 1)));
    }
    rows
}

/// How a guest finds its file systems that begins from it.
fn like(snapshot: &SnapshotView) -> &'static str {
    match snapshot.quiesced {
        true => "a shutdown",
        false => "a power cut",
    }
}

fn disks(snapshot: &SnapshotView) -> String {
    let disks = listed(&snapshot.disks);
    match snapshot.lacking.is_empty() {
        true => disks,
        false => format!("{disks} (of no use: {} lost it)", listed(&snapshot.lacking)),
    }
}

fn after<'a>(
    found: &'a Snapshots,
    name: Option<&'a SnapshotName>,
) -> impl DoubleEndedIterator<Item = &'a SnapshotView> {
    let all = found.snapshots.iter();
    all.filter(move |snapshot| snapshot.after.as_ref() == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(name: &str, after: Option<&str>) -> SnapshotView {
        let named = |name| SnapshotName::new(name).unwrap();
        SnapshotView {
            name: named(name),
            after: after.map(named),
            made_unix_s: 1_800_000_000,
            text: String::new(),
            quiesced: false,
            disks: vec!["root".into(), "data".into()],
            lacking: Vec::new(),
            bytes: 3 << 20,
        }
    }

    #[test]
    fn snapshots_are_listed_below_the_one_that_they_came_after() {
        let found = Snapshots {
            snapshots: vec![
                view("clean", None),
                view("updated", Some("clean")),
                view("other", Some("clean")),
                view("later", Some("updated")),
            ],
            after: Some(SnapshotName::new("other").unwrap()),
            unneeded_images: 2,
            why_unmerged: "disk 'root' is full".into(),
        };
        let names: Vec<String> = rows(&found).into_iter().map(|row| row[0].clone()).collect();
        assert_eq!(
            names,
            [
                "clean",
                "  updated",
                "    later",
                "  other  <- the disks came after it"
            ]
        );
        assert_eq!(
            rows(&found)[0][2..5],
            ["a power cut", "3.0 MiB", "root, data"]
        );
        let left = left_of_deleted(&found).unwrap();
        assert!(left.starts_with("2 images"), "{left}");
        assert!(left.ends_with("since disk 'root' is full"), "{left}");
        let lost = SnapshotView {
            lacking: vec!["data".into()],
            ..view("lost", None)
        };
        assert_eq!(disks(&lost), "root, data (of no use: data lost it)");
    }
}
