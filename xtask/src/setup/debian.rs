//! Debian packages of any suite, without touching the system: an apt state of our own in the cache.
//!
//! apt checks what it downloads against the signed index, with the keys that the machine already trusts.

use std::{
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, bail, ensure};

use super::unpack;
use crate::project::{cache, in_path, make_dir, run_quietly};

/// What counts as already installed when the packages to fetch are worked out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Installed {
    /// Nothing: the whole closure is fetched, for a root folder of its own.
    Nothing,
    /// What this machine has: only what it lacks is fetched.
    AsHere,
}

/// One suite of Debian's, with its index fetched.
#[derive(Debug)]
pub(crate) struct Suite {
    name: String,
    dir: PathBuf,
    options: Vec<OsString>,
}

impl Suite {
    /// The suite that this machine runs.
    pub(crate) fn of_this_machine(installed: Installed) -> Result<Self> {
        Self::open(&codename()?, installed)
    }

    /// Fetches the suite's index from the mirror that the machine itself uses. One that only adds to another, as
    /// `experimental` does, is named behind it: `sid experimental`.
    pub(crate) fn open(name: &str, installed: Installed) -> Result<Self> {
        for program in ["apt-get", "apt-cache", "dpkg-deb"] {
            ensure!(in_path(program).is_some(), "cannot fetch Debian packages: {program} is not installed");
        }
        let mirror = Mirror::of_this_machine()?;
        let dir = cache()?.join("downloads/apt").join(name.replace(' ', "-"));
        for sub in ["lists/partial", "cache/archives/partial"] {
            make_dir(&dir.join(sub))?;
        }
        write(&dir.join("status"), "")?;
        write(&dir.join("mirror.sources"), &mirror.sources(name))?;
        let suite = Self { name: name.to_owned(), options: options(&dir, installed), dir };
        run_quietly(suite.apt("apt-get").arg("update"))
            .with_context(|| format!("cannot read the index of Debian {name} from this machine's mirror"))?;
        Ok(suite)
    }

    /// The versions of a package that the suite has, newest first.
    pub(crate) fn versions(&self, package: &str) -> Result<Vec<String>> {
        let table = run_quietly(self.apt("apt-cache").args(["madison", package]))?;
        let version = |line: &str| line.split('|').nth(1).map(|version| version.trim().to_owned());
        Ok(table.lines().filter_map(version).collect())
    }

    /// Fetches packages (`name` or `name=version`) with all that they need, and returns the files.
    pub(crate) fn download(&self, packages: &[&str]) -> Result<Vec<PathBuf>> {
        let what = || format!("cannot fetch {} of Debian {}", packages.join(", "), self.name);
        let install = |option: &str| {
            let mut command = self.apt("apt-get");
            command.args(["install", "--yes", option]).args(packages);
            command
        };
        // Asked for before the download: afterwards apt no longer lists what is already in its cache.
        let archives = self.dir.join("cache/archives");
        let listed = run_quietly(&mut self.without_cache(install("--print-uris"))).with_context(what)?;
        let files: Vec<_> =
            listed.lines().filter_map(file_of_uri_line).map(|file| archives.join(file)).collect();
        run_quietly(&mut install("--download-only")).with_context(what)?;
        ensure!(!files.is_empty(), "{}: there is nothing to fetch", what());
        for file in &files {
            ensure!(file.exists(), "{}: {} is missing", what(), file.display());
        }
        Ok(files)
    }

    fn apt(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        for option in &self.options {
            command.arg("-o").arg(option);
        }
        command.env("LC_ALL", "C").env("DEBIAN_FRONTEND", "noninteractive");
        command
    }

    /// Makes apt believe that it has downloaded nothing yet.
    fn without_cache(&self, mut command: Command) -> Command {
        let mut option = OsString::from("Dir::Cache::archives=");
        option.push(self.dir.join("no-archives/"));
        // apt wants the folder, even to print what it would put there.
        let _ = make_dir(&self.dir.join("no-archives/partial"));
        command.arg("-o").arg(option);
        command
    }
}

/// Unpacks package files into one tree, the one whose links shape it (`base-files`) first.
pub(crate) fn unpack(files: &[PathBuf], target: &Path, origin: &str) -> Result<()> {
    unpack::atomically(target, origin, |fresh| {
        let is_base = |file: &&PathBuf| {
            file.file_name().is_some_and(|name| name.to_string_lossy().starts_with("base-files_"))
        };
        for file in files.iter().filter(is_base).chain(files.iter().filter(|file| !is_base(file))) {
            run_quietly(Command::new("dpkg-deb").arg("-x").arg(file).arg(fresh))?;
        }
        Ok(())
    })
}

fn options(dir: &Path, installed: Installed) -> Vec<OsString> {
    let paths = [
        ("Dir::Etc::sourcelist=", "mirror.sources"),
        ("Dir::State::Lists=", "lists"),
        ("Dir::Cache=", "cache"),
    ];
    let status = [("Dir::State::status=", "status")];
    let status = status.iter().filter(|_| installed == Installed::Nothing);
    let joined = |(option, path): &(&str, &str)| {
        let mut option = OsString::from(option);
        option.push(dir.join(path));
        option
    };
    let fixed = [
        "Dir::Etc::sourceparts=-",
        "APT::Install-Recommends=0",
        "APT::Sandbox::User=root",
        // Without it a failed download of an index is only a warning.
        "APT::Update::Error-Mode=any",
        "Acquire::Languages=none",
        "Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false",
        "Acquire::Retries=3",
        // The lock of the system's package database is not ours to take, nor needed.
        "Debug::NoLocking=1",
    ];
    paths.iter().chain(status).map(joined).chain(fixed.map(OsString::from)).collect()
}

