//! `demeter top`: a host's VMs and tiers.

use std::path::PathBuf;

use demeter_host::view::{EventView, HostView, TierView, VmState, VmView};
use demeter_policy::MIB;
use ratatui::Frame;
use ratatui::crossterm::event::KeyCode;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier};
use ratatui::text::Line;
use ratatui::widgets::{Block, Cell, Gauge, Paragraph, Row, Table};

use super::{BAR, Screen, bar, share, tier_color};
use crate::host::client::Client;
use crate::host::status;

/// Maximum number of kept events.
const EVENTS_MAX: usize = 100;

/// The order of VMs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Order {
    /// VMs with a problem first, then by name.
    #[default]
    Problem,
    Name,
    /// The largest owner of fast memory first.
    Fast,
    Slow,
    /// The lowest share of accesses from fast memory first.
    Hit,
}

impl Order {
    fn name(self) -> &'static str {
        match self {
            Self::Problem => "problem",
            Self::Name => "name",
            Self::Fast => "fast memory",
            Self::Slow => "slow memory",
            Self::Hit => "hit share",
        }
    }

    fn next(self) -> Self {
        match self {
            Self::Problem => Self::Name,
            Self::Name => Self::Fast,
            Self::Fast => Self::Slow,
            Self::Slow => Self::Hit,
            Self::Hit => Self::Problem,
        }
    }

    /// The VMs in this order; equal ones by name.
    fn sorted(self, vms: &[VmView]) -> Vec<&VmView> {
        let mut sorted: Vec<_> = vms.iter().collect();
        sorted.sort_by(|a, b| a.name.cmp(&b.name));
        let owned = |vm: &VmView| vm.owned.unwrap_or_default();
        match self {
            Self::Problem => sorted.sort_by_key(|vm| match (vm.state, &vm.problem) {
                (VmState::Marked, _) => 0,
                (VmState::Up, Some(_)) => 1,
                (VmState::Down, _) => 2,
                (VmState::Up, None) => 3,
            }),
            Self::Name => {}
            Self::Fast => sorted.sort_by_key(|vm| std::cmp::Reverse(owned(vm).fast_bytes)),
            Self::Slow => sorted.sort_by_key(|vm| std::cmp::Reverse(owned(vm).slow_bytes)),
            // VMs without a hit share come last.
            Self::Hit => {
                sorted.sort_by_key(|vm| vm.fast_hit.map_or(1001, |hit| (hit * 1000.0) as u32))
            }
        }
        sorted
    }
}

/// The contents of the screen.
#[derive(Debug, Default)]
pub(super) struct Shown {
    client: Client,
    view: HostView,
    /// The newest is last.
    events: Vec<EventView>,
    order: Order,
    /// Index of the table's first VM.
    first: usize,
    /// Number of VMs that fitted when the table was last drawn.
    room: std::cell::Cell<usize>,
}

impl Shown {
    /// A screen of the controller at this socket.
    pub(super) fn new(socket: PathBuf) -> Self {
        Self {
            client: Client { socket },
            ..Self::default()
        }
    }

