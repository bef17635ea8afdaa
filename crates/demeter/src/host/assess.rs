//! `demeter host assess`: how fast would VMs be with less or more fast memory?
//!
//! # Problem
//! An operator buys fast memory for a host, or sells it. Each agent estimates the slowdown of its VM for each size.
//!
//! # Approach
//! A VM's speed is compared with the speed that it would have if all its memory were fast. Sizes are shares of the
//! memory that its programs and its kernel use. The host's memory is divided between its VMs as policy `benefit`
//! divides it, without guarantees and limits. The host's speed is that of all VMs together, by the CPU time that they
//! use now.
//!
//! # Properties
//! - More fast memory gives no less speed; all memory gives all of it.
//! - VMs without an estimate are listed, and are no part of the host's figures.

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use anyhow::bail;
use demeter_host::view::{HostView, VmView, no_estimate};
use demeter_policy::benefit::{Benefit, Slowdown};
use demeter_policy::provision::{Claim, Curve, Policy, Usage, allocate};
use demeter_policy::{BLOCK_SIZE, ByteCount, MIB, TierBytes};
use serde::Serialize;

use super::client::Client;
use super::status::label;
use crate::speeds::{self, Speeds};
use crate::{output, signals, simulated};

/// Sizes of fast memory, percent of the memory that is used.
const SIZES: [u64; 8] = [5, 10, 15, 25, 35, 50, 75, 100];

/// Shows how fast each VM and the host would be with fast memory of several sizes, by the agents' estimates.
///
/// Nothing is moved. 100 % is the speed with fast memory alone. Two numbers are the bounds of an estimate: without a PMU
/// an agent cannot tell how long programs wait for memory. The load should be typical.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  demeter host assess                  a table
  demeter host assess --json           for other programs
  demeter host assess --svg host.svg   a picture (package demeter-lab)
  demeter host assess --scenario scenarios/gups.toml --scenario scenarios/memlat.toml
                                       of a host with two simulated VMs")]
pub struct Args {
    #[command(flatten)]
    client: Client,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Also write a picture (package demeter-lab)
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Run this scenario under demeter on the simulator, and assess its program as a VM of the host; may be given
    /// several times (package demeter-lab)
    #[arg(long, value_name = "FILE", conflicts_with = "socket")]
    scenario: Vec<PathBuf>,
}

/// Speed with fast memory of one size, as a share of that with fast memory alone.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
struct Point {
    /// The size.
    fast_mib: u64,
    /// The size as a share of the memory that is used, %.
    memory_percent: u64,
    /// Lower bound of the speed, %.
    speed_min_percent: f64,
    /// Upper bound of the speed, %.
    speed_max_percent: f64,
}

/// The speed of a VM, or of the host, at each size.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct Assessed {
    name: String,
    /// Memory that its programs and its kernel use.
    used_mib: u64,
    /// At the size that it has; `None` if that is unknown.
    now: Option<Point>,
    points: Vec<Point>,
}

/// A VM without an estimate.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct Unknown {
    name: String,
    why: String,
}

/// The output of `demeter host assess`.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct Assessment {
    /// All VMs with an estimate together.
    host: Assessed,
    vms: Vec<Assessed>,
    unknown: Vec<Unknown>,
}

/// Asks the controller, and prints the assessment.
pub fn assess(args: &Args) -> anyhow::Result<()> {
    speeds::check(args.svg.as_deref())?;
    let view = match &args.scenario[..] {
        [] => args.client.get("/v1/vms")?,
        scenarios => of_simulated(scenarios, &*signals::stop_flag()?)?,
    };
    let Some(assessment) = of_host(&view) else {
        bail!(
            "no VM has an estimate of its slowdown; {}",
            match view.vms.first() {
                Some(vm) => format!("{}: {}", label(vm), no_estimate(vm.protocol)),
                None => "the controller manages no VM".into(),
            }
        );
    };
    if let Some(file) = &args.svg {
        draw(file, &assessment)?;
    }
    output::print(match args.json {
        true => serde_json::to_string_pretty(&assessment)? + "\n",
        false => text(&assessment),
    })
}

