//! The pause of a migration on the page: how long it was, and what it was made of.
//!
//! Pure. A part that is not known here is shown behind the others.

use super::svg::{Part, stacked_bar};
use super::{Migration, Report};
use crate::page::figure;
use crate::page::html::{Page, legend};
use serde_json::Value;

pub(super) fn section(page: &mut Page, report: &Report, migration: &Migration) {
    let promised = |migration: &Migration| Some(migration.promise.as_ref()?.max_downtime_ms);
    let verdict = migration
        .promise
        .as_ref()
        .map(|promise| match promise.kept {
            true => (true, "target met"),
            false => (false, "target missed"),
        });
    let parts = parts(migration);
    // One axis for all migrations, so that their bars can be compared.
    let reach = |migration: &Migration| {
        migration
            .switchover_ms
            .max(promised(migration).unwrap_or(0.0))
    };
    let longest = report.migrations.iter().map(reach).fold(1.0, f64::max);
    let key = |(index, part): (usize, &Part)| {
        let name = format!("{} {} ms", part.name, figure(part.value_ms));
        (format!("part{}", index % 6), false, name)
    };
    let keys: Vec<_> = parts.iter().enumerate().map(key).collect();
    let ms = figure(migration.switchover_ms);
    page.judged_card(
        &format!("Switchover: {ms} ms in which no vCPU ran anywhere"),
        verdict,
        &(stacked_bar(&parts, longest, promised(migration)) + &legend(&keys)),
    );
}

/// Names of the parts in the order in which they happen.
const PARTS: [(&str, &str); 7] = [
    ("stop_ms", "stop"),
    ("last_blocks_ms", "last blocks of disks"),
    ("last_pages_ms", "last pages"),
    ("device_save_ms", "save device state"),
    ("device_load_ms", "load device state"),
    ("permit_ms", "hand over the right to run"),
    ("resume_ms", "resume"),
];

/// Known parts in their order, then whatever else was reported.
fn parts(migration: &Migration) -> Vec<Part> {
    let given = &migration.switchover_parts_ms;
    let known = PARTS
        .iter()
        .filter_map(|(key, name)| given.get(*key).map(|value| (name.to_string(), value)));
    let unknown = given
        .iter()
        .filter(|(key, _)| PARTS.iter().all(|(known, _)| known != key));
    let unknown =
        unknown.map(|(key, value)| (key.trim_end_matches("_ms").replace(['_', '-'], " "), value));
    let part = |(name, value): (String, &Value)| {
        Some(Part {
            name,
            value_ms: value.as_f64()?.max(0.0),
        })
    };
    known.chain(unknown).filter_map(part).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_keep_their_order_and_unknown_ones_follow() {
        let mut migration = Migration::default();
        for (name, value) in [("resume_ms", 1.0), ("a_new_part_ms", 3.0), ("stop_ms", 2.0)] {
            migration
                .switchover_parts_ms
                .insert(name.into(), value.into());
        }
        let names: Vec<String> = parts(&migration)
            .into_iter()
            .map(|part| part.name)
            .collect();
        assert_eq!(names, ["stop", "resume", "a new part"]);
    }
}
