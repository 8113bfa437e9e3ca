//! Capture.
pub mod kernel;