    /// Index of the last VM at which the table may start.
    fn first_max(&self) -> usize {
        self.view.vms.len().saturating_sub(self.room.get().max(1))
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

    fn press(&mut self, key: KeyCode) {
        let page = self.room.get().max(1);
        let first = self.first.min(self.first_max());
        self.first = match key {
            KeyCode::Up => first.saturating_sub(1),
            KeyCode::Down => first + 1,
            KeyCode::PageUp => first.saturating_sub(page),
            KeyCode::PageDown => first + page,
            KeyCode::Home => 0,
            KeyCode::End => usize::MAX,
            KeyCode::Char('s') => {
                self.order = self.order.next();
                0
            }
            _ => first,
        }
        .min(self.first_max());
    }
}

fn draw(frame: &mut Frame, shown: &Shown) {
    let view = &shown.view;
    let height = frame.area().height;
    let [title, fast, slow, table, events] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(1),
        Constraint::Length(1),
        Constraint::Min(4),
        Constraint::Length((height / 4).clamp(3, 10)),
    ])
    .areas(frame.area());
    let violations = match view.violations {
        0 => String::new(),
        count => format!("  POOL OVERBOOKED {count} TIMES"),
    };
    let evacuates = if view.evacuates { "  EVACUATING" } else { "" };
    let in_trouble = view.vms.iter().filter(|vm| vm.problem.is_some()).count();
    let text = format!(
        "demeter {}  policy {}{evacuates}  {} VMs, {in_trouble} with a problem, {} left alone{violations}",
        view.version,
        view.policy,
        view.vms.len(),
        view.left_alone.len()
    );
    frame.render_widget(Line::from(text).style(Modifier::BOLD), title);
    let (pool, committed, excess) = (view.pool, view.committed, view.excess());
    let of_tier = |tier, of: fn(TierView) -> u64| PoolLine {
        tier,
        committed: of(committed),
        pool: of(pool),
        excess: of(excess),
    };
    pool_gauge(frame, fast, of_tier("fast", |of| of.fast_bytes));
    pool_gauge(frame, slow, of_tier("slow", |of| of.slow_bytes));
    // The height without frame and heading.
    shown.room.set(usize::from(table.height.saturating_sub(3)));
    frame.render_widget(vm_table(shown, table.width), table);
    let room = usize::from(events.height.saturating_sub(2));
    let newest = shown.events.len().saturating_sub(room);
    let lines: Vec<_> = shown.events[newest..]
        .iter()
        .map(|event| Line::from(status::event_line(event)))
        .collect();
    let block = Block::bordered().title(" events (UTC) ");
    frame.render_widget(Paragraph::new(lines).block(block), events);
}

/// A pool and its committed memory.
struct PoolLine {
    tier: &'static str,
    committed: u64,
    pool: u64,
    /// Memory held beyond the pool.
    excess: u64,
}

fn pool_gauge(frame: &mut Frame, area: Rect, of: PoolLine) {
    let excess = match of.excess / MIB {
        0 => String::new(),
        mib => format!(", {mib} MIB MORE MAY BE HELD"),
    };
    let label = format!(
        "{} {} of {} MiB committed{excess}",
        of.tier,
        of.committed / MIB,
        of.pool / MIB
    );
    let gauge = Gauge::default()
        .ratio(share(of.committed, of.pool))
        .label(label)
        .gauge_style(tier_color(of.tier));
    frame.render_widget(gauge, area);
}

/// Maximum width of a name.
const NAME_WIDTH_MAX: u16 = 24;

/// Width from which bars and the cost of moves are shown.
const WIDE: u16 = 120;

fn vm_table(shown: &Shown, width: u16) -> Table<'_> {
    let vms = shown.order.sorted(&shown.view.vms);
    let first = shown.first.min(shown.first_max());
    let last = (first + shown.room.get()).min(vms.len());
    let is_wide = width >= WIDE;
    let mut header = vec!["VM", "state", "fast MiB", "slow MiB", "hit"];
    let longest = vms
        .iter()
        .map(|vm| status::label(vm).len())
        .max()
        .unwrap_or(0);
    let name_width = u16::try_from(longest).unwrap_or(NAME_WIDTH_MAX);
    let mut widths = vec![
        Constraint::Length(name_width.clamp(2, NAME_WIDTH_MAX)),
        Constraint::Length(6),
        Constraint::Length(13),
        Constraint::Length(13),
        Constraint::Length(5),
    ];
    if is_wide {
        header.splice(3..3, [""]);
        header.splice(5..5, [""]);
        header.extend(["moves s", "saved s", "wait"]);
        widths.insert(3, Constraint::Length(BAR as u16));
        widths.insert(5, Constraint::Length(BAR as u16));
        widths.extend([8, 13, 5].map(Constraint::Length));
    }
    header.push("problem");
    widths.push(Constraint::Fill(1));
    let rows = vms[first..last].iter().map(|vm| row(vm, is_wide));
    let title = format!(
        " owned/target, {}-{last} of {} by {} (s sorts, arrows scroll) ",
        (first + 1).min(last),
        vms.len(),
        shown.order.name()
    );
    Table::new(rows.collect::<Vec<_>>(), widths)
        .header(Row::new(header).style(Modifier::BOLD))
        .block(Block::bordered().title(title))
}

