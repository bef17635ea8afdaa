//! Formats the host's status for people.

use demeter_host::view::{
    EventView, HostView, PlaceView, PlacesView, PoolView, RelocationView, SettingView, TierView,
    VmState, VmView,
};
use demeter_policy::MIB;
use demeter_proto::shown;

/// The pool and a line per VM, as `demeter host status` prints them.
pub fn text(view: &HostView) -> String {
    let mut text = format!(
        "policy {}, committed {} of {} MiB fast, {} of {} MiB slow\n",
        view.policy,
        view.committed.fast_bytes / MIB,
        view.pool.fast_bytes / MIB,
        view.committed.slow_bytes / MIB,
        view.pool.slow_bytes / MIB,
    );
    let excess = view.excess();
    if excess.sum() > 0 {
        text += &format!(
            "VMs may be holding {} MiB fast and {} MiB slow beyond the pool: none is given more until they \
             have given it back\n",
            excess.fast_bytes.div_ceil(MIB),
            excess.slow_bytes.div_ceil(MIB)
        );
    }
    if let Some(why) = &view.unsaved {
        text += &format!("not saved, so no VM gets a command: {}\n", shown(why));
    }
    if view.evacuates {
        text += "evacuating: each VM gets all its memory back, until a policy is chosen\n";
    }
    if view.pools.len() > 1 {
        view.pools.iter().for_each(|pool| text += &pool_line(pool));
    }
    for (pool, why) in view
        .pools
        .iter()
        .filter_map(|pool| Some((pool, pool.problem.as_ref()?)))
    {
        let of = match pool.name.is_empty() {
            true => String::new(),
            false => format!("pool {}: ", shown(&pool.name)),
        };
        text += &format!("{of}{}\n", shown(why));
    }
    text += &table(&view.vms);
    for setting in &view.settings {
        text += &setting_line(setting);
    }
    for domain in &view.left_alone {
        text += &format!(
            "left alone: {} ({} MiB): {}\n",
            shown(&domain.name),
            domain.memory_bytes / MIB,
            shown(&domain.why)
        );
    }
    for vm in &view.vms {
        if let Some(problem) = &vm.problem {
            text += &format!("{}: {}\n", vm.name, shown(problem));
        }
        let unmet = vm.service.as_ref().and_then(|of| of.unmet.as_ref());
        if let Some(why) = unmet {
            text += &format!("{}: {}\n", vm.name, shown(why));
        }
    }
    text
}

/// A header, and a line per VM.
fn table(vms: &[VmView]) -> String {
    let mut rows = vec![
        [
            "VM",
            "state",
            "fast MiB",
            "target",
            "slow MiB",
            "target",
            "hit",
            "moves s",
            "saved s",
            "provisioner",
            "nodes",
        ]
        .map(String::from),
    ];
    rows.extend(vms.iter().map(|vm| {
        let [fast, slow] = owned(vm.owned);
        let [cost, benefit] = relocation(vm.relocation);
        [
            label(vm),
            vm.state.to_string(),
            fast,
            (vm.target.fast_bytes / MIB).to_string(),
            slow,
            (vm.target.slow_bytes / MIB).to_string(),
            share(vm.fast_hit),
            cost,
            benefit,
            match vm.managed_by.as_deref() {
                Some("history") => "host (history)".into(),
                _ => vm.provisioner.to_string(),
            },
            nodes(vm.places.as_ref()),
        ]
    }));
    let widths: Vec<_> = (0..rows[0].len())
        .map(|column| rows.iter().map(|row| row[column].len()).max().unwrap_or(0))
        .collect();
    let mut text = String::new();
    for row in &rows {
        let cells = row.iter().zip(&widths).enumerate();
        let line: Vec<_> = cells
            .map(|(column, (cell, &width))| match column {
                // Numbers are right-aligned.
                2..=8 => format!("{cell:>width$}"),
                _ => format!("{cell:width$}"),
            })
            .collect();
        text += line.join("  ").trim_end();
        text.push('\n');
    }
    text
}

/// A line about a value that a person set over the file's.
fn setting_line(setting: &SettingView) -> String {
    let SettingView { key, value, .. } = setting;
    match (&setting.problem, &setting.file) {
        (Some(why), _) => format!(
            "set by command, not in use: {key} ({value}): {}\n",
            shown(why)
        ),
        (None, Some(file)) => format!("set by command: {key} = {value} (in the file: {file})\n"),
        (None, None) => format!("set by command: {key} = {value} (not in the file)\n"),
    }
}

