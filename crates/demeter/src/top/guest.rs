//! `demeter top --guest`: a guest's processes, their heat, and moves.

use std::path::PathBuf;
use std::time::Instant;

use demeter_guest::heat::{Heat, RangeHeat};
use demeter_guest::status::{Status, TargetStatus};
use demeter_policy::MIB;
use ratatui::Frame;
use ratatui::crossterm::event::KeyCode;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Block, Cell, Gauge, Paragraph, Row, Table};

use super::{BAR, Screen, bar, share, tier_color};
use crate::guest::client::Client;
use crate::guest::heat::Pictures;
use crate::host::status;

/// Maximum height of the heat picture with its frame; the newest lines are shown.
const PICTURE_LINES: u16 = 18;

/// Maximum number of processes shown at a time.
const PROCESSES: usize = 8;

/// The contents of the screen.
#[derive(Debug, Default)]
pub(super) struct Shown {
    client: Client,
    status: Status,
    heat: Heat,
    pictures: Pictures,
    /// Time of the first and the last reading.
    looked: Option<[Instant; 2]>,
    /// Rates of promotion and demotion, MiB per second.
    rates: [f64; 2],
    /// Index of the shown process in the agent's list.
    chosen: usize,
}

impl Shown {
    /// A screen of the agent at this socket.
    pub(super) fn new(socket: PathBuf) -> Self {
        Self {
            client: Client { socket },
            ..Self::default()
        }
    }

    /// Adds a reading of the agent.
    fn look(&mut self, now: Instant, status: Status, heat: Heat) {
        let [first, last] = self.looked.unwrap_or([now, now]);
        let s = now.duration_since(last).as_secs_f64();
        let rate = |new: u64, old: u64| match s > 0.0 {
            true => new.saturating_sub(old) as f64 / MIB as f64 / s,
            false => 0.0,
        };
        self.rates = [
            rate(status.promoted_bytes, self.status.promoted_bytes),
            rate(status.demoted_bytes, self.status.demoted_bytes),
        ];
        self.looked = Some([first, now]);
        self.pictures
            .look(now.duration_since(first).as_secs_f64(), &heat);
        self.chosen = self.chosen.min(status.targets.len().saturating_sub(1));
        self.status = status;
        self.heat = heat;
    }

    fn process(&self) -> Option<&TargetStatus> {
        self.status.targets.get(self.chosen)
    }
}

impl Screen for Shown {
    fn refresh(&mut self) -> anyhow::Result<()> {
        let status: Status = self.client.get("/v1/status")?;
        let heat = self.client.get("/v1/heat")?;
        self.look(Instant::now(), status, heat);
        Ok(())
    }

    fn press(&mut self, key: KeyCode) {
        let last = self.status.targets.len().saturating_sub(1);
        match key {
            KeyCode::Down | KeyCode::Tab => self.chosen = (self.chosen + 1).min(last),
            KeyCode::Up | KeyCode::BackTab => self.chosen = self.chosen.saturating_sub(1),
            _ => {}
        }
    }

    fn draw(&self, frame: &mut Frame) {
        let processes = self.status.targets.len().min(PROCESSES) as u16;
        let [title, fast, moves, table, picture, ranges] = Layout::vertical([
            Constraint::Length(1),
            Constraint::Length(1),
            Constraint::Length(1),
            Constraint::Length(processes + 3),
            Constraint::Max(PICTURE_LINES),
            Constraint::Min(3),
        ])
        .areas(frame.area());
        let text = Line::from(headline(&self.status)).style(Modifier::BOLD);
        frame.render_widget(text, title);
        frame.render_widget(working_set(&self.status), fast);
        frame.render_widget(Line::from(moved(&self.status, self.rates)), moves);
        frame.render_widget(process_table(&self.status.targets, self.chosen), table);
        self.draw_picture(frame, picture);
        self.draw_ranges(frame, ranges);
    }
}

impl Shown {
    fn draw_picture(&self, frame: &mut Frame, area: Rect) {
        let Some(process) = self.process() else {
            return;
        };
        let text = self.pictures.of(process.pid).map(|picture| picture.text());
        let text = text.unwrap_or_else(|| "it accesses no memory\n".into());
        // The first line is the legend, and the last lines are the newest.
        let (legend, lines) = text.split_once('\n').unwrap_or((&text, ""));
        let room = usize::from(area.height.saturating_sub(3));
        let lines: Vec<&str> = lines.lines().collect();
        let newest = lines.len().saturating_sub(room);
        let shown = std::iter::once(legend).chain(lines[newest..].iter().copied());
        let shown: Vec<Line> = shown.map(Line::from).collect();
        let title = format!(" heat of process {} over time ", process.pid);
        let block = Block::bordered().title(title);
        frame.render_widget(Paragraph::new(shown).block(block), area);
    }

