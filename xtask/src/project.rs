//! Where things are, and how other programs are run.

use std::{
    env,
    ffi::{OsStr, OsString},
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

use anyhow::{Context as _, Result, bail};
use pgiotrace_tests::cache::cache_dir;

/// The workspace's top folder.
pub(crate) fn root() -> PathBuf {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    manifest.parent().unwrap_or(manifest).to_owned()
}

/// The cache folder; it exists when this returns.
pub(crate) fn cache() -> Result<PathBuf> {
    let dir =
        cache_dir().context("cannot choose a cache folder: set PGIOTRACE_CACHE, XDG_CACHE_HOME or HOME")?;
    make_dir(&dir)?;
    dir.canonicalize().with_context(|| format!("cannot find the cache folder {}", dir.display()))
}

/// Makes a folder and those above it.
pub(crate) fn make_dir(dir: &Path) -> Result<()> {
    std::fs::create_dir_all(dir).with_context(|| format!("cannot make the folder {}", dir.display()))
}

/// Folder of the programs that setup installs.
pub(crate) fn tools_bin() -> Result<PathBuf> {
    Ok(cache()?.join("tools/bin"))
}

/// Where a program is: in `PATH`, or in the administrators' folders that a normal user's `PATH` often lacks.
pub(crate) fn in_path(program: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let more = ["/usr/sbin", "/sbin"].map(PathBuf::from);
    env::split_paths(&path).chain(more).map(|dir| dir.join(program)).find(|file| is_executable(file))
}

/// A program in `PATH`, else among those that setup installed.
pub(crate) fn find_program(program: &str) -> Option<PathBuf> {
    let cached = || tools_bin().ok().map(|bin| bin.join(program)).filter(|file| is_executable(file));
    in_path(program).or_else(cached)
}

pub(crate) fn is_executable(file: &Path) -> bool {
    file.metadata().is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
}

/// The first thing that looks like a version in what `program --version` prints.
pub(crate) fn version_of(program: &Path) -> Option<String> {
    let output = Command::new(program).arg("--version").stdin(Stdio::null()).output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let word = text.split_whitespace().map(|word| word.trim_start_matches('v'));
    let version =
        word.into_iter().find(|word| word.starts_with(|c: char| c.is_ascii_digit()) && word.contains('.'));
    version.map(str::to_owned)
}

/// `cargo` in the workspace, with the tools that setup installed in `PATH`.
pub(crate) fn cargo() -> Result<Command> {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root()).env("PATH", path_with_tools()?);
    Ok(command)
}

/// `PATH` with the tools that setup installed in front.
pub(crate) fn path_with_tools() -> Result<OsString> {
    let path = env::var_os("PATH").unwrap_or_default();
    env::join_paths([tools_bin()?].into_iter().chain(env::split_paths(&path)))
        .context("cannot put the tools' folder into PATH: its name has a colon")
}

/// Runs a command whose output is for the person who watches.
pub(crate) fn run_visibly(command: &mut Command) -> Result<()> {
    let name = display(command);
    let status = command.stdin(Stdio::null()).status().with_context(|| format!("cannot run `{name}`"))?;
    if !status.success() {
        bail!("`{name}` failed ({status})");
    }
    Ok(())
}

/// Runs a command whose output matters only to us, or when it fails.
pub(crate) fn run_quietly(command: &mut Command) -> Result<String> {
    let name = display(command);
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("cannot run `{name}`"))?;
    if !output.status.success() {
        bail!("`{name}` failed ({}): {}", output.status, gist(&output));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The lines of a failed program's output that say why: those of its errors, else the last one.
fn gist(output: &Output) -> String {
    let text =
        String::from_utf8_lossy(if output.stderr.is_empty() { &output.stdout } else { &output.stderr })
            .into_owned();
    let is_error =
        |line: &&str| ["E: ", "error", "ERROR", "npm error"].iter().any(|mark| line.starts_with(mark));
    let errors: Vec<_> = text.lines().filter(is_error).take(3).map(str::trim).collect();
    if errors.is_empty() {
        text.lines().last().unwrap_or_default().trim().to_owned()
    } else {
        errors.join("; ")
    }
}

/// Program and first arguments, enough to know what was run.
fn display(command: &Command) -> String {
    let program = Path::new(command.get_program()).file_name().unwrap_or_else(|| OsStr::new("?"));
    let args =
        command.get_args().filter(|arg| !arg.to_string_lossy().contains("::")).filter(|arg| *arg != "-o");
    let words: Vec<_> =
        [program].into_iter().chain(args).take(6).map(|word| word.to_string_lossy().into_owned()).collect();
    words.join(" ")
}
