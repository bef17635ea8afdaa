//! Tries the newest of everything that Debian's archive has, and names what broke.

use anyhow::bail;

use crate::fresh::{self, Release};
use crate::kernels;

/// A part that newer versions may break.
struct Part {
    name: &'static str,
    try_it: fn() -> anyhow::Result<()>,
}

const PARTS: [Part; 2] = [
    Part {
        name: "the newest kernel, with this machine's emulator",
        try_it: kernels::newest,
    },
    Part {
        name: "Debian sid: make demo with its emulator, kernel and libraries",
        try_it: demo_on_sid,
    },
];

fn demo_on_sid() -> anyhow::Result<()> {
    fresh::fresh(&fresh::Args {
        release: Release::Sid,
        demo_only: true,
        keep: false,
    })
}

/// Tries all parts, and prints a line for each.
///
/// # Errors
/// Some part broke.
pub fn future() -> anyhow::Result<()> {
    let tried: Vec<_> = PARTS
        .iter()
        .map(|part| (part.name, (part.try_it)()))
        .collect();
    println!();
    for (name, done) in &tried {
        match done {
            Ok(()) => println!("ok     {name}"),
            Err(error) => println!("BROKE  {name}: {error:#}"),
        }
    }
    match tried.iter().filter(|(_, done)| done.is_err()).count() {
        0 => Ok(()),
        broke => bail!("{broke} of {} parts broke", PARTS.len()),
    }
}
