//! Where a report goes, whole or not at all.

use std::fs::{self, File, Metadata, OpenOptions, Permissions};
use std::io::{self, IsTerminal, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};

use anstream::{AutoStream, ColorChoice};
use tempfile::NamedTempFile;

/// Links that are followed before a path counts as a loop, as in the kernel (`MAXSYMLINKS`, include/linux/namei.h).
const MAX_LINKS: usize = 40;

/// Mode of a new file, before the umask.
const NEW_FILE_MODE: u32 = 0o666;

/// Where a report goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Destination {
    /// Standard output.
    Stdout,
    /// Standard error: beside a command whose own output stays clean.
    Stderr,
    /// A file, replaced as a whole; or a device, FIFO or open descriptor, written to as it is.
    File(PathBuf),
}

/// A report that could not be written.
#[derive(Debug, thiserror::Error)]
pub enum OutputError {
    /// The file's folder, or the file, refuses.
    #[error("cannot write the report to {path}: {source}; choose another file with -o", path = path.display())]
    File {
        /// The file as the user named it.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// Standard output or standard error refuses.
    #[error("cannot write the report to {stream}: {source}; write it to a file with -o FILE")]
    Stream {
        /// "standard output" or "standard error".
        stream: &'static str,
        /// What the system said.
        #[source]
        source: io::Error,
    },
}

/// How a path is written to.
enum Place {
    /// A regular file, or none yet: a new one takes its place. The existing one's metadata, if any.
    Replace(PathBuf, Option<Metadata>),
    /// Something that must not be replaced: a device, a FIFO, `/dev/stdout`.
    Through(PathBuf),
}

impl Destination {
    /// Says early whether the report can be written, so that no trace is made in vain. Leaves nothing behind.
    ///
    /// # Errors
    ///
    /// As [`Destination::write`], for files.
    pub fn check(&self) -> Result<(), OutputError> {
        let Self::File(path) = self else { return Ok(()) };
        check_file(path).map_err(|source| OutputError::File { path: path.clone(), source })
    }

    /// Columns of the terminal that the report goes to; `None` when it goes to none.
    #[must_use]
    pub fn width(&self) -> Option<usize> {
        let size = match self {
            Self::Stdout => rustix::termios::tcgetwinsize(io::stdout()),
            Self::Stderr => rustix::termios::tcgetwinsize(io::stderr()),
            Self::File(_) => return None,
        };
        // A terminal that does not know says 0.
        size.ok().map(|size| usize::from(size.ws_col)).filter(|columns| *columns > 0)
    }

