//! Logs go to stderr, so that stdout carries results only.

use std::io;

use anyhow::Context;
use tracing_subscriber::EnvFilter;

/// Starts logging. `RUST_LOG` decides what is shown; without it, `verbose` does: 0 shows
/// warnings, 1 what happens, 2 details, 3 everything.
pub fn start(verbose: u8) -> anyhow::Result<()> {
    let filter = match std::env::var("RUST_LOG") {
        Ok(filter) if !filter.is_empty() => EnvFilter::try_new(&filter)
            .with_context(|| format!("RUST_LOG={filter}; write for example RUST_LOG=debug"))?,
        _ => EnvFilter::new(match verbose {
            0 => "warn",
            1 => "info",
            2 => "debug",
            _ => "trace",
        }),
    };
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr)
        .with_ansi(io::IsTerminal::is_terminal(&io::stderr()))
        // A closed stderr must not end the agent.
        .log_internal_errors(false)
        .init();
    Ok(())
}