fn row(vm: &VmView, is_wide: bool) -> Row<'_> {
    let [fast, slow] = status::owned(vm.owned);
    let owned = vm.owned.unwrap_or_default();
    let fast = format!("{fast}/{}", vm.target.fast_bytes / MIB);
    let slow = format!("{slow}/{}", vm.target.slow_bytes / MIB);
    let bar = |tier, owned, target| Cell::from(bar(share(owned, target))).style(tier_color(tier));
    let state = match vm.state {
        VmState::Up => Color::Green,
        VmState::Down => Color::DarkGray,
        VmState::Marked => Color::Red,
    };
    let mut cells = vec![
        Cell::from(status::label(vm)),
        Cell::from(vm.state.to_string()).style(state),
        Cell::from(fast),
        Cell::from(slow),
        Cell::from(status::share(vm.fast_hit)),
    ];
    if is_wide {
        let [cost, benefit] = status::relocation(vm.relocation);
        cells.insert(3, bar("fast", owned.fast_bytes, vm.target.fast_bytes));
        cells.insert(5, bar("slow", owned.slow_bytes, vm.target.slow_bytes));
        cells.extend([cost, benefit, status::share(vm.pressure)].map(Cell::from));
    }
    cells.push(Cell::from(vm.problem.as_deref().unwrap_or("")));
    Row::new(cells)
}

#[cfg(test)]
mod tests {
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
            by: None,
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
            ..HostView::default()
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
            "demeter 0.1.0  policy wss  2 VMs, 1 with a problem",
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

    /// 300 VMs, three of them with a problem.
    fn many() -> Shown {
        let vm = |number: usize| VmView {
            name: format!("tenant-{number:03}"),
            state: VmState::Up,
            target: mib(200, 800),
            owned: Some(mib(number as u64, 800)),
            problem: (number % 100 == 50).then(|| "refused: no driver".into()),
            ..VmView::default()
        };
        let mut shown = shown();
        shown.view.vms = (0..300).map(vm).collect();
        shown
    }

    #[test]
    fn eighty_columns_show_names_and_problems_first_and_scroll_to_every_vm() {
        let mut shown = many();
        let first = screen(80, 24, &shown);
        for want in [
            "tenant-050",
            "tenant-150",
            "tenant-250",
            "tenant-000",
            "refused: no",
            "of 300",
        ] {
            assert!(first.contains(want), "{want} is not on\n{first}");
        }
        let place = |name: &str| first.find(name).unwrap();
        assert!(place("tenant-250") < place("tenant-000"), "{first}");
        let mut seen = std::collections::BTreeSet::new();
        for _ in 0..300 {
            let text = screen(80, 24, &shown);
            seen.extend((0..300).filter(|n| text.contains(&format!("tenant-{n:03}"))));
            shown.press(KeyCode::PageDown);
        }
        assert_eq!(seen.len(), 300);
        shown.press(KeyCode::Up);
        assert!(
            !screen(80, 24, &shown).contains("tenant-299"),
            "one line up is seen at once"
        );
        shown.press(KeyCode::Home);
        assert_eq!(screen(80, 24, &shown), first);
        shown.press(KeyCode::Char('s'));
        shown.press(KeyCode::Char('s'));
        let by_fast = screen(80, 24, &shown);
        assert!(
            by_fast.contains("by fast memory") && by_fast.contains("299/200"),
            "{by_fast}"
        );
    }

    #[test]
    fn what_is_held_beyond_the_pool_is_loud() {
        let mut shown = shown();
        shown.view.may_hold = mib(1330, 4000);
        assert!(screen(80, 24, &shown).contains("330 MIB MORE MAY BE HELD"));
    }
}
