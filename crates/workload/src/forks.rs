//! forks: a server that answers each request in its own child process.
//!
//! A child reads random words of the server's table, which it shares, writes its own memory and exits. Hundreds of
//! processes come and go, each too short-lived to be worth migrating.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use clap::Parser;

use super::args::Common;
use super::event::{Output, Rate, WorkloadEvent};
use super::region::Region;
use super::rng::mix;
use super::timed::Control;
use super::wait::Waiter;
use super::{Error, Size, single_worker};

/// Words between two writes of a child: one per page.
const PAGE_WORDS: usize = 4096 / size_of::<u64>();

/// Exit code of a child that has read correct words.
const RIGHT: libc::c_int = 0;
const WRONG: libc::c_int = 1;

/// A server that answers each request in a child process
#[derive(Debug, Clone, Parser)]
#[command(name = "forks", version)]
pub struct Forks {
    /// Size of the table that all children read
    #[arg(long, default_value = "200MiB")]
    size: Size,
    /// Memory that each child writes for itself
    #[arg(long, default_value = "4MiB")]
    child: Size,
    /// Words of the table that each child reads
    #[arg(long, default_value_t = 10_000)]
    reads: u32,
    #[command(flatten)]
    common: Common,
}

/// Runs forks with these arguments. An operation is a request.
pub fn run(args: &Forks) -> Result<(), Error> {
    let output = Output {
        json: args.common.json,
    };
    if args.size.bytes < size_of::<u64>() as u64 {
        return Err(Error::Arguments("--size must have a word at least".into()));
    }
    let waiter = Waiter::new()?;
    let table = Region::map(args.size.bytes)?;
    let scratch = Region::map(args.child.bytes)?;
    let seed = args.common.seed;
    for (number, chunk) in table.words().chunks(PAGE_WORDS).enumerate() {
        waiter.check()?;
        for (index, word) in (number * PAGE_WORDS..).zip(chunk) {
            word.store(value(seed, index), Relaxed);
        }
    }
    output.say(&WorkloadEvent::all_hot(table.start(), args.size.bytes))?;
    single_worker::run(&args.common, &waiter, Rate::requests, |control| {
        serve(args, table.words(), scratch.words(), control)
    })
}

/// The content of a word of the table.
fn value(seed: u64, index: usize) -> u64 {
    mix(seed ^ index as u64)
}

/// Answers requests until the phase ends, or a child finds an error.
fn serve(
    args: &Forks,
    table: &[AtomicU64],
    scratch: &[AtomicU64],
    control: &Control,
) -> Result<(), Error> {
    let mut request = 0u64;
    while control.stage().is_some() {
        request += 1;
        // SAFETY: the child only reads and writes memory and exits, which is safe after a fork in a multi-threaded
        // process.
        match unsafe { libc::fork() } {
            -1 => return Err(Error::last_os("cannot fork")),
            0 => {
                let found = answer(args, table, scratch, request);
                // SAFETY: exits the child at once, without the parent's destructors.
                unsafe { libc::_exit(found) }
            }
            child => match wait_for(child)? {
                RIGHT => control.done(0, 1),
                status => {
                    return Err(Error::Wrong(format!(
                        "request {request}: its child ended with {status}"
                    )));
                }
            },
        }
    }
    Ok(())
}

/// A child's work. It must not allocate, as another thread of the parent may have held the allocator's lock.
fn answer(args: &Forks, table: &[AtomicU64], scratch: &[AtomicU64], request: u64) -> libc::c_int {
    let seed = args.common.seed;
    for word in scratch.iter().step_by(PAGE_WORDS) {
        word.store(request, Relaxed);
    }
    for read in 0..args.reads {
        let chosen = mix(seed ^ request.rotate_left(32) ^ u64::from(read)) % table.len() as u64;
        let index = chosen as usize;
        if table[index].load(Relaxed) != value(seed, index) {
            return WRONG;
        }
    }
    RIGHT
}

/// A child's result: its exit code, or 128 plus the signal.
fn wait_for(child: libc::pid_t) -> Result<libc::c_int, Error> {
    let mut status = 0;
    loop {
        // SAFETY: waits for our own child and writes to our own word.
        match unsafe { libc::waitpid(child, &raw mut status, 0) } {
            -1 if io::Error::last_os_error().kind() == io::ErrorKind::Interrupted => {}
            -1 => return Err(Error::last_os("cannot wait for a child")),
            _ if libc::WIFEXITED(status) => return Ok(libc::WEXITSTATUS(status)),
            _ => return Ok(128 + libc::WTERMSIG(status)),
        }
    }
}
