//! Everything that a contributor runs.

fn main() {}
