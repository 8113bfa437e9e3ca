//! How the tracer connects: encryption as libpq means it, passwords, services. Held against real servers.

use std::{
    ffi::OsString,
    fs::{self, Permissions},
    os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown},
    path::PathBuf,
};

use anyhow::{Context as _, Result, bail, ensure};
use pgiotrace_tests::{Cluster, ClusterBuilder, PgInstall, Tracer, scan::list};
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use serde_json::Value;

/// Everybody, however they come.
const TRUST: &str = "local all all trust\nhost all all 127.0.0.1/32 trust\n";
const PASSWORD: &str = "right and 'sl\\ash'";

/// Somebody who vouches for others.
struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
}

impl Authority {
    fn new(name: &str) -> Result<Self> {
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, name);
        let pem = params.self_signed(&key)?.pem();
        Ok(Self { issuer: Issuer::new(params, key), pem })
    }

    /// A certificate and its key, in PEM format.
    fn certify(&self, hosts: &[&str], common_name: &str) -> Result<[String; 2]> {
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::new(hosts.iter().map(ToString::to_string).collect::<Vec<_>>())?;
        params.distinguished_name.push(DnType::CommonName, common_name);
        Ok([params.signed_by(&key, &self.issuer)?.pem(), key.serialize_pem()])
    }
}

/// A server, and a home directory of the tracer's own, so that no file of the person who tests is taken.
struct Server {
    cluster: Cluster,
    home: PathBuf,
    authority: Authority,
}

impl Server {
    /// One that has a certificate for `localhost`, and rules of access.
    fn with_tls(hba: &str) -> Result<Self> {
        let builder = Cluster::builder(PgInstall::v18()?).setting("ssl", "on");
        Self::start(builder.setting("ssl_ca_file", "root.crt"), hba)
    }

    fn without_tls(hba: &str) -> Result<Self> {
        Self::start(Cluster::builder(PgInstall::v18()?), hba)
    }

    fn start(builder: ClusterBuilder, hba: &str) -> Result<Self> {
        let mut cluster = builder.initdb()?;
        let authority = Authority::new("authority")?;
        let [certificate, key] = authority.certify(&["localhost"], "server")?;
        let data = cluster.data_dir();
        let files = [("server.crt", &certificate), ("server.key", &key), ("root.crt", &authority.pem)];
        let owner = fs::metadata(&data)?;
        for (name, text) in files {
            let file = data.join(name);
            fs::write(&file, text)?;
            fs::set_permissions(&file, Permissions::from_mode(0o600))?;
            chown(&file, Some(owner.uid()), Some(owner.gid()))?;
        }
        fs::write(data.join("pg_hba.conf"), hba)?;
        cluster.start()?;
        let home = cluster.folder().join("home");
        fs::create_dir_all(home.join(".postgresql"))?;
        Ok(Self { cluster, home, authority })
    }

    /// Writes a file into the home directory that only its owner may read, and says its path.
    fn file(&self, name: &str, text: &str) -> Result<String> {
        let path = self.home.join(name);
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
        fs::set_permissions(&path, Permissions::from_mode(0o600))?;
        Ok(path.display().to_string())
    }

    /// A verb of the tracer's in that home directory.
    fn tracer(&self, verb: &str, envs: &[(&str, &str)]) -> Tracer {
        let tracer = Tracer::new([verb, "--format", "json"]).env("HOME", &self.home);
        envs.iter().fold(tracer, |tracer, (name, value)| tracer.env(*name, *value))
    }

    /// This cluster and a connection string.
    fn args(&self, string: &str) -> [OsString; 4] {
        ["-D".into(), self.cluster.data_dir().into(), "-d".into(), string.into()]
    }

    /// What `doctor` says of a connection by this string: that it is there and how, or what went wrong.
    fn doctor(&self, string: &str, envs: &[(&str, &str)]) -> Result<Result<String, String>> {
        said_of_connection(&self.tracer("doctor", envs).args(self.args(string)))
    }

    /// The same, by TCP as the superuser.
    fn by_tcp(&self, string: &str) -> Result<Result<String, String>> {
        self.doctor(&format!("host=localhost user=postgres dbname=postgres {string}"), &[])
    }
}

/// What `doctor` says of the connection.
fn said_of_connection(doctor: &Tracer) -> Result<Result<String, String>> {
    let run = doctor.finish()?;
    let report: Value = serde_json::from_str(&run.stdout)
        .with_context(|| format!("no JSON: {}{}", run.stdout, run.stderr))?;
    let is_it = |check: &&Value| check["name"] == "connection";
    let Some(check) = list(&report, "checks").iter().find(is_it) else {
        bail!("nothing is said of the connection: {report:#}")
    };
    let text = |key: &str| check[key].as_str().unwrap_or_default().to_owned();
    let sentence = format!("{}; {}", text("detail"), text("mend"));
    ensure!(
        !["ash'", "secret"].iter().any(|part| sentence.contains(part)),
        "a password is shown: {sentence}"
    );
    Ok(if check["status"] == "ok" { Ok(text("detail")) } else { Err(sentence) })
}

