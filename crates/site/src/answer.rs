//! The controller's answer to a host that asks before it boots.
//!
//! Part of [`Book`]. Refuses: to speak for the site while its database is an old copy, and to know a life of a host while
//! another one answers.

use crate::book::{Book, Row};
use crate::plant::Plant;
use godwit_types::HostName;
use godwit_types::site::{SiteAnswer, SiteQuestion, Standing};

impl Book {
    /// Answers a host's question. `other_answers` says whether the life that was known until now answers at this moment.
    /// The rows are written before the answer is given.
    pub fn answer(
        &mut self,
        asker: &HostName,
        question: &SiteQuestion,
        other_answers: bool,
    ) -> (SiteAnswer, Vec<Row>) {
        let standing = self.standing_for(asker, question, other_answers);
        let mut news = Vec::new();
        let rows = match standing {
            Standing::Known => self.meet(asker, &question.instance, &mut news),
            _ => Vec::new(),
        };
        self.unsaid.extend(news);
        let in_charge = self.is_in_charge() || self.planted(Plant::RestoredGoesOn);
        let wishes = question.wishes.iter();
        let rows_of = wishes.filter_map(|wish| {
            let entry = self.vms.get(&wish.vm)?;
            Some((wish.vm.clone(), entry.row()))
        });
        let answer = SiteAnswer {
            from: None,
            standing,
            in_charge,
            stamp: self.stamp,
            vms: rows_of.collect(),
            records: Vec::new(),
        };
        (answer, rows)
    }

    /// Whether the life that asks is a new one of a host whose known life is to be asked first whether it still answers.
    pub fn is_new_life(&self, asker: &HostName, question: &SiteQuestion) -> bool {
        let known = self.hosts.get(asker);
        known.is_some_and(|host| host.row.instance != question.instance)
    }

    fn standing_for(
        &self,
        asker: &HostName,
        question: &SiteQuestion,
        other_answers: bool,
    ) -> Standing {
        if self.removed.contains(asker) || !self.hosts.contains_key(asker) {
            return Standing::Removed;
        }
        let standing = self.standing_of(asker, &question.instance);
        let is_second = other_answers && self.is_new_life(asker, question);
        match standing {
            Standing::Known if is_second && !self.planted(Plant::OldCopyBoots) => {
                Standing::SecondInstance
            }
            standing => standing,
        }
    }
}
