//! The parameters of a connection, as libpq knows them (`PQconninfoOptions` in `fe-connect.c` of PostgreSQL 18 and
//! 19), and the two ways to write them: `key=value …` and `postgresql://…`.
//!
//! The library's own parser refuses most of them, among them `sslrootcert` and half of the values of `sslmode`.

use std::collections::BTreeMap;

use percent_encoding::percent_decode_str;

/// What becomes of a parameter that libpq knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Use {
    /// It is heeded.
    Heeded,
    /// Nothing that a tracer's session does depends on it.
    Ignored,
    /// It restricts whom or how to talk to, and is not built in: ignoring it would do what nobody asked for.
    Refused,
}

use Use::{Heeded, Ignored, Refused};

/// Every parameter, with its environment variable where there is one.
///
/// `PGHOST` and `PGPORT` are not here: they also choose the server (see `connect`).
const PARAMETERS: [(&str, Option<&str>, Use); 55] = [
    ("application_name", Some("PGAPPNAME"), Ignored),
    ("authtype", None, Ignored),
    ("channel_binding", Some("PGCHANNELBINDING"), Heeded),
    ("client_encoding", Some("PGCLIENTENCODING"), Ignored),
    ("connect_timeout", Some("PGCONNECT_TIMEOUT"), Heeded),
    ("dbname", Some("PGDATABASE"), Heeded),
    ("fallback_application_name", None, Ignored),
    // The library speaks no GSSAPI: `prefer`, the default, then means what follows.
    ("gssdelegation", Some("PGGSSDELEGATION"), Ignored),
    ("gssencmode", Some("PGGSSENCMODE"), Heeded),
    ("gsslib", Some("PGGSSLIB"), Ignored),
    ("host", None, Heeded),
    ("hostaddr", None, Heeded),
    ("keepalives", None, Ignored),
    ("keepalives_count", None, Ignored),
    ("keepalives_idle", None, Ignored),
    ("keepalives_interval", None, Ignored),
    ("krbsrvname", Some("PGKRBSRVNAME"), Ignored),
    ("load_balance_hosts", Some("PGLOADBALANCEHOSTS"), Ignored),
    ("max_protocol_version", Some("PGMAXPROTOCOLVERSION"), Ignored),
    ("min_protocol_version", Some("PGMINPROTOCOLVERSION"), Ignored),
    ("oauth_ca_file", None, Refused),
    ("oauth_client_id", None, Refused),
    ("oauth_client_secret", None, Refused),
    ("oauth_issuer", None, Refused),
    ("oauth_scope", None, Refused),
    ("options", Some("PGOPTIONS"), Heeded),
    ("passfile", Some("PGPASSFILE"), Heeded),
    ("password", Some("PGPASSWORD"), Heeded),
    ("port", None, Heeded),
    ("replication", None, Refused),
    ("require_auth", Some("PGREQUIREAUTH"), Refused),
    ("requirepeer", Some("PGREQUIREPEER"), Refused),
    ("requiressl", None, Refused),
    ("scram_client_key", None, Refused),
    ("scram_server_key", None, Refused),
    ("service", Some("PGSERVICE"), Heeded),
    ("servicefile", Some("PGSERVICEFILE"), Heeded),
    ("sslcert", Some("PGSSLCERT"), Heeded),
    ("sslcertmode", Some("PGSSLCERTMODE"), Refused),
    ("sslcompression", Some("PGSSLCOMPRESSION"), Ignored),
    ("sslcrl", Some("PGSSLCRL"), Refused),
    ("sslcrldir", Some("PGSSLCRLDIR"), Refused),
    ("sslkey", Some("PGSSLKEY"), Heeded),
    ("sslkeylogfile", None, Ignored),
    ("sslmode", Some("PGSSLMODE"), Heeded),
    ("sslnegotiation", Some("PGSSLNEGOTIATION"), Heeded),
    ("sslpassword", None, Refused),
    ("sslrootcert", Some("PGSSLROOTCERT"), Heeded),
    ("sslsni", Some("PGSSLSNI"), Ignored),
    ("ssl_max_protocol_version", Some("PGSSLMAXPROTOCOLVERSION"), Refused),
    ("ssl_min_protocol_version", Some("PGSSLMINPROTOCOLVERSION"), Heeded),
    ("target_session_attrs", Some("PGTARGETSESSIONATTRS"), Ignored),
    ("tcp_user_timeout", None, Ignored),
    ("tty", None, Ignored),
    ("user", Some("PGUSER"), Heeded),
];

