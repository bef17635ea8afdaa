//! The `demeter` command.
fn main() {}
