//! The verbs: each turns its options into work and an exit code.

pub mod doctor;
pub mod explain;
pub mod stat;

use anyhow::anyhow;

use crate::{
    cli::ConnectionOptions,
    server::{
        connect::{ConnectOptions, Connector},
        discover::{self, Server},
    },
};

/// Finds the server that the options mean, and how to connect to it unless that is not wanted.
fn find_server(options: &ConnectionOptions) -> anyhow::Result<(Server, Option<Connector>)> {
    let ConnectionOptions { host, port, user, dbname, data_directory, connect } = options.clone();
    let connection = ConnectOptions { host, port, user, dbname };
    let server = discover::find(&connection.selection(data_directory)?)?;
    let connector = connect.then(|| Connector::new(&server, &connection)).transpose()?;
    Ok((server, connector))
}

/// A runtime for the calling thread alone: the tracer's own work is one thread's.
fn runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| anyhow!("starting the asynchronous runtime failed: {error}"))
}
