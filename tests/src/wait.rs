//! Waiting for what happens elsewhere.

use std::{
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, bail};

/// Between two looks.
const LOOK: Duration = Duration::from_millis(10);
/// Generous, as CI's machines are shared.
const PATIENCE: Duration = Duration::from_mins(1);

/// Waits until `condition` holds. `what` names it for the error: "the server accepts connections again".
///
/// # Errors
///
/// When it does not hold after a minute.
pub fn wait_until(what: &str, mut condition: impl FnMut() -> bool) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    while !condition() {
        if Instant::now() > deadline {
            bail!("waited {} s in vain until {what}", PATIENCE.as_secs());
        }
        thread::sleep(LOOK);
    }
    Ok(())
}