    /// Lets `render` write the report, and delivers it once it is whole. `color` decides about the styles in it;
    /// [`ColorChoice::Auto`] keeps them on a terminal unless `NO_COLOR`, `CLICOLOR` or `TERM` say otherwise.
    /// A reader that has gone away (`pgiotrace stat | head`) is no error.
    ///
    /// # Errors
    ///
    /// When the destination, named in the error, cannot be written to.
    pub fn write(
        &self,
        color: ColorChoice,
        render: impl FnOnce(&mut dyn Write) -> io::Result<()>,
    ) -> Result<(), OutputError> {
        match self {
            Self::Stdout => {
                let stdout = io::stdout().lock();
                let choice = resolve(color, || AutoStream::choice(&stdout));
                deliver(stdout, choice, render).map_err(|source| stream_error("standard output", source))
            }
            Self::Stderr => {
                let stderr = io::stderr().lock();
                let choice = resolve(color, || AutoStream::choice(&stderr));
                deliver(stderr, choice, render).map_err(|source| stream_error("standard error", source))
            }
            Self::File(path) => write_file(path, color, render)
                .map_err(|source| OutputError::File { path: path.clone(), source }),
        }
    }
}

fn stream_error(stream: &'static str, source: io::Error) -> OutputError {
    OutputError::Stream { stream, source }
}

/// What the user chose, or what suits the stream.
fn resolve(color: ColorChoice, automatic: impl FnOnce() -> ColorChoice) -> ColorChoice {
    if color == ColorChoice::Auto { automatic() } else { color }
}

/// Renders the whole report first, so that an error in rendering leaves nothing half-written.
fn rendered(
    choice: ColorChoice,
    render: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> io::Result<Vec<u8>> {
    let mut stream = AutoStream::new(Vec::new(), choice);
    render(&mut stream)?;
    Ok(stream.into_inner())
}

/// Writes to something that is written as it is; a reader that has gone away is a success.
fn deliver(
    mut out: impl Write,
    choice: ColorChoice,
    render: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> io::Result<()> {
    let report = rendered(choice, render)?;
    match out.write_all(&report).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        result => result,
    }
}

fn write_file(
    path: &Path,
    color: ColorChoice,
    render: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> io::Result<()> {
    match place(path)? {
        Place::Through(path) => {
            let file = open_through(&path)?;
            let choice = resolve(color, || file_choice(&file));
            deliver(file, choice, render)
        }
        Place::Replace(path, existing) => {
            let report = rendered(resolve(color, || ColorChoice::Never), render)?;
            replace(&path, existing.as_ref(), &report)
        }
    }
}

/// Styles suit a file only when it is a terminal.
fn file_choice(file: &File) -> ColorChoice {
    if file.is_terminal() { AutoStream::choice(file) } else { ColorChoice::Never }
}

/// Opens for appending: behind `/dev/stdout` may stand a file that the shell has already written to.
fn open_through(path: &Path) -> io::Result<File> {
    OpenOptions::new().append(true).open(path)
}

/// Puts a file with `report` at `path` in one step; before, there is the old one or none.
fn replace(path: &Path, existing: Option<&Metadata>, report: &[u8]) -> io::Result<()> {
    let mut file = temporary_beside(path)?;
    file.write_all(report)?;
    if let Some(existing) = existing {
        // The tool mostly runs as root, and a user's file stays the user's. Without the right to give files away
        // the new file is the caller's own, which is what any other program would make.
        let _ = fchown(file.as_file(), Some(existing.uid()), Some(existing.gid()));
        file.as_file().set_permissions(existing.permissions())?;
    }
    file.as_file().sync_all()?;
    file.persist(path)?;
    Ok(())
}

fn temporary_beside(path: &Path) -> io::Result<NamedTempFile> {
    tempfile::Builder::new()
        .prefix(".pgiotrace-")
        .permissions(Permissions::from_mode(NEW_FILE_MODE))
        .tempfile_in(folder_of(path))
}

fn check_file(path: &Path) -> io::Result<()> {
    match place(path)? {
        Place::Replace(path, _) => temporary_beside(&path)?.close(),
        // Opening would wait for the reader of a FIFO.
        Place::Through(path) if path.is_dir() => Err(io::ErrorKind::IsADirectory.into()),
        Place::Through(_) => Ok(()),
    }
}

/// Follows links to where the report really goes.
fn place(path: &Path) -> io::Result<Place> {
    if path.file_name().is_none() {
        return Err(io::ErrorKind::IsADirectory.into());
    }
    let mut path = path.to_owned();
    for _ in 0..MAX_LINKS {
        let folder = fs::canonicalize(folder_of(&path))?;
        let metadata = match fs::symlink_metadata(&path) {
            Ok(metadata) => metadata,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Place::Replace(path, None)),
            Err(error) => return Err(error),
        };
        if metadata.is_file() {
            return Ok(Place::Replace(path, Some(metadata)));
        }
        // The links in /proc/PID/fd stand for open descriptors, which a rename would cut off.
        if !metadata.is_symlink() || folder.starts_with("/proc") {
            return Ok(Place::Through(path));
        }
        path = folder.join(fs::read_link(&path)?);
    }
    Err(io::Error::other("too many symbolic links"))
}

/// The folder that holds `path`; the current one for a bare name.
fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn hello(out: &mut dyn Write) -> io::Result<()> {
        out.write_all(b"\x1b[1mhello\x1b[0m\n")
    }

    fn write_to(path: &Path, color: ColorChoice) -> Result<(), OutputError> {
        Destination::File(path.to_owned()).write(color, hello)
    }

    fn names_in(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).expect("the folder is there");
        entries.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned()).collect()
    }

    #[test]
    fn a_file_is_replaced_whole_and_keeps_its_mode() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("report");
        fs::write(&path, "a much longer report of yesterday").expect("a file");
        fs::set_permissions(&path, Permissions::from_mode(0o640)).expect("a mode");
        write_to(&path, ColorChoice::Auto).expect("it can be written");
        assert_eq!(fs::read_to_string(&path).expect("a report"), "hello\n");
        assert_eq!(fs::metadata(&path).expect("a file").permissions().mode() & 0o777, 0o640);
        assert_eq!(names_in(folder.path()), ["report"]);
    }

    #[test]
    fn colour_goes_to_a_file_only_when_asked_for() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("report");
        write_to(&path, ColorChoice::Always).expect("it can be written");
        assert_eq!(fs::read_to_string(&path).expect("a report"), "\x1b[1mhello\x1b[0m\n");
        write_to(&path, ColorChoice::Never).expect("it can be written");
        assert_eq!(fs::read_to_string(&path).expect("a report"), "hello\n");
    }

    #[test]
    fn a_failing_report_leaves_the_old_one_and_nothing_else() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("report");
        fs::write(&path, "old").expect("a file");
        let result = Destination::File(path.clone()).write(ColorChoice::Auto, |out| {
            out.write_all(b"half")?;
            Err(io::Error::other("no more"))
        });
        assert!(result.is_err());
        assert_eq!(fs::read_to_string(&path).expect("a report"), "old");
        assert_eq!(names_in(folder.path()), ["report"]);
    }

    #[test]
    fn a_link_stays_a_link() {
        let folder = tempfile::tempdir().expect("a folder");
        let (link, target) = (folder.path().join("link"), folder.path().join("target"));
        symlink("target", &link).expect("a link");
        write_to(&link, ColorChoice::Auto).expect("it can be written");
        assert!(fs::symlink_metadata(&link).expect("the link").is_symlink());
        assert_eq!(fs::read_to_string(&target).expect("a report"), "hello\n");
    }

    #[test]
    fn devices_and_descriptors_are_written_through() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("redirected");
        let mut redirected = File::create(&path).expect("a file");
        redirected.write_all(b"before\n").expect("it can be written");
        let descriptor = format!("/dev/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&redirected));
        write_to(Path::new(&descriptor), ColorChoice::Auto).expect("it can be written");
        assert_eq!(fs::read_to_string(&path).expect("a report"), "before\nhello\n");
        write_to(Path::new("/dev/null"), ColorChoice::Auto).expect("it can be written");
        assert!(!fs::metadata("/dev/null").expect("the device").is_file());
    }

    #[test]
    fn a_reader_that_has_gone_is_no_error() {
        let (reader, writer) = io::pipe().expect("a pipe");
        drop(reader);
        deliver(writer, ColorChoice::Never, hello).expect("a quiet success");
    }

    #[test]
    fn what_cannot_be_written_is_said_before_the_trace() {
        let folder = tempfile::tempdir().expect("a folder");
        let absent = Destination::File(folder.path().join("absent/report"));
        let error = absent.check().expect_err("there is no such folder").to_string();
        assert!(error.contains("absent/report") && error.contains("-o"), "{error}");
        Destination::File(folder.path().to_owned()).check().expect_err("a folder is no file");
        Destination::File("/".into()).check().expect_err("a folder is no file");
        Destination::File(folder.path().join("report")).check().expect("it can be written");
        assert!(names_in(folder.path()).is_empty(), "a check leaves nothing behind");
        let looped = folder.path().join("loop");
        symlink("loop", &looped).expect("a link");
        Destination::File(looped).check().expect_err("a loop leads nowhere");
    }
}