/// The file's name in a line `'URI' NAME SIZE HASH` of `apt-get --print-uris`.
fn file_of_uri_line(line: &str) -> Option<&str> {
    line.strip_prefix('\'')?.split_whitespace().nth(1)
}

/// Where this machine gets its Debian packages from.
#[derive(Debug, PartialEq, Eq)]
struct Mirror {
    uri: String,
    signed_by: Option<String>,
}

impl Mirror {
    fn of_this_machine() -> Result<Self> {
        let codename = codename()?;
        for file in source_files() {
            let Ok(text) = fs::read_to_string(&file) else { continue };
            let deb822 = file.extension().is_some_and(|extension| extension == "sources");
            let found =
                if deb822 { Self::in_deb822(&text, &codename) } else { Self::in_list(&text, &codename) };
            if let Some(mirror) = found {
                return Ok(mirror);
            }
        }
        bail!("cannot find a Debian mirror: no file in /etc/apt names one for {codename}")
    }

    /// Stanzas of `Field: values`, divided by empty lines.
    fn in_deb822(text: &str, codename: &str) -> Option<Self> {
        let text: String =
            text.lines().filter(|line| !line.starts_with('#')).map(|line| line.to_owned() + "\n").collect();
        text.split("\n\n").find_map(|stanza| {
            let field = |name: &str| stanza.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
            let has = |name: &str, wanted: &str| {
                field(name).is_some_and(|f| f.split_whitespace().any(|w| w == wanted))
            };
            let fits = has("Types:", "deb") && has("Suites:", codename) && has("Components:", "main");
            let uri = field("URIs:")?.split_whitespace().next()?.to_owned();
            fits.then(|| Self {
                uri,
                signed_by: field("Signed-By:").filter(|f| !f.is_empty()).map(str::to_owned),
            })
        })
    }

    /// Lines `deb [options] URI suite component…`.
    fn in_list(text: &str, codename: &str) -> Option<Self> {
        text.lines().find_map(|line| {
            let rest = line.trim().strip_prefix("deb ")?.trim_start();
            let (options, rest) = match rest.strip_prefix('[') {
                Some(rest) => rest.split_once(']')?,
                None => ("", rest),
            };
            let mut words = rest.split_whitespace();
            let (uri, suite) = (words.next()?.to_owned(), words.next()?);
            let signed_by = options.split_whitespace().find_map(|option| option.strip_prefix("signed-by="));
            let fits = suite == codename && words.any(|component| component == "main");
            fits.then(|| Self { uri, signed_by: signed_by.map(str::to_owned) })
        })
    }

    fn sources(&self, suite: &str) -> String {
        let signed_by =
            self.signed_by.as_ref().map(|keys| format!("Signed-By: {keys}\n")).unwrap_or_default();
        format!("Types: deb\nURIs: {}\nSuites: {suite}\nComponents: main\n{signed_by}", self.uri)
    }
}

fn source_files() -> Vec<PathBuf> {
    let parts =
        fs::read_dir("/etc/apt/sources.list.d").into_iter().flatten().flatten().map(|entry| entry.path());
    let mut files: Vec<_> = parts
        .filter(|file| {
            file.extension().is_some_and(|extension| extension == "sources" || extension == "list")
        })
        .collect();
    files.sort();
    files.insert(0, PathBuf::from("/etc/apt/sources.list"));
    files
}

fn codename() -> Result<String> {
    let text = fs::read_to_string("/etc/os-release")
        .context("cannot read /etc/os-release to find a Debian mirror")?;
    let name = text.lines().find_map(|line| line.strip_prefix("VERSION_CODENAME="));
    name.map(|name| name.trim_matches('"').to_owned())
        .context("cannot find a Debian mirror: /etc/os-release names no VERSION_CODENAME")
}

fn write(file: &Path, text: &str) -> Result<()> {
    fs::write(file, text).with_context(|| format!("cannot write {}", file.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mirror_of_this_release_is_taken_from_stanzas() {
        let text = "Types: deb\n# a snapshot\nURIs: http://mirror.example/debian-security\nSuites: bookworm-security\n\
                    Components: main\n\nTypes: deb deb-src\nURIs: http://mirror.example/debian\n\
                    Suites: bookworm bookworm-updates\nComponents: main contrib\nSigned-By: /keys.gpg\n";
        let mirror = Mirror::in_deb822(text, "bookworm").expect("the second stanza fits");
        assert_eq!(
            mirror,
            Mirror {
                uri: "http://mirror.example/debian".to_owned(),
                signed_by: Some("/keys.gpg".to_owned())
            }
        );
        assert!(mirror.sources("forky").contains("Suites: forky\n"));
        assert_eq!(Mirror::in_deb822(text, "trixie"), None);
    }

    #[test]
    fn the_mirror_of_this_release_is_taken_from_lines() {
        let text = "# deb http://old.example/debian bookworm main\n\
                    deb [arch=amd64 signed-by=/keys.gpg] http://mirror.example/debian bookworm main\n";
        let mirror = Mirror::in_list(text, "bookworm").expect("the second line fits");
        assert_eq!(
            (mirror.uri.as_str(), mirror.signed_by.as_deref()),
            ("http://mirror.example/debian", Some("/keys.gpg"))
        );
        assert_eq!(Mirror::in_list(text, "sid"), None);
    }

    #[test]
    fn files_are_read_from_apts_list() {
        let line = "'http://mirror.example/pool/x_1%2b2_all.deb' x_1+2_all.deb 123 SHA256:ab";
        assert_eq!(file_of_uri_line(line), Some("x_1+2_all.deb"));
        assert_eq!(file_of_uri_line("Reading package lists..."), None);
    }
}
