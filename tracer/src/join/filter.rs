//! Which reads the user asked for.

use super::{Join, Name, people::Person, waits::WaitKey};
use crate::{
    cli::Filter,
    model::{
        aggregate::Incarnation,
        io::{Io, Subject},
    },
};

impl Join {
    /// Whether the filter lets a process be shown, as far as it is about processes.
    pub(super) fn shows_process(&self, process: Incarnation) -> bool {
        let person = self.people.get(process);
        let pids = &self.filter.pids;
        (pids.is_empty() || pids.contains(&process.pid.0)) && self.filter.admits_person(person) == Some(true)
    }

    /// Whether the filter lets a wait be shown, as far as it is about processes and queries.
    pub(super) fn shows_wait(&self, key: &WaitKey) -> bool {
        let wanted = &self.filter.query_ids;
        self.shows_process(key.process)
            && (wanted.is_empty() || key.query_id.is_some_and(|query_id| wanted.contains(&query_id)))
    }
}

impl Filter {
    /// Whether a read passes; `None` while that depends on a name that is not known yet.
    pub(super) fn admits(&self, io: &Io, owner: Option<&Person>, name: Option<&Name>) -> Option<bool> {
        let passes_at_once =
            self.min_latency.is_none_or(|shortest| u128::from(io.timing.latency_ns()) >= shortest.as_nanos())
                && (self.pids.is_empty() || io.owner.is_some_and(|owner| self.pids.contains(&owner.0)));
        if !passes_at_once {
            return Some(false);
        }
        let answers =
            [self.admits_process(io, owner), self.admits_session(io, owner), self.admits_relation(io, name)];
        if answers.contains(&Some(false)) {
            return Some(false);
        }
        answers.iter().all(Option::is_some).then_some(true)
    }

    /// Whether a read is of the one session that is wanted, or of a parallel worker of its.
    fn admits_process(&self, io: &Io, owner: Option<&Person>) -> Option<bool> {
        let Some(session) = self.session else { return Some(true) };
        match io.owner {
            None => Some(false),
            Some(pid) if pid == session.pid => Some(true),
            Some(_) => Some(owner?.leader() == Some(session.inner_pid)),
        }
    }

    fn admits_session(&self, io: &Io, owner: Option<&Person>) -> Option<bool> {
        if io.owner.is_none() {
            return Some(self.databases.is_empty() && self.users.is_empty());
        }
        self.admits_person(owner)
    }

    /// Whether a session's database and role are wanted; `None` while they are not known.
    fn admits_person(&self, person: Option<&Person>) -> Option<bool> {
        if self.databases.is_empty() && self.users.is_empty() {
            return Some(true);
        }
        let row = person?.activity.as_ref()?;
        let is_among = |wanted: &[String], found: &Option<String>| {
            wanted.is_empty() || found.as_ref().is_some_and(|found| wanted.contains(found))
        };
        Some(is_among(&self.databases, &row.database) && is_among(&self.users, &row.user))
    }

    fn admits_relation(&self, io: &Io, name: Option<&Name>) -> Option<bool> {
        if self.relations.is_empty() {
            return Some(true);
        }
        if !matches!(io.subject, Subject::Relation(_)) {
            return Some(false);
        }
        let Some(relation) = &name?.relation else { return Some(false) };
        Some(self.relations.iter().any(|wanted| wanted.matches(&relation.schema, &relation.name)))
    }
}