/// Why parameters are not valid. A value is shown only where it cannot be a part of a password.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ParameterError {
    /// No such parameter.
    #[error("there is no parameter \"{0}\"")]
    Unknown(String),
    /// One that would have to be heeded, and is not.
    #[error("the parameter \"{0}\" is not supported")]
    Unsupported(String),
    /// `key value` or `key` alone.
    #[error("\"=\" is missing after \"{0}\"")]
    NoEquals(String),
    /// A URI's `?key=a=b`.
    #[error("there is one \"=\" too many after \"{0}\"")]
    ExtraEquals(String),
    /// A quotation mark without its partner.
    #[error("a quoted value does not end")]
    Quote,
    /// `[::1` without its end, or with something behind it.
    #[error("an IPv6 address wants \"]\" and then \":\", \"/\" or the end")]
    Bracket,
    /// `%` without two hexadecimal digits, `%00`, or what is no UTF-8.
    #[error("a \"%\" is not followed by two hexadecimal digits of UTF-8 text")]
    PercentEncoding,
    /// A value that the parameter cannot have.
    #[error("{parameter} cannot be \"{value}\"; it is {allowed}")]
    Value {
        /// The parameter.
        parameter: &'static str,
        /// What it was given.
        value: String,
        /// What it may be.
        allowed: &'static str,
    },
}

/// Parameters by name; an empty value is no value, as in libpq.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Parameters(BTreeMap<String, String>);

impl Parameters {
    /// The value of a parameter.
    pub fn get(&self, name: &str) -> Option<&str> {
        debug_assert!(PARAMETERS.iter().any(|(known, ..)| *known == name), "{name} is not in the table");
        self.0.get(name).map(String::as_str).filter(|value| !value.is_empty())
    }

