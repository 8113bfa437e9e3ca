//! What is asked for wrongly or cannot be done: one sentence that says so, the right exit code, and nothing left.

use std::{
    ffi::OsString,
    fs,
    io::pipe,
    os::unix::fs::MetadataExt as _,
    path::Path,
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, ensure};
use pgiotrace_tests::{
    Cluster, Finished, PgInstall, StopMode, Tracer, elevated,
    scan::{backend, backend_pid, blocks, create_table, list, notes, scan},
    signal, tracer_binary, wait_until,
};
use rustix::process::Signal;
use serde_json::Value;

/// Small beside the tables, so that these are read again.
const SHARED_BUFFERS: &str = "16MB";
/// Size of a table that is scanned, in mebibytes.
const TABLE_SIZE: u32 = 32;
/// A port that no server of a test has.
const UNUSED_PORT: &str = "1";
/// Unmounts tracefs in a mount namespace of its own, makes sure of it, and becomes the rest of the arguments.
const WITHOUT_TRACEFS: &str = r#"
set -e
for place in /sys/kernel/tracing /sys/kernel/debug; do
    while mountpoint -q "$place"; do umount -R "$place"; done
done
if grep -w tracefs /proc/self/mounts; then exit 99; fi
exec "$@"
"#;

fn started() -> Result<Cluster> {
    Cluster::builder(PgInstall::v18()?).shared_buffers(SHARED_BUFFERS).start()
}

/// A cluster of any version with the table `t`.
fn with_table(install: PgInstall) -> Result<Cluster> {
    let cluster = Cluster::builder(install).shared_buffers(SHARED_BUFFERS).start()?;
    create_table(&mut cluster.connect("postgres")?, "t", TABLE_SIZE)?;
    Ok(cluster)
}

/// `-D` of a cluster.
fn of(cluster: &Cluster) -> [OsString; 2] {
    ["-D".into(), cluster.data_dir().into_os_string()]
}

/// `pgiotrace stat` for a second, if it were not refused.
fn for_a_second<S: Into<OsString>>(args: impl IntoIterator<Item = S>) -> Tracer {
    Tracer::new(["stat", "--duration", "1s"]).args(args)
}

/// Runs what must be refused with a report to a file, and makes sure that it is refused as everything is, and that
/// there is no such file. What it said.
fn refused(tracer: &Tracer) -> Result<String> {
    let folder = tempfile::tempdir()?;
    let report = folder.path().join("report");
    let options = ["--format=json".into(), OsString::from(format!("--output={}", report.display()))];
    let run = tracer.clone().first(options).env("RUST_BACKTRACE", "1").finish()?;
    let left: Vec<_> = fs::read_dir(folder.path())?.collect();
    assert!(left.is_empty(), "it left {left:?}");
    Ok(refusal(&run))
}

/// Makes sure of code 1, one sentence on stderr and nothing on stdout. Servers to choose from stand below the sentence,
/// each in a line.
fn refusal(run: &Finished) -> String {
    let said = run.stderr.trim_end();
    assert_eq!(run.code(), 1, "{said}");
    assert_eq!(run.stdout, "", "{said}");
    let (sentence, list) = said.split_once('\n').unwrap_or((said, ""));
    assert!(sentence.starts_with("pgiotrace: "), "{said}");
    assert!(!sentence.contains(". "), "these are several sentences: {said}");
    assert!(list.lines().all(|line| line.starts_with("  -p ")), "it is more than a sentence: {said}");
    said.to_owned()
}

/// A refusal of one line only.
fn refused_in_a_line(tracer: &Tracer) -> Result<String> {
    let said = refused(tracer)?;
    ensure!(said.lines().count() == 1, "it is more than a line: {said}");
    Ok(said)
}

fn assert_says(said: &str, parts: &[&str]) {
    for part in parts {
        assert!(said.contains(part), "it does not say {part:?}: {said}");
    }
}

/// All reads that began are accounted for, and every owner is certain.
fn assert_all_exact(report: &Value) {
    let ledger = &report["ledger"];
    assert_eq!(ledger["exact"], ledger["reads"], "{ledger:#}");
    assert_eq!((&ledger["complete"], &ledger["lost"]), (&true.into(), &0.into()), "{ledger:#}");
}

fn path(cluster: &Cluster) -> String {
    cluster.data_dir().display().to_string()
}

