//! A host's VMs and tiers.

use std::path::PathBuf;

use demeter_host::view::{EventView, HostView, VmState, VmView};
use demeter_policy::MIB;
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier};
use ratatui::text::Line;
use ratatui::widgets::{Block, Cell, Gauge, Paragraph, Row, Table};

use super::{BAR, Screen, bar, share, tier_color};
use crate::host::client::Client;
use crate::host::status;

/// Events that are kept for the picture.
const EVENTS_MAX: usize = 100;

/// What is on the screen.
#[derive(Debug, Default)]
pub(super) struct Shown {
    client: Client,
    view: HostView,
    /// The newest last.
    events: Vec<EventView>,
}

impl Shown {
    /// Of the controller that listens there.
    pub(super) fn new(socket: PathBuf) -> Self {
        Self {
            client: Client { socket },
            ..Self::default()
        }
    }
}

impl Screen for Shown {
    fn refresh(&mut self) -> anyhow::Result<()> {
        self.view = self.client.get("/v1/vms")?;
        let last = self.events.last().map_or(0, |event| event.number);
        let newer: Vec<EventView> = self.client.get(&format!("/v1/events?after={last}"))?;
        self.events.extend(newer);
        let surplus = self.events.len().saturating_sub(EVENTS_MAX);
        self.events.drain(..surplus);
        Ok(())
    }

    fn draw(&self, frame: &mut Frame) {
        draw(frame, self);
    }
}

fn draw(frame: &mut Frame, shown: &Shown) {
    let view = &shown.view;
    let vms = u16::try_from(view.vms.len()).unwrap_or(u16::MAX);
    let [title, fast, slow, table, events] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(1),
        Constraint::Length(1),
        Constraint::Length(vms.saturating_add(3)),
        Constraint::Min(3),
    ])
    .areas(frame.area());
    let violations = match view.violations {
        0 => String::new(),
        count => format!("  POOL OVERBOOKED {count} TIMES"),
    };
    let text = format!(
        "demeter {}  policy {}  {} VMs{violations}",
        view.version,
        view.policy,
        view.vms.len()
    );
    frame.render_widget(Line::from(text).style(Modifier::BOLD), title);
    let (pool, committed) = (view.pool, view.committed);
    pool_gauge(frame, fast, "fast", committed.fast_bytes, pool.fast_bytes);
    pool_gauge(frame, slow, "slow", committed.slow_bytes, pool.slow_bytes);
    frame.render_widget(vm_table(&view.vms), table);
    let room = usize::from(events.height.saturating_sub(2));
    let newest = shown.events.len().saturating_sub(room);
    let lines: Vec<_> = shown.events[newest..]
        .iter()
        .map(|event| Line::from(status::event_line(event)))
        .collect();
    let block = Block::bordered().title(" events (UTC) ");
    frame.render_widget(Paragraph::new(lines).block(block), events);
}

fn pool_gauge(frame: &mut Frame, area: Rect, tier: &str, committed: u64, pool: u64) {
    let label = format!("{tier} {} of {} MiB committed", committed / MIB, pool / MIB);
    let gauge = Gauge::default()
        .ratio(share(committed, pool))
        .label(label)
        .gauge_style(tier_color(tier));
    frame.render_widget(gauge, area);
}

