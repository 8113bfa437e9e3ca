//! The harness of the integration suite.