/// A host whose VMs run these scenarios, with the last estimate of each agent.
fn of_simulated(scenarios: &[PathBuf], stop: &AtomicBool) -> anyhow::Result<HostView> {
    let vm = |path: &PathBuf| -> anyhow::Result<VmView> {
        let mut last = None;
        simulated::look(path, stop, |_, _, benefit| {
            last = benefit().or(last.take());
        })?;
        Ok(VmView {
            name: path
                .file_stem()
                .unwrap_or_default()
                .to_string_lossy()
                .into(),
            protocol: Some(demeter_proto::VERSION),
            benefit: last,
            ..VmView::default()
        })
    };
    Ok(HostView {
        vms: scenarios.iter().map(vm).collect::<Result<_, _>>()?,
        ..HostView::default()
    })
}

/// A VM's estimate.
struct Estimated<'a> {
    vm: &'a VmView,
    benefit: &'a Benefit,
    used: u64,
}

/// `None` without estimates.
fn of_host(view: &HostView) -> Option<Assessment> {
    let estimated = |vm| -> Option<Estimated<'_>> {
        let vm: &VmView = vm;
        let benefit = vm.benefit.as_ref()?;
        let used = benefit.points().last()?.fast.0;
        Some(Estimated { vm, benefit, used })
    };
    let vms: Vec<_> = view.vms.iter().filter_map(estimated).collect();
    let unknown = view.vms.iter().filter(|vm| vm.benefit.is_none());
    let unknown = unknown.map(|vm| Unknown {
        name: label(vm),
        why: no_estimate(vm.protocol),
    });
    let used = vms
        .iter()
        .fold(0, |sum: u64, vm| sum.saturating_add(vm.used));
    let owned = vms.iter().map(|of| of.vm.owned);
    let owned: Option<Vec<u64>> = owned.map(|owned| Some(owned?.fast_bytes)).collect();
    let host = Assessed {
        name: "host".into(),
        used_mib: used / MIB,
        now: owned.map(|owned| {
            let fast = owned
                .iter()
                .fold(0, |sum: u64, bytes| sum.saturating_add(*bytes));
            point(fast, used, together(&vms, &owned))
        }),
        points: sizes(used)
            .map(|fast| point(fast, used, together(&vms, &divided(&vms, fast))))
            .collect(),
    };
    (!vms.is_empty()).then(|| Assessment {
        host,
        vms: vms.iter().map(of_vm).collect(),
        unknown: unknown.collect(),
    })
}

fn of_vm(of: &Estimated<'_>) -> Assessed {
    let at = |fast| point(fast, of.used, of.benefit.slowdown(ByteCount(fast)));
    Assessed {
        name: label(of.vm),
        used_mib: of.used / MIB,
        now: of.vm.owned.map(|owned| at(owned.fast_bytes)),
        points: sizes(of.used).map(at).collect(),
    }
}

fn sizes(used: u64) -> impl Iterator<Item = u64> {
    SIZES.into_iter().map(move |percent| match percent {
        100 => used,
        _ => used / 100 * percent,
    })
}

fn point(fast: u64, used: u64, slowdown: Slowdown) -> Point {
    Point {
        fast_mib: fast / MIB,
        memory_percent: (fast / (used / 100).max(1)).min(100),
        speed_min_percent: 100.0 / slowdown.max,
        speed_max_percent: 100.0 / slowdown.min,
    }
}

/// Fast memory of each VM if the host has `fast` of it, as policy `benefit` divides it.
fn divided(vms: &[Estimated<'_>], fast: u64) -> Vec<u64> {
    let tiers = |fast| TierBytes {
        fast: ByteCount(fast),
        slow: ByteCount(0),
    };
    let claim = |of: &Estimated<'_>| Claim {
        share: 1,
        guarantee: TierBytes::default(),
        limit: tiers(of.used.next_multiple_of(BLOCK_SIZE)),
        current: TierBytes::default(),
        usage: Some(Usage {
            used: TierBytes::default(),
            working_set: None,
            curve: Some(Curve::new(of.benefit)),
            pressed: false,
        }),
        pinned: false,
        service: None,
    };
    let claims: Vec<_> = vms.iter().map(claim).collect();
    // Whole blocks, so that all memory suffices for all VMs.
    let pool = match fast
        >= vms
            .iter()
            .fold(0, |sum: u64, of| sum.saturating_add(of.used))
    {
        true => u64::MAX,
        false => fast,
    };
    // Cannot fail: nothing is guaranteed.
    let grants = allocate(Policy::Benefit, tiers(pool), &claims, ByteCount(0));
    grants
        .unwrap_or_default()
        .iter()
        .map(|grant| grant.fast.0)
        .collect()
}

