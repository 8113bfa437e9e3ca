//! Unpacking so that an interrupted run is never mistaken for a finished one.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};
use pgiotrace_tests::STAMP;

use crate::project::make_dir;

/// Fills a new folder beside `target` with `fill`, stamps it with `origin` (what it is and where from), and puts it in
/// `target`'s place.
pub(crate) fn atomically(target: &Path, origin: &str, fill: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let parent = target.parent().context("a folder in the cache has no parent")?;
    make_dir(parent)?;
    let fresh = beside(target, "new");
    remove(&fresh)?;
    make_dir(&fresh)?;
    fill(&fresh)?;
    let what = || format!("cannot put {} in its place", target.display());
    fs::write(fresh.join(STAMP), format!("{origin}\n")).with_context(what)?;
    remove(target)?;
    fs::rename(&fresh, target).with_context(what)
}

/// Whether the folder was finished.
pub(crate) fn is_complete(folder: &Path) -> bool {
    folder.join(STAMP).exists()
}

fn beside(target: &Path, suffix: &str) -> PathBuf {
    let mut name = target.as_os_str().to_owned();
    name.push(".");
    name.push(suffix);
    name.into()
}

fn remove(folder: &Path) -> Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove the unfinished folder {}", folder.display()))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use anyhow::bail;

    use super::*;

    #[test]
    fn a_failure_half_way_leaves_no_finished_folder() -> Result<()> {
        let dir = tempfile::tempdir()?;
        let target = dir.path().join("tree");
        let failed = atomically(&target, "test", |fresh| {
            fs::write(fresh.join("half"), "")?;
            bail!("interrupted")
        });
        assert!(failed.is_err() && !is_complete(&target));

        atomically(&target, "test", |fresh| Ok(fs::write(fresh.join("whole"), "")?))?;
        assert!(is_complete(&target) && target.join("whole").exists() && !target.join("half").exists());
        Ok(())
    }
}