#[test]
fn an_unknown_port_is_refused_with_the_servers_that_run() -> Result<()> {
    let cluster = started()?;
    let said = refused(&for_a_second(["-p", UNUSED_PORT]))?;
    assert_says(&said, &["on port 1 runs here", &format!("-p {} -D {}", cluster.port(), path(&cluster))]);
    let said = refused(&for_a_second(of(&cluster)).args(["-p", UNUSED_PORT]))?;
    assert_says(&said, &["on port 1 in that directory"]);
    Ok(())
}

#[test]
fn a_dead_postmaster_is_not_taken_for_a_server() -> Result<()> {
    let cluster = started()?;
    let postmaster = cluster.postmaster_pid()?;
    assert!(signal(postmaster, Signal::KILL));
    // A process that was killed has no working directory any more, even before it is waited for.
    wait_until("the postmaster is dead", || fs::read_link(format!("/proc/{postmaster}/cwd")).is_err())?;
    assert!(cluster.data_dir().join("postmaster.pid").exists(), "nothing is stale");
    let said = refused_in_a_line(&for_a_second(of(&cluster)))?;
    let process = format!("left over from process {postmaster}");
    assert_says(
        &said,
        &["no server runs in the data directory", &path(&cluster), &process, "start the server"],
    );
    Ok(())
}

#[test]
fn a_stopped_server_is_not_taken_for_a_running_one() -> Result<()> {
    let mut cluster = started()?;
    cluster.stop(StopMode::Fast)?;
    let said = refused_in_a_line(&for_a_second(of(&cluster)))?;
    assert_says(&said, &["no server runs in the data directory", &path(&cluster), "start it first"]);
    Ok(())
}

#[test]
fn postgresql_14_is_refused_by_its_version() -> Result<()> {
    let cluster = Cluster::builder(PgInstall::v14()?).start()?;
    let said = refused_in_a_line(&for_a_second(of(&cluster)))?;
    assert_says(&said, &["PostgreSQL 14", &path(&cluster), "15 or newer"]);
    Ok(())
}

#[test]
fn a_directory_of_something_else_is_refused() -> Result<()> {
    let said = refused_in_a_line(&for_a_second(["-D", "/tmp"]))?;
    assert_says(&said, &["/tmp is not a PostgreSQL data directory", "SHOW data_directory"]);
    let said = refused_in_a_line(&for_a_second(["-D", "/no/such/directory"]))?;
    assert_says(&said, &["/no/such/directory is not a PostgreSQL data directory"]);
    Ok(())
}

#[test]
fn several_servers_without_a_choice_are_listed() -> Result<()> {
    let clusters = [started()?, started()?];
    let said = refused(&for_a_second::<&str>([]))?;
    assert_says(&said, &["several PostgreSQL servers run here; choose one with -D or -p"]);
    for cluster in &clusters {
        assert_says(&said, &[&format!("  -p {} -D {}", cluster.port(), path(cluster))]);
    }
    Ok(())
}

#[test]
fn a_server_elsewhere_is_refused() -> Result<()> {
    // 192.0.2.0/24 is nobody's: it is kept for documentation.
    let said = refused_in_a_line(&for_a_second(["-h", "192.0.2.1"]))?;
    assert_says(&said, &["192.0.2.1", "is not this machine", "on the server's host"]);
    Ok(())
}

#[test]
fn a_member_of_pg_monitor_misses_nothing() -> Result<()> {
    let cluster = with_table(PgInstall::v18()?)?;
    let mut client = cluster.connect("postgres")?;
    client.batch_execute("CREATE ROLE watcher LOGIN IN ROLE pg_monitor")?;
    let tracer = Tracer::new(["stat", "--format", "json", "-U", "watcher", "-d", "postgres", "-D"]);
    let tracer = tracer.arg(cluster.data_dir()).start()?;
    let sampled = "SELECT 1 FROM pg_stat_activity WHERE usename = 'watcher' AND query LIKE '%pg_aios%' AND state = 'idle'";
    wait_until("the view was sampled", || client.query_opt(sampled, &[]).is_ok_and(|row| row.is_some()))?;
    let scanned = scan(&mut client, "t")?;
    let own = backend_pid(&mut client)?;
    let run = tracer.interrupt()?;
    let report = run.report()?;
    assert_eq!(run.code(), 0, "{}", run.stderr);
    assert_eq!(notes(&report), [""; 0]);
    assert_eq!(blocks(&report, "t")?, scanned);
    assert_eq!(backend(&report, own)?["backend_type"], "client backend");
    assert!(report["ledger"]["pg_aios"].is_object(), "the view was sampled: {:#}", report["ledger"]);
    Ok(())
}