    fn draw_ranges(&self, frame: &mut Frame, area: Rect) {
        let Some(process) = self.process() else {
            return;
        };
        let heats = &self.heat.processes;
        let ranges = heats.iter().find(|heat| heat.pid == process.pid);
        let ranges = ranges.map_or(&[][..], |heat| &heat.ranges);
        frame.render_widget(range_table(ranges, usize::from(area.height)), area);
    }
}

fn headline(status: &Status) -> String {
    let state = match (status.paused, status.is_resting) {
        (true, _) => "  PAUSED",
        (false, true) => "  resting: earlier moves saved less than they cost",
        (false, false) => "",
    };
    let hit = status.fast_hit_permille;
    let hit = status::share(hit.map(|permille| f64::from(permille) / 1000.0));
    format!(
        "demeter {}  tracker {}  {} processes  hit {hit}{state}",
        status.version,
        status.tracker,
        status.targets.len(),
    )
}

/// Share of the working set in fast memory.
fn working_set(status: &Status) -> Gauge<'static> {
    let (fast, slow) = (status.working_set_fast_bytes, status.working_set_slow_bytes);
    let label = format!(
        "in use: {} MiB fast, {} MiB slow; fast memory free: {} MiB",
        fast / MIB,
        slow / MIB,
        status.fast_free_bytes / MIB
    );
    Gauge::default()
        .ratio(share(fast, fast.saturating_add(slow)))
        .label(label)
        .gauge_style(tier_color("fast"))
}

fn moved(status: &Status, [up, down]: [f64; 2]) -> String {
    format!(
        "moves: {up:.1} MiB/s up, {down:.1} down; so far {} MiB up, {} down, took {:.1} s, saved {:.1} s",
        status.promoted_bytes / MIB,
        status.demoted_bytes / MIB,
        status.moves_cost_ms as f64 / 1000.0,
        status.moves_benefit_ms as f64 / 1000.0,
    )
}

fn process_table(targets: &[TargetStatus], chosen: usize) -> Table<'_> {
    let header = [
        "pid", "command", "ranges", "heat", "fast MiB", "", "slow MiB",
    ];
    let first = (chosen + 1).saturating_sub(PROCESSES);
    let shown = targets.iter().enumerate().skip(first).take(PROCESSES);
    let rows = shown.map(|(place, target)| {
        let resident = target.fast_bytes.saturating_add(target.slow_bytes);
        let row = Row::new([
            Cell::from(target.pid.to_string()),
            Cell::from(target.comm.as_str()),
            Cell::from(target.ranges.to_string()),
            Cell::from(format!("{:.0}", target.heat)),
            Cell::from((target.fast_bytes / MIB).to_string()),
            Cell::from(bar(share(target.fast_bytes, resident))).style(tier_color("fast")),
            Cell::from((target.slow_bytes / MIB).to_string()),
        ]);
        match place == chosen && targets.len() > 1 {
            true => row.style(Style::from(Modifier::REVERSED)),
            false => row,
        }
    });
    let widths = [
        Constraint::Length(8),
        Constraint::Length(16),
        Constraint::Length(7),
        Constraint::Length(9),
        Constraint::Length(9),
        Constraint::Length(BAR as u16),
        Constraint::Length(9),
    ];
    Table::new(rows, widths)
        .header(Row::new(header).style(Modifier::BOLD))
        .block(Block::bordered().title(" processes "))
}