    /// The value of a name that may be any text.
    pub fn get_any(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    /// The first of a list of values, as hosts and ports may be.
    pub fn first(&self, name: &str) -> Option<&str> {
        self.get(name)?.split(',').next().filter(|value| !value.is_empty())
    }

    /// The port, or the first of several.
    ///
    /// # Errors
    ///
    /// When it is no number from 1 to 65535.
    pub fn port(&self) -> Result<Option<u16>, ParameterError> {
        let Some(text) = self.first("port") else { return Ok(None) };
        let port = text.trim().parse().ok().filter(|port| *port > 0);
        port.map(Some).ok_or_else(|| ParameterError::Value {
            parameter: "port",
            value: text.to_owned(),
            allowed: "a number from 1 to 65535",
        })
    }

    /// Sets a parameter.
    ///
    /// # Errors
    ///
    /// [`ParameterError::Unknown`] and [`ParameterError::Unsupported`].
    pub fn set(&mut self, name: &str, value: String) -> Result<(), ParameterError> {
        // As libpq reads JDBC's form of a URI.
        if (name, value.as_str()) == ("ssl", "true") {
            return self.set("sslmode", "require".to_owned());
        }
        let found = PARAMETERS.iter().find(|(known, ..)| *known == name);
        let (.., parameter_use) = found.ok_or_else(|| ParameterError::Unknown(name.to_owned()))?;
        if *parameter_use == Refused && !value.is_empty() {
            return Err(ParameterError::Unsupported(name.to_owned()));
        }
        self.0.insert(name.to_owned(), value);
        Ok(())
    }

    /// Takes what is not set here from another source.
    pub fn complete_with(&mut self, others: &Self) {
        for (name, value) in &others.0 {
            if self.get(name).is_none() {
                self.0.insert(name.clone(), value.clone());
            }
        }
    }

    /// What the environment's variables say.
    ///
    /// # Errors
    ///
    /// [`ParameterError::Unsupported`].
    pub fn of_environment(environment: &dyn Fn(&str) -> Option<String>) -> Result<Self, ParameterError> {
        let mut parameters = Self::default();
        for (name, variable, _) in PARAMETERS {
            if let Some(value) = variable.and_then(environment) {
                parameters.set(name, value)?;
            }
        }
        Ok(parameters)
    }

    /// Reads a connection string; `None` where the text is none but a database's name, by libpq's rule
    /// (`recognized_connection_string`).
    ///
    /// # Errors
    ///
    /// A [`ParameterError`].
    pub fn of_connection_string(text: &str) -> Result<Option<Self>, ParameterError> {
        let uri = ["postgresql://", "postgres://"].iter().find_map(|scheme| text.strip_prefix(scheme));
        match uri {
            Some(rest) => of_uri(rest).map(Some),
            None if text.contains('=') => of_pairs(text).map(Some),
            None => Ok(None),
        }
    }
}

/// Reads `key=value key = 'a value'` (`conninfo_parse`).
fn of_pairs(text: &str) -> Result<Parameters, ParameterError> {
    let mut parameters = Parameters::default();
    let mut rest = text.trim_start();
    while !rest.is_empty() {
        let end = rest.find(|c: char| c == '=' || c.is_ascii_whitespace()).unwrap_or(rest.len());
        let (name, behind) = rest.split_at(end);
        let no_equals = || ParameterError::NoEquals(name.to_owned());
        let behind = behind.trim_start().strip_prefix('=').ok_or_else(no_equals)?;
        let (value, behind) = pair_value(behind.trim_start())?;
        parameters.set(name, value)?;
        rest = behind.trim_start();
    }
    Ok(parameters)
}

/// A value, and what follows it: up to white space, or in single quotation marks; a backslash takes what comes next as it
/// is.
fn pair_value(text: &str) -> Result<(String, &str), ParameterError> {
    let quoted = text.strip_prefix('\'');
    let mut value = String::new();
    let mut characters = quoted.unwrap_or(text).chars();
    loop {
        let here = characters.as_str();
        match characters.next() {
            Some('\'') if quoted.is_some() => return Ok((value, characters.as_str())),
            Some(space) if quoted.is_none() && space.is_ascii_whitespace() => return Ok((value, here)),
            // A lone backslash at the end is dropped.
            Some('\\') => value.extend(characters.next()),
            Some(other) => value.push(other),
            None if quoted.is_some() => return Err(ParameterError::Quote),
            None => return Ok((value, here)),
        }
    }
}

/// Reads what follows `postgresql://` (`conninfo_uri_parse_options`):
/// `[user[:password]@][host[:port],…][/database][?key=value&…]`.
fn of_uri(text: &str) -> Result<Parameters, ParameterError> {
    let mut parameters = Parameters::default();
    let mut rest = text;
    if let Some(end) = rest.find(['@', '/']).filter(|end| rest[*end..].starts_with('@')) {
        let (user, password) = rest[..end].split_once(':').unwrap_or((&rest[..end], ""));
        parameters.set("user", decoded(user)?)?;
        parameters.set("password", decoded(password)?)?;
        rest = &rest[end + 1..];
    }
    let (rest, query) = split_at(rest, '?');
    let (addresses, database) = split_at(rest, '/');
    let (hosts, ports) = uri_addresses(addresses)?;
    parameters.set("host", decoded(&hosts)?)?;
    parameters.set("port", decoded(&ports)?)?;
    parameters.set("dbname", decoded(database)?)?;
    for pair in query.split('&').filter(|_| !query.is_empty()) {
        let (name, value) = pair
            .split_once('=')
            .ok_or_else(|| ParameterError::NoEquals(decoded(pair).unwrap_or_default()))?;
        let name = decoded(name)?;
        if value.contains('=') {
            return Err(ParameterError::ExtraEquals(name));
        }
        parameters.set(&name, decoded(value)?)?;
    }
    Ok(parameters)
}

/// The text before and after a character, which itself goes.
fn split_at(text: &str, character: char) -> (&str, &str) {
    text.split_once(character).unwrap_or((text, ""))
}

/// The hosts and the ports of `host:port,[::1]:port`, each as a list with commas.
fn uri_addresses(text: &str) -> Result<(String, String), ParameterError> {
    let (mut hosts, mut ports) = (Vec::new(), Vec::new());
    for address in text.split(',') {
        let (host, port) = match address.strip_prefix('[') {
            Some(bracketed) => {
                let (host, behind) = bracketed.split_once(']').ok_or(ParameterError::Bracket)?;
                let port = if behind.is_empty() { Some("") } else { behind.strip_prefix(':') };
                (host, port.ok_or(ParameterError::Bracket)?)
            }
            None => split_at(address, ':'),
        };
        hosts.push(host);
        ports.push(port);
    }
    // One empty entry is the default; several are a list.
    Ok((hosts.join(","), ports.join(",")))
}

/// Text with its `%xx` put in (`conninfo_uri_decode`, which takes no NUL either).
fn decoded(text: &str) -> Result<String, ParameterError> {
    let is_hex = |part: &str| {
        let digits = part.as_bytes();
        digits.len() >= 2 && digits[..2].iter().all(u8::is_ascii_hexdigit) && &digits[..2] != b"00"
    };
    if !text.split('%').skip(1).all(is_hex) {
        return Err(ParameterError::PercentEncoding);
    }
    let decoded = percent_decode_str(text).decode_utf8().map_err(|_| ParameterError::PercentEncoding)?;
    Ok(decoded.into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Parameters {
        Parameters::of_connection_string(text).expect("it is valid").expect("it is a connection string")
    }

    fn refused(text: &str) -> ParameterError {
        Parameters::of_connection_string(text).expect_err("it is not valid")
    }

    fn given(parameters: &Parameters) -> Vec<(&str, &str)> {
        let with_value = |(name, value): (&'_ String, &'_ String)| !value.is_empty() && !name.is_empty();
        let all = parameters.0.iter().filter(|pair| with_value(*pair));
        all.map(|(name, value)| (name.as_str(), value.as_str())).collect()
    }

    #[test]
    fn a_name_is_no_connection_string() {
        for name in ["shop", "postgresql", "a b", ""] {
            assert_eq!(Parameters::of_connection_string(name), Ok(None));
        }
    }

    #[test]
    fn pairs_may_be_spaced_quoted_and_escaped() {
        let parameters =
            parsed(r" host = db  user='o\'neil' password='a b\\c'dbname=x\ y sslmode=verify-ca port=''");
        assert_eq!(
            given(&parameters),
            [
                ("dbname", "x y"),
                ("host", "db"),
                ("password", r"a b\c"),
                ("sslmode", "verify-ca"),
                ("user", "o'neil"),
            ]
        );
        assert_eq!(parameters.port(), Ok(None), "an empty value is none");
        assert_eq!(given(&parsed(r"user=a\")), [("user", "a")]);
    }

    #[test]
    fn broken_pairs_say_where() {
        assert_eq!(refused("host=a user"), ParameterError::NoEquals("user".to_owned()));
        assert_eq!(refused("host=a =b"), ParameterError::Unknown(String::new()));
        assert_eq!(refused("host='a"), ParameterError::Quote);
        assert_eq!(refused("nonsense=1"), ParameterError::Unknown("nonsense".to_owned()));
        assert_eq!(refused("sslcrl=x"), ParameterError::Unsupported("sslcrl".to_owned()));
        assert_eq!(given(&parsed("sslcrl='' user=a")), [("user", "a")], "not asked for");
    }

    #[test]
    fn a_uri_has_all_its_parts() {
        let uri = "postgresql://b%40b:s%3Ae%2Fc@db.example:6432/bo%20oks?sslmode=verify-full&sslrootcert=/a%26b&options=-c%20a%3Db";
        let parameters = parsed(uri);
        assert_eq!(
            given(&parameters),
            [
                ("dbname", "bo oks"),
                ("host", "db.example"),
                ("options", "-c a=b"),
                ("password", "s:e/c"),
                ("port", "6432"),
                ("sslmode", "verify-full"),
                ("sslrootcert", "/a&b"),
                ("user", "b@b"),
            ]
        );
    }

    #[test]
    fn a_uri_may_leave_out_anything() {
        assert_eq!(given(&parsed("postgres://")), []);
        assert_eq!(given(&parsed("postgresql:///shop")), [("dbname", "shop")]);
        assert_eq!(given(&parsed("postgresql://%2Frun%2Fpg/")), [("host", "/run/pg")]);
        assert_eq!(given(&parsed("postgresql://alice@/x")), [("dbname", "x"), ("user", "alice")]);
        assert_eq!(
            given(&parsed("postgresql://?service=x&ssl=true")),
            [("service", "x"), ("sslmode", "require")]
        );
        assert_eq!(given(&parsed("postgresql://h?host=%2Frun&port=1")), [("host", "/run"), ("port", "1")]);
        assert_eq!(given(&parsed("postgresql:///?user=a@b")), [("user", "a@b")]);
    }

    #[test]
    fn the_first_of_several_hosts_counts() {
        let parameters = parsed("postgresql://[::1]:5433,other:5434/x");
        assert_eq!((parameters.first("host"), parameters.port()), (Some("::1"), Ok(Some(5433))));
        let parameters = parsed("host=a,b port=1,2");
        assert_eq!((parameters.first("host"), parameters.port()), (Some("a"), Ok(Some(1))));
    }

    #[test]
    fn broken_uris_say_where() {
        for (uri, error) in [
            ("postgresql://[::1", ParameterError::Bracket),
            ("postgresql://[::1]x", ParameterError::Bracket),
            ("postgresql://a%zz@h", ParameterError::PercentEncoding),
            ("postgresql://a%", ParameterError::PercentEncoding),
            ("postgresql://a%00b", ParameterError::PercentEncoding),
            ("postgresql://a%ffb", ParameterError::PercentEncoding),
            ("postgresql://h?user", ParameterError::NoEquals("user".to_owned())),
            ("postgresql://h?user=a=b", ParameterError::ExtraEquals("user".to_owned())),
            ("postgresql://h?nonsense=b", ParameterError::Unknown("nonsense".to_owned())),
        ] {
            assert_eq!(refused(uri), error, "{uri}");
        }
        assert!(matches!(parsed("postgresql://h:port").port(), Err(ParameterError::Value { .. })));
    }

    #[test]
    fn what_is_set_stays() {
        let mut parameters = parsed("user=a dbname=''");
        parameters.complete_with(&parsed("user=b dbname=x host=h"));
        assert_eq!(given(&parameters), [("dbname", "x"), ("host", "h"), ("user", "a")]);
    }

    #[test]
    fn the_environment_is_read_by_the_table() {
        let environment = |name: &str| (name == "PGSSLMODE").then(|| "require".to_owned());
        let parameters = Parameters::of_environment(&environment).expect("it is supported");
        assert_eq!(given(&parameters), [("sslmode", "require")]);
        let environment = |name: &str| (name == "PGREQUIREPEER").then(|| "postgres".to_owned());
        assert!(Parameters::of_environment(&environment).is_err());
    }
}
