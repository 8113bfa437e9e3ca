//! What `/proc` says of the kernel's records, before they go on: who the processes are, and what the files are.

use std::{collections::HashSet, sync::Arc};

use pgiotrace_ebpf::{ReadRecord, flags};

use super::{
    Event, FileFacts, SeenRead,
    files::Files,
    kernel::Record,
    names::{RelationKey, Resolver},
};
use crate::{
    model::io::{RelationFork, Subject},
    server::{
        Pid,
        discover::{self, Server},
        own_sessions::{OwnSessions, Serves},
    },
};

/// Adds what `/proc` says about records before they go on.
pub struct Describer {
    files: Files,
    described: HashSet<Pid>,
    /// The tracer's own sessions, where it has any.
    pub own: OwnSessions,
    /// Whether it is open of some process whom it serves.
    is_undecided: bool,
    /// Looks up names of relations, where the server may be asked.
    pub resolver: Option<Resolver>,
    asked: HashSet<RelationKey>,
    last_asked: Option<RelationKey>,
}

impl Describer {
    /// Nothing is known yet.
    pub fn new(server: &Server) -> Self {
        Self {
            files: Files::new(server),
            described: HashSet::new(),
            own: OwnSessions::default(),
            is_undecided: false,
            resolver: None,
            asked: HashSet::new(),
            last_asked: None,
        }
    }

    /// Hands a record over, behind what is new about it. Whether a process left.
    pub fn hand_over(&mut self, record: Record, sink: &mut impl FnMut(Event)) -> bool {
        match record {
            Record::Request(record) => sink(Event::Request(record)),
            Record::Merge(record) => sink(Event::Merge(record)),
            Record::Wait(record) => sink(Event::Wait(record)),
            // Its title is not set yet; it is described at its first read.
            Record::Joined(_) => {}
            Record::Left(pid) => {
                self.described.remove(&pid);
                // As long as it is open whom somebody serves, those that have ended count, too.
                if !self.is_undecided {
                    self.own.forget(pid);
                }
                sink(Event::Left(pid));
                return true;
            }
            Record::Read(record) => {
                self.introduce(&record, sink);
                let file = self.describe(&record);
                sink(Event::Read(SeenRead { record, file }));
            }
        }
        false
    }

    /// Says which processes serve the tracer, once that is decided of all.
    pub fn decide_own(&mut self, sink: &mut impl FnMut(Event)) {
        if self.is_undecided
            && let Some(own) = self.own.all()
        {
            self.is_undecided = false;
            sink(Event::OwnSessions(own));
        }
    }

    /// Says who executor and owner are, when they are new.
    fn introduce(&mut self, record: &ReadRecord, sink: &mut impl FnMut(Event)) {
        for tgid in [record.executor_tgid, record.begun.owner_tgid] {
            let pid = Pid(tgid);
            if tgid != 0
                && !self.described.contains(&pid)
                && let Some(process) = discover::process(pid)
            {
                self.described.insert(pid);
                let serves = self.own.whom_serves(process.inner_pid);
                self.is_undecided |= serves == Serves::Undecided;
                sink(Event::Process(process, serves));
            }
        }
    }

    /// What is read, if the record alone does not tell; and asks for its name.
    fn describe(&mut self, record: &ReadRecord) -> Option<Arc<FileFacts>> {
        if let Some(relation) = RelationFork::of_handle(&record.begun) {
            self.ask(RelationKey::of(&relation));
            return None;
        }
        if record.begun.flags & flags::IO_URING != 0 {
            return None;
        }
        let file = self.files.look_up(record);
        if let Subject::Relation(relation) = &file.subject {
            self.ask(RelationKey::of(relation));
        }
        Some(file)
    }

    /// Asks once for a relation's name. Most reads are of the relation of the read before.
    fn ask(&mut self, relation: RelationKey) {
        if self.last_asked == Some(relation) {
            return;
        }
        self.last_asked = Some(relation);
        if let Some(resolver) = &self.resolver
            && !self.asked.contains(&relation)
            && resolver.ask(relation)
        {
            self.asked.insert(relation);
        }
    }
}
