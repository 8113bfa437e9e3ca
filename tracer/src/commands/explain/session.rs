//! A session of the server on a thread of its own: the client blocks, and must not do that where the trace is taken in.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
        mpsc::{self, Sender},
    },
    thread::{self, JoinHandle},
};

use anyhow::anyhow;
use postgres::Client;
use tokio::sync::oneshot;

use crate::server::connect::Connector;

type Job = Box<dyn FnOnce(&mut Client) + Send>;

/// A plan may be as deep as the server's own stack allows (`max_stack_depth`, 2 MB unless set), and is read by recursion.
const STACK_BYTES: usize = 64 << 20;

/// A session. Dropping it closes it, once what it does is done.
pub struct Session {
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
    pending: Arc<AtomicUsize>,
}

impl Session {
    /// Connects, to the default database unless one is given.
    pub async fn open(connector: Connector, database: Option<String>) -> anyhow::Result<Self> {
        let (jobs, todo) = mpsc::channel::<Job>();
        let (sender, opened) = oneshot::channel();
        let work = move || match connector.connect(database.as_deref()) {
            Ok(mut client) => {
                // Nobody waits any more when the program is ending.
                let _ = sender.send(Ok(()));
                for job in todo {
                    job(&mut client);
                }
            }
            Err(error) => {
                let _ = sender.send(Err(error));
            }
        };
        let thread = thread::Builder::new().name("pg-explain".to_owned()).stack_size(STACK_BYTES).spawn(work);
        let thread = thread.map_err(|error| anyhow!("starting a thread failed: {error}"))?;
        opened.await.map_err(|_| ended())??;
        Ok(Self { jobs: Some(jobs), thread: Some(thread), pending: Arc::default() })
    }

    /// Hands over what is to be done with the session; what comes of it.
    pub async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Client) -> T + Send + 'static,
    ) -> anyhow::Result<T> {
        let (sender, done) = oneshot::channel();
        let pending = Arc::clone(&self.pending);
        pending.fetch_add(1, Ordering::AcqRel);
        let job = Box::new(move |client: &mut Client| {
            let result = work(client);
            pending.fetch_sub(1, Ordering::AcqRel);
            let _ = sender.send(result);
        });
        let is_taken = self.jobs.as_ref().is_some_and(|jobs| jobs.send(job).is_ok());
        if !is_taken {
            return Err(ended());
        }
        done.await.map_err(|_| ended())
    }

    /// Whether it has not done yet what it was given.
    pub fn is_busy(&self) -> bool {
        self.pending.load(Ordering::Acquire) > 0
    }

    /// Leaves the session to itself: it may be waiting for a server that does not answer.
    pub fn abandon(mut self) {
        self.thread = None;
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            // Its panic has been reported by itself.
            let _ = thread.join();
        }
    }
}

fn ended() -> anyhow::Error {
    anyhow!("the session's thread has ended unexpectedly; report it as a bug of pgiotrace")
}