#[test]
fn a_wrong_password_costs_names_and_is_said_once() -> Result<()> {
    let cluster = Cluster::builder(PgInstall::v18()?)
        .shared_buffers(SHARED_BUFFERS)
        .password("right-and-secret")
        .start()?;
    let mut client = cluster.connect("postgres")?;
    create_table(&mut client, "t", TABLE_SIZE)?;
    let tracer = Tracer::stat(&cluster).env("PGPASSWORD", "wrong-and-secret").start()?;
    let scanned = scan(&mut client, "t")?;
    let run = tracer.interrupt()?;

    let report = run.report()?;
    assert_eq!(run.code(), 0, "{}", run.stderr);
    let of_backend = backend(&report, backend_pid(&mut client)?)?;
    assert!(of_backend["io"]["blocks"].as_u64() >= Some(scanned), "{of_backend:#}");
    assert_all_exact(&report);
    let refusals: Vec<_> =
        notes(&report).into_iter().filter(|note| note.contains("refused the password")).collect();
    assert_eq!(refusals.len(), 1, "it is said once: {:#}", report["notes"]);
    assert_says(refusals[0], &["\"postgres\"", "PGPASSWORD"]);
    for output in [run.stdout, run.stderr, report.to_string()] {
        assert!(!output.contains("and-secret"), "a password is shown: {output}");
    }
    Ok(())
}

#[test]
fn a_role_without_rights_traces_on_and_pg_monitor_is_named() -> Result<()> {
    let cluster = with_table(PgInstall::v18()?)?;
    let mut client = cluster.connect("postgres")?;
    client.batch_execute("CREATE ROLE poor LOGIN")?;
    let tracer = Tracer::new(["stat", "--format", "json", "-U", "poor", "-d", "postgres"]);
    let tracer = tracer.args(of(&cluster)).start()?;
    let scanned = scan(&mut client, "t")?;
    let run = tracer.interrupt()?;
    let report = run.report()?;

    assert_eq!(run.code(), 0, "{}", run.stderr);
    assert_eq!(blocks(&report, "t")?, scanned);
    assert_all_exact(&report);
    let of_session = backend(&report, backend_pid(&mut client)?)?;
    // Its type is in its title, and the rest of what a session may see of others' is not much.
    assert_eq!(
        (&of_session["user"], &of_session["backend_type"]),
        (&"postgres".into(), &"client backend".into())
    );
    assert!(list(&report, "queries").iter().all(|query| query["query"] == Value::Null), "{report:#}");
    assert_eq!(report["ledger"]["pg_aios"], Value::Null, "the view could not be read");
    let about_rights: Vec<_> =
        notes(&report).into_iter().filter(|note| note.contains("lacks rights")).collect();
    assert_eq!(about_rights.len(), 1, "it is said once: {:#}", report["notes"]);
    assert_says(about_rights[0], &["\"poor\"", "GRANT pg_monitor"]);
    Ok(())
}

#[test]
fn without_a_connection_there_are_numbers_and_no_names() -> Result<()> {
    let cluster = with_table(PgInstall::v18()?)?;
    let mut client = cluster.connect("postgres")?;
    let filenode: u32 = client.query_one("SELECT pg_relation_filenode('t')", &[])?.get(0);
    let tracer = Tracer::new(["stat", "--no-connect", "--format", "json"]).args(of(&cluster)).start()?;
    let scanned = scan(&mut client, "t")?;
    let run = tracer.interrupt()?;
    assert_eq!(run.code(), 0, "{}", run.stderr);
    let report = run.report()?;

    let is_it = |entry: &&Value| entry["relfilenode"] == filenode && entry["fork"] == "main";
    let entry = list(&report, "relations").iter().find(is_it).context("the table was not traced")?;
    assert_eq!(entry["io"]["blocks"], scanned);
    let of_backend = backend(&report, backend_pid(&mut client)?)?;
    assert_eq!(of_backend["io"]["blocks"].as_u64(), report["ledger"]["blocks"].as_u64());
    for (entry, keys) in
        [(entry, ["database", "schema", "name"]), (of_backend, ["database", "user", "application_name"])]
    {
        assert!(keys.iter().all(|key| entry[key].is_null()), "there was nobody to ask: {entry:#}");
    }
    assert_eq!(
        (&report["target"]["io_method"], &report["target"]["server_version"]),
        (&Value::Null, &"18".into())
    );
    assert_eq!(report["ledger"]["pg_aios"], Value::Null);
    assert_all_exact(&report);
    Ok(())
}

