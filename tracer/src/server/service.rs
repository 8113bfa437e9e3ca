//! Connection services: named sets of parameters in `pg_service.conf`.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::parameters::{ParameterError, Parameters};

/// Folders of the system's own file, for want of `PGSYSCONFDIR`: the packages of Debian and of PostgreSQL's own
/// repository for Red Hat, and a build without options.
const SYSTEM_FOLDERS: [&str; 3] = ["/etc/postgresql-common", "/etc/sysconfig/pgsql", "/usr/local/pgsql/etc"];

/// Why a service is of no use.
#[derive(Debug, thiserror::Error)]
pub enum ServiceError {
    /// No file defines it.
    #[error(
        "the service \"{service}\" is not defined in {files}; write a section [{service}] there or name another \
         service"
    )]
    NotFound {
        /// Its name.
        service: String,
        /// The files that were looked into.
        files: String,
    },
    /// The file that `PGSERVICEFILE` names, or one that exists.
    #[error("reading the service file {} failed: {source}; mend PGSERVICEFILE or the file's permissions", .path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// A line that says nothing.
    #[error("line {line} of the service file {} is not valid ({what}); mend it", .path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// Number of the line.
        line: usize,
        /// What is wrong.
        what: String,
    },
}

/// Where services are defined.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Files {
    /// `PGSERVICEFILE`, or `~/.pg_service.conf`.
    pub user: Option<PathBuf>,
    /// Whether somebody named that file: then it has to be there.
    pub is_named: bool,
    /// The system's, tried in turn after the user's.
    pub system: Vec<PathBuf>,
}

impl Files {
    /// As `parseServiceInfo` in `fe-connect.c` finds them. `named`: parameter `servicefile` or its variable.
    pub fn find(named: Option<&str>, environment: &dyn Fn(&str) -> Option<String>) -> Self {
        let own = || Some(Path::new(&environment("HOME")?).join(".pg_service.conf"));
        let folders = environment("PGSYSCONFDIR")
            .map_or_else(|| SYSTEM_FOLDERS.map(PathBuf::from).to_vec(), |folder| vec![folder.into()]);
        Self {
            user: named.map(PathBuf::from).or_else(own),
            is_named: named.is_some(),
            system: folders.iter().map(|folder| folder.join("pg_service.conf")).collect(),
        }
    }

    /// The parameters of a service, from the first file that defines it.
    ///
    /// # Errors
    ///
    /// A [`ServiceError`].
    pub fn service(&self, service: &str) -> Result<Parameters, ServiceError> {
        let user = self.user.iter().map(|path| (path, self.is_named));
        let system = self.system.iter().map(|path| (path, false));
        for (path, must_exist) in user.chain(system) {
            let text = match fs::read_to_string(path) {
                Ok(text) => text,
                Err(error) if error.kind() == io::ErrorKind::NotFound && !must_exist => continue,
                Err(source) => return Err(ServiceError::Unreadable { path: path.clone(), source }),
            };
            let syntax = |(line, what)| ServiceError::Syntax { path: path.clone(), line, what };
            if let Some(parameters) = find(&text, service).map_err(syntax)? {
                return Ok(parameters);
            }
        }
        let paths = self.user.iter().chain(&self.system).map(|path| path.display().to_string());
        let files = paths.collect::<Vec<_>>().join(" or ");
        Err(ServiceError::NotFound { service: service.to_owned(), files })
    }
}

/// The section `[service]` of a file's text (`parseServiceFile`): `key=value`, nothing quoted, the first of two equal keys
/// counts; other sections are not looked at. An error is a line's number and what is wrong with it.
fn find(text: &str, service: &str) -> Result<Option<Parameters>, (usize, String)> {
    let header = format!("[{service}]");
    let lines = text.lines().enumerate().map(|(index, line)| (index + 1, line.trim()));
    let mut section = lines.skip_while(|(_, line)| !line.starts_with(&header)).peekable();
    if section.next().is_none() {
        return Ok(None);
    }
    let mut parameters = Parameters::default();
    let entries = section.take_while(|(_, line)| !line.starts_with('['));
    for (number, line) in entries.filter(|(_, line)| !line.is_empty() && !line.starts_with('#')) {
        if line.starts_with("ldap") {
            return Err((number, "services from LDAP are not supported".to_owned()));
        }
        let (name, value) = line.split_once('=').ok_or((number, "it has no \"=\"".to_owned()))?;
        if ["service", "servicefile"].contains(&name) {
            return Err((number, format!("a service cannot set \"{name}\"")));
        }
        if parameters.get_any(name).is_none() {
            let at_line = |error: ParameterError| (number, error.to_string());
            parameters.set(name, value.to_owned()).map_err(at_line)?;
        }
    }
    Ok(Some(parameters))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# all of them\n\n[first]\nhost=a\nport=1\n\n [second]\n# mine\nhost=b\nhost=c\nuser=u v\n[third]\nnonsense\n";

    #[test]
    fn a_section_ends_where_the_next_begins() {
        let first = find(TEXT, "first").expect("it is valid").expect("it is there");
        assert_eq!((first.get("host"), first.get("port"), first.get("user")), (Some("a"), Some("1"), None));
        let second = find(TEXT, "second").expect("it is valid").expect("it is there");
        assert_eq!(
            (second.get("host"), second.get("user"), second.get("port")),
            (Some("b"), Some("u v"), None)
        );
        assert_eq!(find(TEXT, "fir"), Ok(None));
    }

    #[test]
    fn only_the_section_that_is_wanted_must_be_valid() {
        assert_eq!(find(TEXT, "third"), Err((13, "it has no \"=\"".to_owned())));
        for (line, part) in [
            ("service=x", "cannot set"),
            ("ldap://x", "LDAP"),
            ("x=1", "no parameter \"x\""),
            ("host =a", "host "),
        ] {
            let (number, what) = find(&format!("[s]\n{line}"), "s").expect_err("it is not valid");
            assert!(number == 2 && what.contains(part), "{line}: {what}");
        }
    }

    #[test]
    fn the_users_file_comes_before_the_systems() {
        let folder = tempfile::tempdir().expect("a temporary directory");
        let path = |name: &str| folder.path().join(name);
        fs::write(path(".pg_service.conf"), "[own]\nhost=mine\n[both]\nhost=mine\n").expect("a file");
        fs::write(path("pg_service.conf"), "[both]\nhost=theirs\n[system]\nhost=theirs\n").expect("a file");
        let home = folder.path().display().to_string();
        let environment = |name: &str| ["HOME", "PGSYSCONFDIR"].contains(&name).then(|| home.clone());
        let files = Files::find(None, &environment);
        let host = |service: &str| files.service(service).map(|found| found.get("host").map(str::to_owned));
        for (service, expected) in [("own", "mine"), ("both", "mine"), ("system", "theirs")] {
            assert_eq!(host(service).expect("it is defined").as_deref(), Some(expected), "{service}");
        }
        let error = host("none").expect_err("it is not defined").to_string();
        assert!(
            error.contains("\"none\" is not defined in") && error.contains(".pg_service.conf"),
            "{error}"
        );
        let named = path("elsewhere").display().to_string();
        let error = Files::find(Some(&named), &environment).service("both").expect_err("it is missing");
        assert!(matches!(error, ServiceError::Unreadable { .. }), "{error}");
    }
}
