//! Migrations that the simulated controller begins, hears of and follows to their end.
//!
//! Owns nothing: the moves under way are the simulated controller's. Refuses: a move that the book does not permit.

use super::controller::{Change, Move, Purpose};
use super::jobs::{Kind, Stage};
use super::model::{Ask, NameId, Report, VmId};
use super::own_files::STORES;
use super::world::Site;
use godwit_ownership::Event;
use godwit_site::Whereabouts;
use godwit_types::site::Claim;
use godwit_types::{HostName, MigrationId};

impl Site {
    pub(super) fn begin_move(&mut self, controller: usize, id: u64, vm: VmId, to: NameId) {
        let (name, dest) = (self.vms[vm].clone(), self.names[to].clone());
        let book = &self.controllers[controller].book;
        let from = match book.whereabouts(&name) {
            Whereabouts::Held {
                host,
                answers: true,
            } => host,
            _ => return self.end_job(controller, id),
        };
        let of = &self.controllers[controller];
        let is_moving = of.db.moves.values().any(|begun| begun.vm == vm);
        if from == dest || is_moving {
            return self.end_job(controller, id);
        }
        let book = &mut self.controllers[controller].book;
        let permission = match book.permit_migration(&name, &from, &dest) {
            Ok(permitted) => permitted,
            Err(refusal) => return self.refused(controller, id, &refusal),
        };
        self.migrations += 1;
        let number = self.migrations;
        let (Ok(migration), Some(source)) =
            (MigrationId::new(format!("m{number}")), self.id_of(&from))
        else {
            return self.end_job(controller, id);
        };
        // Where its disk comes to there is the controller's to choose.
        let any = self.rng.index(STORES);
        let kept = &self.machines[self.address[to]].slots[vm].own.files.kept;
        let place = kept.first().map_or(any, |kept| kept.place);
        self.specs.insert(migration.clone(), place);
        let generation = permission.generation;
        let begun = Move {
            vm,
            from: from.clone(),
            to: dest.clone(),
            began: self.now,
        };
        let change = Change::Begun(migration.clone(), begun);
        if !self.commit(controller, &[change]) {
            return self.end_job(controller, id);
        }
        self.coverage.migrations[0] += 1;
        self.was_named(controller, vm);
        let event = Event::MigrationBegan {
            migration: migration.clone(),
            to: dest,
            generation,
        };
        let prepare = Event::PrepareIncoming {
            migration: migration.clone(),
            from,
            generation,
        };
        let stage = Stage::Prepare {
            migration,
            event,
            from: source,
        };
        self.set_stage(controller, id, stage);
        let what = Ask::Do {
            vm,
            event: prepare,
            discards: false,
        };
        self.ask(controller, to, what, Purpose::Job(id));
    }

    pub(crate) fn take_reports(&mut self, controller: usize, host: &HostName, reports: &[Report]) {
        for report in reports {
            let moves = &self.controllers[controller].db.moves;
            let Some(begun) = moves.get(&report.migration) else {
                continue;
            };
            let from_source = begun.from == *host;
            let counts = from_source || begun.to == *host && report.completed;
            if counts {
                self.move_over(controller, &report.migration.clone(), report.completed);
            }
        }
    }

    fn move_over(&mut self, controller: usize, id: &MigrationId, completed: bool) {
        let of = &mut self.controllers[controller];
        let Some(begun) = of.db.moves.get(id).cloned() else {
            return;
        };
        let other = match completed {
            true => &begun.from,
            false => &begun.to,
        };
        let name = &self.vms[begun.vm];
        of.book
            .migration_ended(name, &begun.from, &begun.to, completed);
        if self.commit(controller, &[Change::Over(id.clone())]) {
            self.coverage.reports += 1;
            if let Some(host) = self.id_of(other) {
                self.begin(controller, begun.vm, Kind::Clean { host });
            }
        }
    }

    /// A migration whose report never came: the journals say whether it is over.
    pub(crate) fn follow_moves(&mut self, controller: usize) {
        let of = &self.controllers[controller];
        let mut over = Vec::new();
        for (id, begun) in &of.db.moves {
            if self.now < begun.began + MOVE_MS {
                continue;
            }
            let claims = of.book.claims(&self.vms[begun.vm]);
            let completed = match claims.get(&begun.from) {
                Some(Claim::Moved { .. }) => Some(true),
                Some(Claim::Holds { .. }) => Some(false),
                Some(Claim::Gave { .. } | Claim::Promised { .. }) => None,
                Some(Claim::No | Claim::Receiving { .. }) | None => Some(false),
            };
            over.extend(completed.map(|completed| (id.clone(), completed)));
        }
        for (id, completed) in over {
            self.move_over(controller, &id, completed);
        }
    }
}

/// After so long a migration's end is read from the journals.
const MOVE_MS: u64 = 5_000;