/// A pool's line.
fn pool_line(pool: &PoolView) -> String {
    let tier = |of: fn(TierView) -> u64, nodes: &[u32]| {
        let nodes: Vec<_> = nodes.iter().map(ToString::to_string).collect();
        let (committed, size) = (of(pool.committed) / MIB, of(pool.size) / MIB);
        format!("{committed} of {size} MiB on node {}", nodes.join(","))
    };
    format!(
        "pool {}: fast {}, slow {}\n",
        pool.name,
        tier(|of| of.fast_bytes, &pool.fast_nodes),
        tier(|of| of.slow_bytes, &pool.slow_nodes)
    )
}

/// A VM's name, with its pool if the host has several.
pub fn label(vm: &VmView) -> String {
    match vm.pool.as_str() {
        "" => vm.name.clone(),
        pool => format!("{pool}/{}", vm.name),
    }
}

/// Lines about VMs that do not have all their memory yet.
pub fn not_evacuated(view: &HostView) -> Vec<String> {
    let managed = view
        .vms
        .iter()
        .filter(|vm| vm.state == VmState::Up && vm.managed_by.as_deref() != Some("history"));
    managed
        .filter(|vm| vm.owned != Some(vm.limit))
        .map(|vm| {
            let missing = match vm.owned {
                Some(owned) => {
                    let mib = vm.limit.sum().saturating_sub(owned.sum()).div_ceil(MIB);
                    format!("{mib} MiB are missing")
                }
                None => "it does not say what it has".into(),
            };
            match &vm.problem {
                Some(problem) => format!("VM {}: {missing} ({})", vm.name, shown(problem)),
                None => format!("VM {}: {missing}", vm.name),
            }
        })
        .collect()
}

/// Seconds that moves took and saved, with a word if the agent has suspended them; `-` without an agent.
pub fn relocation(of: Option<RelocationView>) -> [String; 2] {
    let Some(of) = of else {
        return ["-".into(), "-".into()];
    };
    let seconds = |ms: f64| format!("{:.1}", ms / 1000.0);
    let rests = if of.is_resting { " rests" } else { "" };
    [
        seconds(of.cost_ms as f64),
        seconds(of.benefit_ms as f64) + rests,
    ]
}

/// MiB owned of each tier, fast first; `-` if unknown.
pub fn owned(tiers: Option<TierView>) -> [String; 2] {
    match tiers {
        Some(tiers) => [tiers.fast_bytes, tiers.slow_bytes].map(|bytes| (bytes / MIB).to_string()),
        None => ["-".into(), "-".into()],
    }
}

/// The host's nodes of fast and slow memory, those with most memory first; `-` if unknown.
fn nodes(places: Option<&PlacesView>) -> String {
    let of_tier = |places: &[PlaceView]| {
        let mut places: Vec<_> = places.iter().filter(|place| place.bytes > 0).collect();
        places.sort_by_key(|place| std::cmp::Reverse(place.bytes));
        let numbers: Vec<_> = places.iter().map(|place| place.node.to_string()).collect();
        match numbers.is_empty() {
            true => "-".into(),
            false => numbers.join(","),
        }
    };
    places.map_or("-".into(), |of| {
        format!("{} / {}", of_tier(&of.fast), of_tier(&of.slow))
    })
}

/// A share as a percentage; `-` if unknown.
pub fn share(share: Option<f64>) -> String {
    share.map_or("-".into(), |share| format!("{:.0} %", share * 100.0))
}

/// An event on one line; the time is UTC.
pub fn event_line(event: &EventView) -> String {
    let s = event.time_ms / 1000;
    let vm = event.vm.as_deref().unwrap_or("-");
    let (h, m, s) = (s / 3600 % 24, s / 60 % 60, s % 60);
    let by = event
        .by
        .as_deref()
        .map(|by| format!(" (asked by {})", shown(by)));
    format!(
        "{h:02}:{m:02}:{s:02}  {vm}  {}{}",
        shown(&event.text),
        by.unwrap_or_default()
    )
}

#[cfg(test)]
mod tests {
    use demeter_host::view::{LeftAloneView, ServiceView};
    use demeter_policy::provision::Policy;

    use super::*;