#[test]
fn a_command_that_cannot_be_run_is_refused() -> Result<()> {
    let cluster = started()?;
    // The data directory's version is a file, but no program.
    let no_program = cluster.data_dir().join("PG_VERSION").display().to_string();
    for (command, why) in [("/no/such/command", "No such file"), (&no_program, "Permission denied")] {
        let tracer = Tracer::new(["stat"]).args(of(&cluster)).args(["--", command]);
        let said = refused_in_a_line(&tracer)?;
        assert_says(&said, &[command, why, "check its name"]);
    }
    Ok(())
}

#[test]
fn a_uri_or_a_length_in_a_commands_place_is_told_its_own() -> Result<()> {
    let cluster = started()?;
    for (word, option) in [("postgresql://postgres@localhost/postgres", "-d"), ("10s", "--duration")] {
        let said = refused_in_a_line(&Tracer::new(["stat"]).args(of(&cluster)).args([word]))?;
        assert_says(&said, &[word, option]);
    }
    Ok(())
}

#[test]
fn a_command_is_led_to_the_traced_server_unless_it_says_otherwise() -> Result<()> {
    let cluster = started()?;
    let script = "echo $PGHOST $PGPORT $PGUSER";
    let run = Tracer::stat(&cluster).env("PGUSER", "alice").run(Command::new("sh").args(["-c", script]))?;
    let expected = format!("{} {} alice", cluster.socket_dir().display(), cluster.port());
    assert_eq!(run.stdout.trim(), expected, "{}", run.stderr);
    Ok(())
}

#[test]
fn completions_for_a_reader_that_has_gone_are_no_error() -> Result<()> {
    let (reader, writer) = pipe()?;
    drop(reader);
    let output = Command::new(tracer_binary()?).args(["completions", "bash"]).stdout(writer).output()?;
    assert_eq!((output.status.code(), String::from_utf8_lossy(&output.stderr).as_ref()), (Some(0), ""));
    Ok(())
}

#[test]
fn the_code_of_a_failing_command_is_passed_on_with_the_report_written() -> Result<()> {
    let cluster = started()?;
    for (script, code) in [("exit 7", 7), ("kill -TERM $$", 143), ("exit 0", 0)] {
        let run = Tracer::stat(&cluster).run(Command::new("sh").args(["-c", script]))?;
        assert_eq!(run.code(), code, "{script}: {}", run.stderr);
        assert_eq!(run.report()?["schema"], "pgiotrace.stat/1", "{script}");
        assert_eq!(run.stderr, "", "{script}");
    }
    Ok(())
}

#[test]
fn without_privileges_it_says_what_to_do() -> Result<()> {
    let cluster = started()?;
    let data = fs::metadata(cluster.data_dir())?;
    // Where the tracer was built, not everybody may go.
    let binary = cluster.folder().join("pgiotrace");
    fs::copy(tracer_binary()?, &binary).context("cannot copy the tracer to where anybody may run it")?;
    let (nobody, owner) = ((65534, 65534), (data.uid(), data.gid()));
    // Nobody cannot even look at the server; its owner can, and may still not trace.
    for ((uid, gid), args) in [(nobody, of(&cluster)), (nobody, port_of(&cluster)), (owner, of(&cluster))] {
        let wrapper = ["setpriv".to_owned(), format!("--reuid={uid}"), format!("--regid={gid}")];
        let wrapper = wrapper.into_iter().chain(["--clear-groups", "--"].map(str::to_owned));
        let run = for_a_second(args.clone())
            .through(wrapper)
            .binary(binary.clone())
            .env("RUST_BACKTRACE", "1")
            .finish()?;
        let said = refusal(&run);
        assert!(said.lines().count() == 1, "{said}");
        assert!(
            said.contains("run pgiotrace as root"),
            "as {uid}, {args:?}: it does not say what to do: {said}"
        );
    }
    Ok(())
}

/// `-p` of a cluster.
fn port_of(cluster: &Cluster) -> [OsString; 2] {
    ["-p".into(), cluster.port().to_string().into()]
}