/// What a connection is to become.
#[derive(Debug, Clone, Copy)]
enum Expected {
    Plain,
    Tls,
    Fails(&'static str),
}
use Expected::{Fails, Plain, Tls};

fn assert_becomes(said: &Result<String, String>, expected: Expected, what: &str) {
    let is_so = match (said, expected) {
        (Ok(detail), Plain) => !detail.contains("TLSv"),
        (Ok(detail), Tls) => detail.contains("TLSv1.3"),
        (Err(sentence), Fails(part)) => sentence.contains(part),
        _ => false,
    };
    assert!(is_so, "{what}: expected {expected:?}, not {said:?}");
}

#[test]
fn each_sslmode_does_what_libpqs_does() -> Result<()> {
    let server = Server::with_tls(TRUST)?;
    let root = server.file("root.pem", &server.authority.pem)?;
    let stranger = server.file("stranger.pem", &Authority::new("stranger")?.pem)?;
    let by = |mode: &str, root: &str| format!("sslmode={mode} sslrootcert={root}");
    for (string, expected) in [
        ("sslmode=disable".to_owned(), Plain),
        ("sslmode=allow".to_owned(), Plain),
        (String::new(), Tls),
        ("sslmode=prefer".to_owned(), Tls),
        ("sslmode=require".to_owned(), Tls),
        ("sslmode=require sslnegotiation=direct".to_owned(), Tls),
        (
            "sslmode=verify-ca".to_owned(),
            Fails("needs the certificate of an authority, and there is none in"),
        ),
        (by("verify-ca", &root), Tls),
        (by("verify-ca", &stranger), Fails("is not trusted: no certificate in")),
        (by("verify-ca", "/no/such/file"), Fails("none in /no/such/file")),
        (by("verify-ca", "/etc/passwd"), Fails("holds no certificate")),
        (by("verify-full", &root), Tls),
        (by("verify-full", &stranger), Fails("is not trusted")),
        // As libpq: an authority that is known is asked, whatever the mode.
        (by("require", &root), Tls),
        (by("require", &stranger), Fails("is not trusted")),
        (by("prefer", &stranger), Plain),
        (by("verify-full", "system"), Fails("is not trusted: no certificate in the system's")),
        (by("require", "system"), Fails("too weak for sslrootcert=system")),
        ("sslmode=on".to_owned(), Fails("it is disable, allow, prefer")),
    ] {
        assert_becomes(&server.by_tcp(&string)?, expected, &string);
    }
    Ok(())
}

#[test]
fn a_certificate_for_another_host_is_refused_by_verify_full_only() -> Result<()> {
    let server = Server::with_tls(TRUST)?;
    let root = server.file("root.pem", &server.authority.pem)?;
    for (host, mode, expected) in [
        ("host=127.0.0.1", "verify-ca", Tls),
        ("host=127.0.0.1", "verify-full", Fails("is not for host \"127.0.0.1\", but for localhost")),
        ("host=localhost hostaddr=127.0.0.1", "verify-full", Tls),
    ] {
        let string = format!("{host} user=postgres dbname=postgres sslmode={mode} sslrootcert={root}");
        assert_becomes(&server.doctor(&string, &[])?, expected, &string);
    }
    Ok(())
}

#[test]
fn encryption_may_be_set_by_uri_environment_and_home() -> Result<()> {
    let server = Server::with_tls(TRUST)?;
    let (root, uri) =
        (server.file("the root.pem", &server.authority.pem)?, "postgresql://postgres@localhost");
    let encoded = format!("{uri}/?sslmode=verify-full&sslrootcert={}", root.replace(' ', "%20"));
    assert_becomes(&server.doctor(&encoded, &[])?, Tls, &encoded);
    let by_environment = [("PGSSLMODE", "verify-full"), ("PGSSLROOTCERT", root.as_str())];
    assert_becomes(&server.doctor(uri, &by_environment)?, Tls, "the environment");
    assert_becomes(&server.doctor(uri, &[("PGSSLMODE", "disable")])?, Plain, "the environment");
    assert_becomes(&server.doctor(uri, &[("PGSSLMODE", "maybe")])?, Fails("cannot be \"maybe\""), "nonsense");
    server.file(".postgresql/root.crt", &Authority::new("stranger")?.pem)?;
    assert_becomes(&server.doctor(uri, &[("PGSSLMODE", "require")])?, Fails("is not trusted"), "the home");
    server.file(".postgresql/root.crt", &server.authority.pem)?;
    assert_becomes(&server.doctor(uri, &[("PGSSLMODE", "verify-ca")])?, Tls, "the home");
    Ok(())
}

#[test]
fn a_server_without_tls_is_refused_where_tls_is_required() -> Result<()> {
    let server = Server::without_tls(TRUST)?;
    let root = server.file("root.pem", &server.authority.pem)?;
    let no_tls = Fails("does not support TLS; set ssl = on there");
    for (mode, expected) in [
        ("disable", Plain),
        ("allow", Plain),
        ("prefer", Plain),
        ("require", no_tls),
        ("verify-full", no_tls),
    ] {
        let string = format!("sslmode={mode} sslrootcert={root}");
        assert_becomes(&server.by_tcp(&string)?, expected, &string);
    }
    Ok(())
}

#[test]
fn what_pg_hba_lets_in_decides_where_the_mode_leaves_a_choice() -> Result<()> {
    let refused = Fails("no pg_hba.conf entry");
    for (rule, expected) in [
        ("hostssl", [("disable", refused), ("allow", Tls), ("prefer", Tls), ("require", Tls)]),
        ("hostnossl", [("disable", Plain), ("allow", Plain), ("prefer", Plain), ("require", refused)]),
    ] {
        let hba = format!("local all all trust\n{rule} all all 127.0.0.1/32 trust\n");
        let server = Server::with_tls(&hba)?;
        for (mode, expected) in expected {
            let string = format!("sslmode={mode}");
            assert_becomes(&server.by_tcp(&string)?, expected, &format!("{rule}, {string}"));
        }
    }
    Ok(())
}

#[test]
fn a_unix_socket_is_never_encrypted() -> Result<()> {
    let server = Server::with_tls(TRUST)?;
    let string = "user=postgres dbname=postgres sslmode=verify-full sslrootcert=/no/such/file";
    assert_becomes(&server.doctor(string, &[])?, Plain, string);
    Ok(())
}

#[test]
fn a_clients_certificate_lets_in_where_one_is_asked_for() -> Result<()> {
    let server = Server::with_tls("local all all trust\nhostssl all all 127.0.0.1/32 cert\n")?;
    let [certificate, key] = server.authority.certify(&[], "postgres")?;
    let (certificate, key) = (server.file("my.crt", &certificate)?, server.file("my.key", &key)?);
    let string = format!("sslcert={certificate} sslkey={key}");
    assert_becomes(&server.by_tcp(&string)?, Tls, "with it");
    assert_becomes(&server.by_tcp("")?, Fails("requires a valid client certificate"), "without it");
    let [foreign, foreign_key] = Authority::new("stranger")?.certify(&[], "postgres")?;
    let (foreign, foreign_key) = (server.file("f.crt", &foreign)?, server.file("f.key", &foreign_key)?);
    let said = server.by_tcp(&format!("sslmode=require sslcert={foreign} sslkey={foreign_key}"))?;
    assert_becomes(&said, Fails("the server's log says why"), "a stranger's");
    let other_key = format!("sslmode=require sslcert={certificate} sslkey={foreign_key}");
    assert_becomes(&server.by_tcp(&other_key)?, Fails("mend sslcert and sslkey"), "another's key");
    fs::set_permissions(&key, Permissions::from_mode(0o644))?;
    let said = server.by_tcp(&format!("sslmode=require {string}"))?;
    assert_becomes(&said, Fails("run chmod 0600"), "a key that others may read");
    Ok(())
}

/// A server that asks for a password over TCP.
fn with_password() -> Result<Server> {
    let builder = Cluster::builder(PgInstall::v18()?).password(PASSWORD).setting("ssl", "on");
    let rules = "local all all scram-sha-256\nhost all all 127.0.0.1/32 scram-sha-256\n";
    Server::start(builder, rules)
}

#[test]
fn a_password_comes_from_a_file_the_environment_or_the_string() -> Result<()> {
    let server = with_password()?;
    for (mode, expected) in [("disable", Plain), ("require", Tls)] {
        let plain = format!("host=localhost user=postgres dbname=postgres sslmode={mode}");
        assert_becomes(&server.doctor(&plain, &[])?, Fails("wants a password for role"), "none");
        let said = server.doctor(&plain, &[("PGPASSWORD", "wrong and secret")])?;
        assert_becomes(&said, Fails("refused the password of role"), "a wrong one");
        assert_becomes(&server.doctor(&plain, &[("PGPASSWORD", PASSWORD)])?, expected, "PGPASSWORD");
        let quoted = format!("{plain} password='right and \\'sl\\\\ash\\''");
        assert_becomes(&server.doctor(&quoted, &[])?, expected, "the string");
        let uri = format!("postgresql://postgres:right%20and%20%27sl%5Cash%27@localhost/?sslmode={mode}");
        assert_becomes(&server.doctor(&uri, &[])?, expected, "the URI");
        let line = format!("localhost:{}:postgres:postgres:right and 'sl\\\\ash'\n", server.cluster.port());
        let file = server.file("passwords", &line)?;
        assert_becomes(&server.doctor(&plain, &[("PGPASSFILE", &file)])?, expected, "PGPASSFILE");
        assert_becomes(&server.doctor(&format!("{plain} passfile={file}"), &[])?, expected, "passfile");
        server.file(".pgpass", &line)?;
        assert_becomes(&server.doctor(&plain, &[])?, expected, ".pgpass");
        fs::remove_file(server.home.join(".pgpass"))?;
    }
    Ok(())
}

#[test]
fn a_password_is_bound_to_the_encrypted_channel() -> Result<()> {
    let server = with_password()?;
    let envs = [("PGPASSWORD", PASSWORD)];
    let string = "host=localhost user=postgres dbname=postgres channel_binding=require";
    assert_becomes(&server.doctor(&format!("{string} sslmode=require"), &envs)?, Tls, "with TLS");
    let said = server.doctor(&format!("{string} sslmode=disable"), &envs)?;
    assert_becomes(&said, Fails("channel binding"), "without TLS");
    Ok(())
}

#[test]
fn a_service_says_where_and_how() -> Result<()> {
    let server = Server::with_tls(TRUST)?;
    // Another server, so that the service has to choose.
    let other = Cluster::builder(PgInstall::v18()?).start()?;
    let root = server.file("root.pem", &server.authority.pem)?;
    let text = format!(
        "[shop]\nhost=localhost\nport={}\nuser=postgres\ndbname=postgres\nsslmode=verify-full\nsslrootcert={root}\n\
         [broken]\nnonsense\n",
        server.cluster.port()
    );
    ensure!(other.port() != server.cluster.port());
    let file = server.file("services", &text)?;
    let by = |service: &str| [("PGSERVICEFILE", file.clone()), ("PGSERVICE", service.to_owned())];
    let doctor = |envs: [(&str, String); 2], args: &[&str]| {
        let envs = envs.each_ref().map(|(name, value)| (*name, value.as_str()));
        said_of_connection(&server.tracer("doctor", &envs).args(args.iter().copied()))
    };
    assert_becomes(&doctor(by("shop"), &[])?, Tls, "PGSERVICE");
    assert_becomes(&doctor(by(""), &["-d", "service=shop"])?, Tls, "service=");
    assert_becomes(
        &doctor(by(""), &["-d", "postgresql://?service=shop&sslmode=disable"])?,
        Plain,
        "the URI wins",
    );
    server.file(".pg_service.conf", &text)?;
    let home = server.tracer("doctor", &[]).args(["-d", "service=shop"]);
    assert_becomes(&said_of_connection(&home)?, Tls, "~/.pg_service.conf");
    for (service, part) in
        [("none", "the service \"none\" is not defined in"), ("broken", "line 9 of the service file")]
    {
        let envs = by(service);
        let envs = envs.each_ref().map(|(name, value)| (*name, value.as_str()));
        let run = server.tracer("stat", &envs).args(["--duration", "1s"]).finish()?;
        assert_eq!(run.code(), 1, "{service}: {}", run.stderr);
        assert!(run.stderr.contains(part) && run.stderr.trim().lines().count() == 1, "{}", run.stderr);
    }
    Ok(())
}

#[test]
fn all_sessions_of_a_trace_are_encrypted_where_that_is_asked_for() -> Result<()> {
    let server = Server::with_tls(TRUST)?;
    let root = server.file("root.pem", &server.authority.pem)?;
    let string =
        format!("host=localhost user=postgres dbname=postgres sslmode=verify-full sslrootcert={root}");
    let tracer = server.tracer("stat", &[]).args(server.args(&string)).start()?;
    let mut client = server.cluster.connect("postgres")?;
    let sessions = "SELECT ssl, version FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) \
        WHERE application_name = 'pgiotrace'";
    let mut found = Vec::new();
    pgiotrace_tests::wait_until("the tracer's sessions are there", || {
        found = client.query(sessions, &[]).unwrap_or_default();
        !found.is_empty()
    })?;
    for row in &found {
        let (ssl, version): (bool, Option<String>) = (row.get(0), row.get(1));
        assert!(ssl && version.as_deref() == Some("TLSv1.3"), "{version:?}");
    }
    let run = tracer.interrupt()?;
    assert_eq!(run.code(), 0, "{}", run.stderr);
    assert_eq!(run.report()?["notes"], Value::Array(Vec::new()), "nothing is missing");
    Ok(())
}
