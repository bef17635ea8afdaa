//! Sets up logging to stderr; stdout is for results only.

use std::io;

use anyhow::Context;
use tracing_subscriber::EnvFilter;

/// Starts logging. `RUST_LOG` sets the level, or else `verbose`: 0 shows warnings, 1 events, 2 details, 3 everything.
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
