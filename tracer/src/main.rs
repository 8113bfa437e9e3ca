//! The binary `pgiotrace`.

fn main() {}