#[test]
fn wrong_usage_has_a_code_of_its_own() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let marker = folder.path().join("ran");
    let marker = marker.display().to_string();
    let cases: [(&[&str], &str); 8] = [
        (&["stat", "--no-such-flag"], "--no-such-flag"),
        (&["stat", "--duration", "0"], "--duration"),
        (&["stat", "--duration", "0s"], "--duration"),
        (&["stat", "--duration=-1s"], "--duration"),
        (&["stat", "--format", "xml"], "--format"),
        (&["stat", "--duration", "1s", "--", "touch", &marker], "--duration"),
        (&["stat", "-p", "65536"], "65536"),
        (&["no-such-verb"], "no-such-verb"),
    ];
    for (args, named) in cases {
        let run = Tracer::new(args.iter().copied()).env("RUST_BACKTRACE", "1").finish()?;
        assert_eq!((run.code(), run.stdout.as_str()), (2, ""), "{args:?}: {}", run.stderr);
        let first = run.stderr.lines().next().unwrap_or_default();
        assert!(first.starts_with("error: ") || first.starts_with("error:"), "{args:?}: {}", run.stderr);
        assert!(run.stderr.contains(named), "{args:?}: {}", run.stderr);
        assert!(!run.stderr.contains("panicked"), "{args:?}: {}", run.stderr);
    }
    assert!(!Path::new(&marker).exists(), "a command ran in spite of wrong usage");
    Ok(())
}

#[test]
fn a_report_that_cannot_be_written_is_refused_before_anything_runs() -> Result<()> {
    let cluster = started()?;
    let marker = cluster.folder().join("ran");
    let tracer = Tracer::new(["stat", "-o", "/no/such/folder/report"]).args(of(&cluster));
    let tracer = tracer.env("RUST_BACKTRACE", "1");
    let mut touch = Command::new("touch");
    let said = refusal(&tracer.run(touch.arg(&marker))?);
    assert_says(&said, &["/no/such/folder/report", "No such file", "-o"]);
    assert!(!marker.exists(), "the command ran before it was known that there can be no report");
    Ok(())
}

#[test]
fn a_reader_that_has_gone_is_no_error() -> Result<()> {
    let cluster = started()?;
    for format in ["text", "json", "csv"] {
        let (reader, writer) = pipe()?;
        drop(reader);
        let output = elevated(tracer_binary()?)
            .args(["stat", "--duration", "100ms", "--format", format])
            .args(of(&cluster))
            .stdin(Stdio::null())
            .stdout(writer)
            .stderr(Stdio::piped())
            .output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!((output.status.code(), said.as_ref()), (Some(0), ""), "{format}");
    }
    Ok(())
}

#[test]
fn without_tracefs_stat_traces_all_the_same() -> Result<()> {
    let cluster = with_table(PgInstall::v18()?)?;
    let mut client = cluster.connect("postgres")?;
    let wrapper = ["unshare", "--mount", "--", "sh", "-c", WITHOUT_TRACEFS, "sh"];
    let tracer = Tracer::stat(&cluster).through(wrapper).start()?;
    let scanned = scan(&mut client, "t")?;
    let run = tracer.interrupt()?;
    let report = run.report()?;
    assert_eq!(run.code(), 0, "{}", run.stderr);
    assert_eq!(blocks(&report, "t")?, scanned);
    assert_all_exact(&report);
    assert_eq!(notes(&report), [""; 0], "BTF tracepoints do not need tracefs");
    Ok(())
}

#[test]
fn servers_without_asynchronous_reads_are_traced_to_the_block() -> Result<()> {
    for install in [PgInstall::v17()?, PgInstall::v15()?] {
        let major = install.major();
        let cluster = with_table(install)?;
        let mut client = cluster.connect("postgres")?;
        let tracer = Tracer::stat(&cluster).start()?;
        let scanned = scan(&mut client, "t")?;
        let run = tracer.interrupt()?;
        let report = run.report()?;
        assert_eq!(run.code(), 0, "{major}: {}", run.stderr);
        assert_eq!(blocks(&report, "t")?, scanned, "{major}");
        assert_all_exact(&report);
        let sync_only = |io: &Value| io["by_method"]["sync"] == io["reads"];
        assert!(list(&report, "backends").iter().all(|entry| sync_only(&entry["io"])), "{major}: {report:#}");
        assert_eq!(
            (&report["ledger"]["pg_aios"], &report["target"]["io_method"]),
            (&Value::Null, &Value::Null)
        );
        assert_eq!(notes(&report), [""; 0], "{major}: nothing is missing that the version has");
    }
    Ok(())
}