/// The hottest ranges that fit.
fn range_table(ranges: &[RangeHeat], room: usize) -> Table<'static> {
    let header = [
        "addresses",
        "MiB",
        "samples/MiB",
        "fast MiB",
        "",
        "slow MiB",
    ];
    let rows = ranges.iter().take(room).map(|range| {
        let bytes = range.end.saturating_sub(range.start);
        let placed = range.fast_bytes.saturating_add(range.slow_bytes);
        Row::new([
            Cell::from(format!("{:#x}-{:#x}", range.start, range.end)),
            Cell::from(format!("{:.1}", bytes as f64 / MIB as f64)),
            Cell::from(format!("{:.2}", range.density() * MIB as f64)),
            Cell::from((range.fast_bytes / MIB).to_string()),
            Cell::from(bar(share(range.fast_bytes, placed))).style(tier_color("fast")),
            Cell::from((range.slow_bytes / MIB).to_string()),
        ])
    });
    let widths = [
        Constraint::Length(33),
        Constraint::Length(9),
        Constraint::Length(12),
        Constraint::Length(9),
        Constraint::Length(BAR as u16),
        Constraint::Length(9),
    ];
    Table::new(rows, widths)
        .header(Row::new(header).style(Modifier::BOLD))
        .block(Block::bordered().title(" hottest ranges "))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use demeter_guest::heat::ProcessHeat;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::*;

    fn range(start_mib: u64, end_mib: u64, samples: f64, fast_mib: u64) -> RangeHeat {
        RangeHeat {
            start: start_mib * MIB,
            end: end_mib * MIB,
            samples,
            fast_bytes: fast_mib * MIB,
            slow_bytes: (end_mib - start_mib - fast_mib) * MIB,
        }
    }

    fn shown() -> Shown {
        let target = |pid, comm: &str| TargetStatus {
            pid,
            comm: comm.into(),
            ranges: 2,
            heat: 640.0,
            fast_bytes: 30 * MIB,
            slow_bytes: 10 * MIB,
            ..TargetStatus::default()
        };
        let status = |promoted_mib| Status {
            version: "0.1.0".into(),
            tracker: "damon".into(),
            targets: vec![target(7, "gups"), target(8, "redis")],
            fast_hit_permille: Some(910),
            promoted_bytes: promoted_mib * MIB,
            working_set_fast_bytes: 30 * MIB,
            working_set_slow_bytes: 10 * MIB,
            moves_cost_ms: 1500,
            ..Status::default()
        };
        let heat = |hot| Heat {
            processes: vec![ProcessHeat {
                pid: 7,
                ranges: vec![range(16, 32, hot, 16), range(0, 16, 0.0, 4)],
            }],
            ..Heat::default()
        };
        let mut shown = Shown::default();
        let start = Instant::now();
        shown.look(start, status(100), heat(640.0));
        shown.look(start + Duration::from_secs(4), status(150), heat(64.0));
        shown
    }

    fn screen(width: u16, height: u16, shown: &Shown) -> String {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| shown.draw(frame)).unwrap();
        terminal.backend().to_string()
    }

    #[test]
    fn the_screen_shows_processes_heat_ranges_and_moves() {
        let mut shown = shown();
        let first = screen(140, 30, &shown);
        let hot_below_cold = format!("{}{}|", " ".repeat(36), "@".repeat(36));
        let cooled = format!("{}{}|", " ".repeat(36), "*".repeat(36));
        for want in [
            "demeter 0.1.0  tracker damon  2 processes  hit 91 %",
            "in use: 30 MiB fast, 10 MiB slow",
            "moves: 12.5 MiB/s up, 0.0 down; so far 150 MiB up, 0 down, took 1.5 s",
            "gups",
            "█████████░░░",
            "heat of process 7 over time",
            "32 MiB in 1 pieces",
            &hot_below_cold,
            &cooled,
            "0x1000000-0x2000000",
            "4.00",
        ] {
            assert!(first.contains(want), "{want} is not on\n{first}");
        }
        shown.press(KeyCode::Down);
        shown.press(KeyCode::Down);
        let second = screen(140, 30, &shown);
        assert!(second.contains("heat of process 8") && second.contains("accesses no memory"));
        shown.press(KeyCode::Up);
        assert_eq!(screen(140, 30, &shown), first);
    }

    #[test]
    fn a_pause_and_a_rest_are_told() {
        let mut shown = shown();
        shown.status.is_resting = true;
        assert!(screen(120, 20, &shown).contains("resting"));
        shown.status.paused = true;
        assert!(screen(120, 20, &shown).contains("PAUSED"));
    }

    #[test]
    fn any_size_of_terminal_and_any_number_is_survived() {
        let mut odd = shown();
        odd.status.targets = vec![TargetStatus::default(); 100];
        odd.heat.processes[0].ranges = vec![
            RangeHeat {
                start: u64::MAX,
                end: 0,
                samples: f64::NAN,
                fast_bytes: u64::MAX,
                slow_bytes: u64::MAX,
            };
            9
        ];
        (0..100).for_each(|_| odd.press(KeyCode::Down));
        for (width, height) in [(1, 1), (10, 3), (40, 8), (500, 200)] {
            screen(width, height, &shown());
            screen(width, height, &odd);
            screen(width, height, &Shown::default());
        }
    }
}