    #[test]
    fn the_status_is_a_table_with_its_problems() {
        let mib = |fast: u64, slow: u64| TierView {
            fast_bytes: fast * MIB,
            slow_bytes: slow * MIB,
        };
        let view = HostView {
            policy: Policy::Wss,
            pool: mib(1000, 4000),
            committed: mib(300, 1200),
            may_hold: mib(1074, 1200),
            left_alone: vec![LeftAloneView {
                name: "old".into(),
                why: "it has 1 NUMA cells, not two".into(),
                memory_bytes: 512 * MIB,
            }],
            vms: vec![
                VmView {
                    name: "db".into(),
                    state: VmState::Up,
                    target: mib(200, 800),
                    owned: Some(mib(250, 800)),
                    fast_hit: Some(0.987),
                    places: Some(PlacesView {
                        fast: [(0, 50), (2, 200)]
                            .map(|(node, bytes)| PlaceView { node, bytes })
                            .to_vec(),
                        slow: vec![PlaceView {
                            node: 2,
                            bytes: 800,
                        }],
                        elsewhere: None,
                    }),
                    relocation: Some(RelocationView {
                        cost_ms: 1530,
                        benefit_ms: -250,
                        is_resting: true,
                    }),
                    ..VmView::default()
                },
                VmView {
                    name: "web-frontend".into(),
                    state: VmState::Down,
                    target: mib(100, 400),
                    problem: Some("nobody listens".into()),
                    service: Some(ServiceView {
                        slowdown_max_percent: 10,
                        needs_bytes: None,
                        unmet: Some("its slowdown is unknown: no agent is connected".into()),
                    }),
                    ..VmView::default()
                },
            ],
            ..HostView::default()
        };
        assert_eq!(
            text(&view),
            "policy wss, committed 300 of 1000 MiB fast, 1200 of 4000 MiB slow\n\
             VMs may be holding 74 MiB fast and 0 MiB slow beyond the pool: none is given more until they \
             have given it back\n\
             VM            state  fast MiB  target  slow MiB  target   hit  moves s     saved s  provisioner      nodes\n\
             db            up          250     200       800     800  99 %      1.5  -0.2 rests  demeter-balloon  2,0 / 2\n\
             web-frontend  down          -     100         -     400     -        -           -  demeter-balloon  -\n\
             left alone: old (512 MiB): it has 1 NUMA cells, not two\n\
             web-frontend: nobody listens\n\
             web-frontend: its slowdown is unknown: no agent is connected\n"
        );
    }

    #[test]
    fn several_pools_have_a_line_each_and_name_their_vms() {
        let mib = |fast: u64, slow: u64| TierView {
            fast_bytes: fast * MIB,
            slow_bytes: slow * MIB,
        };
        let pool = |name: &str, node| PoolView {
            name: name.into(),
            fast_nodes: vec![node],
            slow_nodes: vec![node + 2],
            size: mib(100, 400),
            committed: mib(70, 80),
            ..PoolView::default()
        };
        let mut view = HostView {
            pools: vec![
                pool("s0", 0),
                PoolView {
                    problem: Some("no memory to divide".into()),
                    ..pool("s1", 1)
                },
            ],
            evacuates: true,
            unsaved: Some("the disk is full".into()),
            settings: [(Some("100"), None), (None, Some("no pool s9"))]
                .map(|(file, problem)| SettingView {
                    key: "vm.db.share".into(),
                    file: file.map(Into::into),
                    value: "300".into(),
                    problem: problem.map(Into::into),
                })
                .to_vec(),
            vms: vec![VmView {
                name: "db".into(),
                pool: "s1".into(),
                state: VmState::Up,
                owned: Some(mib(50, 80)),
                limit: mib(64, 80),
                ..VmView::default()
            }],
            ..HostView::default()
        };
        let said = text(&view);
        for line in [
            "evacuating: each VM gets",
            "not saved, so no VM gets a command: the disk is full\n",
            "pool s1: fast 70 of 100 MiB on node 1, slow 80 of 400 MiB on node 3\n",
            "pool s1: no memory to divide\n",
            "s1/db  up ",
            "set by command: vm.db.share = 300 (in the file: 100)\n",
            "set by command, not in use: vm.db.share (300): no pool s9\n",
        ] {
            assert!(said.contains(line), "{line}: {said}");
        }
        assert_eq!(not_evacuated(&view), ["VM db: 14 MiB are missing"]);
        view.vms[0].owned = Some(mib(64, 80));
        assert!(not_evacuated(&view).is_empty());
    }

    #[test]
    fn events_are_lines() {
        let event = EventView {
            number: 1,
            time_ms: 86_400_000 + 3_723_999,
            vm: Some("db".into()),
            by: None,
            text: "reset".into(),
        };
        assert_eq!(event_line(&event), "01:02:03  db  reset");
        let asked = EventView {
            by: Some("uid 0, pid 7".into()),
            ..event
        };
        assert_eq!(
            event_line(&asked),
            "01:02:03  db  reset (asked by uid 0, pid 7)"
        );
    }
}