/// Slowdown of the work that all VMs do.
fn together(vms: &[Estimated<'_>], fast: &[u64]) -> Slowdown {
    let mut sum = Slowdown { min: 0.0, max: 0.0 };
    let mut weights = 0.0;
    for (of, &fast) in vms.iter().zip(fast) {
        // A VM that is idle now has some weight, too, so that the sum is never zero.
        let weight = f64::from(of.benefit.running_ms().max(1));
        let slowdown = of.benefit.slowdown(ByteCount(fast));
        sum.min += weight * slowdown.min;
        sum.max += weight * slowdown.max;
        weights += weight;
    }
    match weights > 0.0 {
        true => Slowdown {
            min: sum.min / weights,
            max: sum.max / weights,
        },
        false => Slowdown { min: 1.0, max: 1.0 },
    }
}

/// Both bounds as whole numbers, or one number if they are the same.
fn bounds(point: &Point) -> String {
    let (min, max) = (
        point.speed_min_percent.floor(),
        point.speed_max_percent.round(),
    );
    let close = point.speed_max_percent - point.speed_min_percent < 1.0;
    match close {
        true => format!("{:.0}", point.speed_min_percent),
        false => format!("{min:.0}-{max:.0}"),
    }
}

fn text(of: &Assessment) -> String {
    let now = |assessed: &Assessed| assessed.now.as_ref().map_or("-".into(), bounds);
    let heads = SIZES.map(|percent| format!("{percent} %"));
    let head = ["VM".to_owned(), "used MiB".into()].into_iter();
    let mut rows = vec![head.chain(heads).chain(["now".into()]).collect::<Vec<_>>()];
    rows.extend(of.vms.iter().chain([&of.host]).map(|assessed| {
        let first = [assessed.name.clone(), assessed.used_mib.to_string()];
        let points = assessed.points.iter().map(bounds);
        first
            .into_iter()
            .chain(points)
            .chain([now(assessed)])
            .collect()
    }));
    let width = |column: usize| rows.iter().map(|row| row[column].len()).max().unwrap_or(0);
    let widths: Vec<_> = (0..rows[0].len()).map(width).collect();
    let mut text =
        "Speed with fast memory of several sizes, % of that with fast memory alone\n\n".to_owned();
    for row in &rows {
        let cells = row.iter().zip(&widths).enumerate();
        let cells: Vec<_> = cells
            .map(|(column, (cell, &width))| match column {
                0 => format!("{cell:width$}"),
                _ => format!("{cell:>width$}"),
            })
            .collect();
        text += cells.join("  ").trim_end();
        text.push('\n');
    }
    text += "\nSizes are shares of the memory that programs and kernel use. The host's memory is divided as policy \
             benefit\ndivides it. Two numbers are the bounds of an estimate.\n";
    for unknown in &of.unknown {
        text += &format!("not counted: {}: {}\n", unknown.name, unknown.why);
    }
    text
}

/// Draws the speed of each VM and of the host by size.
fn draw(file: &Path, of: &Assessment) -> anyhow::Result<()> {
    let speeds = |assessed: &Assessed| Speeds {
        name: assessed.name.clone(),
        bounds_percent: assessed
            .points
            .iter()
            .map(|point| (point.speed_min_percent, point.speed_max_percent))
            .collect(),
    };
    let all = [&of.host].into_iter().chain(&of.vms).map(speeds);
    speeds::draw(file, &SIZES, all.collect())
}

#[cfg(test)]
mod tests {
    use demeter_host::view::TierView;
    use proptest::prelude::*;

    use super::*;

    /// A program with these points (MiB, per mille), that waits for memory for this share of its time.
    fn benefit(points: &[(u64, u16)], waits: [u16; 2], running_ms: u32) -> Benefit {
        let points: Vec<_> = points
            .iter()
            .map(|(mib, served)| (mib * MIB, *served))
            .collect();
        let fields = serde_json::json!({
            "points": points, "fast_latency_ns": 100, "slow_latency_ns": 200, "running_ms": running_ms,
            "waits_min_permille": waits[0], "waits_max_permille": waits[1],
        });
        serde_json::from_value(fields).unwrap()
    }

    fn vm(name: &str, protocol: Option<u16>, benefit: Option<Benefit>) -> VmView {
        VmView {
            name: name.into(),
            protocol,
            benefit,
            owned: Some(TierView {
                fast_bytes: 100 * MIB,
                slow_bytes: 0,
            }),
            ..VmView::default()
        }
    }

    #[test]
    fn fast_memory_goes_to_the_vm_that_waits_and_unknown_vms_are_named() {
        let hot = benefit(&[(0, 0), (100, 900), (1000, 1000)], [1000, 1000], 1000);
        let cool = benefit(&[(0, 0), (1000, 1000)], [0, 100], 1000);
        let view = HostView {
            vms: vec![
                vm("hot", Some(4), Some(hot)),
                vm("cool", Some(4), Some(cool)),
                vm("old", Some(3), None),
                vm("idle", Some(4), None),
                vm("bare", None, None),
            ],
            ..HostView::default()
        };
        let it = of_host(&view).unwrap();
        let at = |of: &Assessed, percent| {
            let found = of
                .points
                .iter()
                .find(|point| point.memory_percent == percent);
            *found.unwrap()
        };
        // 100 MiB serve 90 %: 1.1 times as long.
        assert!((at(&it.vms[0], 10).speed_min_percent - 100.0 / 1.1).abs() < 0.1);
        assert_eq!(bounds(&at(&it.vms[1], 50)), "95-100");
        // 100 of 2000 MiB go to the first VM: 1.1 and 1.0 to 1.1.
        let five = at(&it.host, 5);
        assert!(
            (five.speed_min_percent - 100.0 / 1.1).abs() < 0.1,
            "{five:?}"
        );
        assert!(
            (five.speed_max_percent - 100.0 / 1.05).abs() < 0.1,
            "{five:?}"
        );
        assert_eq!(bounds(&at(&it.host, 100)), "100");
        let text = text(&it);
        assert!(text.contains("host      2000   90-95"), "{text}");
        for line in [
            "not counted: old: its slowdown is unknown: its agent speaks protocol 3",
            "not counted: idle: its slowdown is unknown: its agent has not seen enough",
            "not counted: bare: its slowdown is unknown: no agent is connected",
        ] {
            assert!(text.contains(line), "{text}");
        }
        assert_eq!(of_host(&HostView::default()), None);
    }

    #[cfg(feature = "study")]
    #[test]
    fn simulated_programs_are_vms_of_a_host() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../scenarios/ci.toml");
        let view = of_simulated(&[path.into()], &AtomicBool::new(false)).unwrap();
        let it = of_host(&view).unwrap();
        assert_eq!((it.vms[0].name.as_str(), it.unknown.len()), ("ci", 0));
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("host.svg");
        draw(&file, &it).unwrap();
        let svg = std::fs::read_to_string(file).unwrap();
        assert!(svg.contains("host, 100 %: 100<"), "{svg}");
    }

    proptest! {
        #[test]
        fn more_fast_memory_gives_no_less_speed(
            vms in prop::collection::vec((1u64..3000, 0u16..=1000, 1u64..3000, 0u16..=1000, 0u32..9000), 1..6),
        ) {
            let view = HostView {
                vms: vms.iter().map(|&(first, served, more, waits, running_ms)| {
                    let points = [(0, 0), (first, served), (first + more, 1000)];
                    vm("vm", Some(4), Some(benefit(&points, [waits / 2, waits], running_ms)))
                }).collect(),
                ..HostView::default()
            };
            let it = of_host(&view).unwrap();
            for of in it.vms.iter().chain([&it.host]) {
                let last = of.points.last().unwrap();
                prop_assert!((last.speed_min_percent - 100.0).abs() < 1e-6);
                for pair in of.points.windows(2) {
                    // The division is by the upper bound of the time that is saved, in whole blocks.
                    prop_assert!(pair[0].speed_min_percent <= pair[1].speed_min_percent + 0.5);
                    prop_assert!(pair[0].speed_min_percent <= pair[0].speed_max_percent);
                }
            }
        }
    }
}