fn vm_table(vms: &[VmView]) -> Table<'_> {
    let header = [
        "VM", "state", "fast MiB", "", "slow MiB", "", "hit", "moves s", "saved s", "wait",
        "problem",
    ];
    let rows = vms.iter().map(|vm| {
        let [fast, slow] = status::owned(vm.owned);
        let owned = vm.owned.unwrap_or_default();
        let [cost, benefit] = status::relocation(vm.relocation);
        let fast = format!("{fast}/{}", vm.target.fast_bytes / MIB);
        let slow = format!("{slow}/{}", vm.target.slow_bytes / MIB);
        let bar =
            |tier, owned, target| Cell::from(bar(share(owned, target))).style(tier_color(tier));
        let state = match vm.state {
            VmState::Up => Color::Green,
            VmState::Down => Color::DarkGray,
            VmState::Marked => Color::Red,
        };
        Row::new([
            Cell::from(vm.name.as_str()),
            Cell::from(vm.state.to_string()).style(state),
            Cell::from(fast),
            bar("fast", owned.fast_bytes, vm.target.fast_bytes),
            Cell::from(slow),
            bar("slow", owned.slow_bytes, vm.target.slow_bytes),
            Cell::from(status::share(vm.fast_hit)),
            Cell::from(cost),
            Cell::from(benefit),
            Cell::from(status::share(vm.pressure)),
            Cell::from(vm.problem.as_deref().unwrap_or("")),
        ])
    });
    let widths = [
        Constraint::Max(20),
        Constraint::Length(6),
        Constraint::Length(13),
        Constraint::Length(BAR as u16),
        Constraint::Length(13),
        Constraint::Length(BAR as u16),
        Constraint::Length(5),
        Constraint::Length(8),
        Constraint::Length(13),
        Constraint::Length(5),
        Constraint::Fill(1),
    ];
    Table::new(rows, widths)
        .header(Row::new(header).style(Modifier::BOLD))
        .block(Block::bordered().title(" owned of target "))
}

#[cfg(test)]
mod tests {
    use demeter_host::view::TierView;
    use demeter_policy::provision::Policy;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::*;

    fn mib(fast: u64, slow: u64) -> TierView {
        TierView {
            fast_bytes: fast * MIB,
            slow_bytes: slow * MIB,
        }
    }

    fn shown() -> Shown {
        let event = |number| EventView {
            number,
            time_ms: number * 1000,
            vm: Some("db".into()),
            text: format!("event {number}"),
        };
        let view = HostView {
            version: "0.1.0".into(),
            policy: Policy::Wss,
            pool: mib(1000, 4000),
            committed: mib(300, 4000),
            violations: 0,
            vms: vec![
                VmView {
                    name: "db".into(),
                    state: VmState::Up,
                    target: mib(200, 800),
                    owned: Some(mib(100, 800)),
                    fast_hit: Some(0.98),
                    relocation: Some(demeter_host::view::RelocationView {
                        cost_ms: 1234,
                        benefit_ms: 45_600,
                        is_resting: false,
                    }),
                    ..VmView::default()
                },
                VmView {
                    name: "web".into(),
                    state: VmState::Marked,
                    target: mib(100, 0),
                    problem: Some("claims foreign memory".into()),
                    ..VmView::default()
                },
            ],
        };
        Shown {
            view,
            events: (1..=20).map(event).collect(),
            ..Shown::default()
        }
    }

    fn screen(width: u16, height: u16, shown: &Shown) -> String {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| draw(frame, shown)).unwrap();
        terminal.backend().to_string()
    }

    #[test]
    fn the_screen_shows_pool_vms_and_the_newest_events() {
        let screen = screen(140, 14, &shown());
        for want in [
            "demeter 0.1.0  policy wss  2 VMs",
            "fast 300 of 1000 MiB committed",
            "slow 4000 of 4000 MiB committed",
            "100/200",
            "██████░░░░░░",
            "800/800",
            "████████████",
            "98 %",
            "45.6",
            "marked",
            "-/100",
            "claims foreign memory",
            "00:00:20  db  event 20",
        ] {
            assert!(screen.contains(want), "{want} is not on\n{screen}");
        }
        assert!(
            !screen.contains("event 10"),
            "older events make room\n{screen}"
        );
        assert!(!screen.contains("OVERBOOKED"));
    }

    #[test]
    fn an_overbooked_pool_is_loud() {
        let mut shown = shown();
        shown.view.violations = 3;
        assert!(screen(120, 20, &shown).contains("POOL OVERBOOKED 3 TIMES"));
    }

    #[test]
    fn any_size_of_terminal_is_survived() {
        for (width, height) in [(1, 1), (10, 3), (40, 8), (500, 200)] {
            screen(width, height, &shown());
            screen(width, height, &Shown::default());
        }
    }
}
