//! `demeter top`: a live view of a host's VMs, or a guest's processes.

mod guest;
mod host;

use std::io::{self, IsTerminal};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use ratatui::Frame;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use ratatui::style::{Color, Style};

use crate::guest::client;
use crate::host::client::SOCKET;

/// Interval between two readings.
const REFRESH: Duration = Duration::from_secs(1);

/// Width of a bar in a table, characters.
const BAR: usize = 12;

/// Shows VMs, tiers, pool and hit share of this host's controller, live; or processes, ranges, heat and moves of this
/// guest's agent.
///
/// Leave with q. VMs with a problem come first; s changes the order, and the arrow and page keys scroll. With --guest,
/// up and down choose the process.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  demeter top                  on a host: its VMs
  demeter top --guest          in a guest: its processes, and how hot which of their memory is")]
pub struct Args {
    /// Show this guest's agent instead of a host's controller
    #[arg(long)]
    guest: bool,
    /// Unix socket of the controller or of the agent [default: /run/demeter/host.sock, with --guest
    /// /run/demeter/guest.sock]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
}

/// A view that is shown until the user leaves.
trait Screen {
    /// Reads the state again.
    fn refresh(&mut self) -> anyhow::Result<()>;
    /// Draws it.
    fn draw(&self, frame: &mut Frame);
    /// Handles a key.
    fn press(&mut self, _key: KeyCode) {}
}

/// Shows the view until the user leaves, or the server ends.
pub fn top(args: Args) -> anyhow::Result<()> {
    if !io::stdout().is_terminal() || !io::stdin().is_terminal() {
        let once = match args.guest {
            true => "demeter guest heat",
            false => "demeter host status",
        };
        bail!("top needs a terminal; {once} prints the like once");
    }
    let socket = |usual: &str| args.socket.clone().unwrap_or_else(|| usual.into());
    match args.guest {
        true => show(guest::Shown::new(socket(client::SOCKET))),
        false => show(host::Shown::new(socket(SOCKET))),
    }
}

fn show(mut screen: impl Screen) -> anyhow::Result<()> {
    // The first reading, before the screen changes, so that a missing server is reported on a line.
    screen.refresh()?;
    let mut terminal = ratatui::try_init().context("cannot use this terminal")?;
    let outcome = (|| loop {
        terminal.draw(|frame| screen.draw(frame))?;
        let next = Instant::now() + REFRESH;
        while let Some(left) = next.checked_duration_since(Instant::now()) {
            if !event::poll(left)? {
                continue;
            }
            let event = event::read()?;
            if leaves(&event) {
                return Ok(());
            }
            if let Event::Key(key) = event
                && key.kind == KeyEventKind::Press
            {
                screen.press(key.code);
                terminal.draw(|frame| screen.draw(frame))?;
            }
        }
        screen.refresh()?;
    })();
    ratatui::restore();
    outcome
}

fn leaves(event: &Event) -> bool {
    let Event::Key(key) = event else {
        return false;
    };
    let control_c = key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL);
    key.kind == KeyEventKind::Press
        && (control_c || matches!(key.code, KeyCode::Char('q') | KeyCode::Esc))
}

fn tier_color(tier: &str) -> Style {
    Style::from(match tier {
        "fast" => Color::LightRed,
        _ => Color::LightBlue,
    })
}

/// A part of a whole, limited to 0 to 1.
fn share(part: u64, whole: u64) -> f64 {
    (part as f64 / whole.max(1) as f64).clamp(0.0, 1.0)
}

fn bar(share: f64) -> String {
    let full = (share * BAR as f64).round() as usize;
    "█".repeat(full) + &"░".repeat(BAR.saturating_sub(full))
}
