//! The figures that people compare, as text: what the terminal's table and the page's both show.

use crate::number::{count, percent, short};
use crate::provision::CrashFigures;
use crate::schema::{RunResult, SystemResult};
use crate::text;

/// One row per system, one column per figure.
pub(crate) struct Summary {
    pub columns: Vec<Column>,
    /// As many cells as there are columns; `-` where nothing was measured.
    pub rows: Vec<Vec<String>>,
}

/// A column's heading: neighbours of one group share the upper line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Column {
    pub group: &'static str,
    pub title: &'static str,
}

/// The same for runs that compare how memory is provisioned.
const EXPLANATION_PROVISIONED: &str = "The end (steady) is the last third of the run; before it the VM was \
     sized: how fast memory was taken, how much of that the host has back, and what programs then \
     found free in each tier; p99 is what 99 % of the intervals reached, in which a resize was under \
     way and in all others; late is the longest resize, - if one was never done in full; over pool \
     counts the moments at which the host had promised more than it has.";

/// The same for runs that crash things.
const EXPLANATION_CRASHES: &str = "Agent, host controller or VM was killed, or the VM reset, at a random \
     point after its sizes were changed; well again means: the VM owns what it should and its workload \
     has verified a round that began after the crash (the longest is shown).";

/// What a figure needs besides the system itself.
struct Context<'a> {
    result: &'a RunResult,
    oracle: Option<&'a SystemResult>,
}

type Figure = fn(&Context, &SystemResult) -> Option<String>;

/// Says how to read the figures, in one sentence.
pub(crate) fn explanation(result: &RunResult) -> &'static str {
    if result.systems.iter().any(|s| crashes(s).is_some()) {
        EXPLANATION_CRASHES
    } else if is_provisioned(result) {
        EXPLANATION_PROVISIONED
    } else {
        EXPLANATION
    }
}

const EXPLANATION: &str = "The end (steady) is the last third of the run; the oracle had its hot \
     set placed in fast memory from the start; t90 is the time until 90 % of the (first, second) hot \
     set was there; management CPU is the VM's system time plus the agent's user time, less the system \
     time of none, in seconds and in % of one CPU.";

impl Summary {
    pub(crate) fn new(result: &RunResult) -> Self {
        let context = Context {
            result,
            oracle: result.systems.iter().find(|s| s.name == "oracle"),
        };
        let figures = figures(result);
        let rows = result.systems.iter().map(|system| {
            figures
                .iter()
                .map(|(_, figure)| figure(&context, system).unwrap_or_else(|| "-".into()))
                .collect()
        });
        Self {
            rows: rows.collect(),
            columns: figures.iter().map(|(column, _)| *column).collect(),
        }
    }
}

/// Whether the workload reports latency (memlat) instead of throughput (gups).
pub(crate) fn shows_latency(result: &RunResult) -> bool {
    let any = |figure: fn(&SystemResult) -> bool| result.systems.iter().any(figure);
    any(|s| s.mean_latency_ns.is_some()) && !any(|s| s.mean_mops.is_some())
}

/// A system's share of the oracle's performance over the last third: 1 is as good as the oracle.
pub(crate) fn steady_of_oracle(result: &RunResult, system: &SystemResult) -> Option<f64> {
    let oracle = result.systems.iter().find(|s| s.name == "oracle")?;
    if shows_latency(result) {
        ratio(oracle.steady_latency_ns, system.steady_latency_ns)
    } else {
        ratio(system.steady_mops, oracle.steady_mops)
    }
}

fn figures(result: &RunResult) -> Vec<(Column, Figure)> {
    if is_provisioned(result) {
        return provisioned_figures(result);
    }
    let mut figures: Vec<(Column, Figure)> = Vec::new();
    let mut add = |group, title, figure: Figure| figures.push((Column { group, title }, figure));

    add("", "system", |_, s| Some(text::name(&s.name)));
    if shows_latency(result) {
        add("latency, ns", "mean", |_, s| s.mean_latency_ns.map(short));
        add("latency, ns", "end", |_, s| s.steady_latency_ns.map(short));
        add("% of oracle", "mean", |c, s| {
            ratio(c.oracle?.mean_latency_ns, s.mean_latency_ns).map(percent)
        });
    } else {
        add("Mops", "mean", |_, s| s.mean_mops.map(short));
        add("Mops", "end", |_, s| s.steady_mops.map(short));
        add("% of oracle", "mean", |c, s| {
            ratio(s.mean_mops, c.oracle?.mean_mops).map(percent)
        });
    }
    add("% of oracle", "end", |c, s| {
        steady_of_oracle(c.result, s).map(percent)
    });
    add("hot in", "fast%", |_, s| Some(percent(s.hot_in_fast_final)));
    if result.shift_at_s.is_some() {
        add("t90, s", "1st", |_, s| s.t90_s.map(seconds));
        add("t90, s", "2nd", |_, s| s.t90_after_shift_s.map(seconds));
    } else {
        add("t90", "s", |_, s| s.t90_s.map(seconds));
    }
    add("management CPU", "s", |_, s| s.mgmt_cpu_s.map(seconds));
    add("management CPU", "%", |c, s| {
        ratio(s.mgmt_cpu_s, Some(c.result.duration_s as f64)).map(percent)
    });
    add("management CPU", "end%", |c, s| {
        ratio(s.mgmt_cpu_steady_s, Some(c.result.duration_s as f64 / 3.0)).map(percent)
    });
    add("kswapd", "scanned", |_, s| Some(count(s.kswapd_scanned)));
    add("moved MiB", "up", |_, s| s.bytes_promoted.map(mib));
    add("moved MiB", "down", |_, s| s.bytes_demoted.map(mib));
    add("wrong", "words", |_, s| s.verify_errors.map(count));
    figures
}

fn is_provisioned(result: &RunResult) -> bool {
    result.systems.iter().any(|s| s.provisioning.is_some())
}

fn crashes(system: &SystemResult) -> Option<&CrashFigures> {
    system.provisioning.as_ref()?.crashes.as_ref()
}

fn crash_figures() -> Vec<(Column, Figure)> {
    let mut figures: Vec<(Column, Figure)> = Vec::new();
    let mut add = |group, title, figure: Figure| figures.push((Column { group, title }, figure));

    add("", "memory by", |_, s| Some(text::name(&s.name)));
    add("", "crashes", |_, s| Some(count(crashes(s)?.cycles)));
    for (title, figure) in [
        ("agent", (|_, s| of_victim(s, "kill agent")) as Figure),
        ("host", |_, s| of_victim(s, "kill host")),
        ("VM", |_, s| of_victim(s, "kill vm")),
        ("reset", |_, s| of_victim(s, "reset vm")),
    ] {
        add("of these", title, figure);
    }
    add("well again", "after s", |_, s| {
        Some(seconds(crashes(s)?.recovered_max_s))
    });
    add("verified", "rounds", |_, s| Some(count(crashes(s)?.rounds)));
    add("verified", "words", |_, s| Some(count(crashes(s)?.words)));
    add("wrong", "words", |_, s| {
        Some(count(crashes(s)?.wrong_words))
    });
    add("over", "pool", |_, s| Some(count(crashes(s)?.violations)));
    figures
}

fn of_victim(system: &SystemResult, victim: &str) -> Option<String> {
    Some(count(*crashes(system)?.by_victim.get(victim).unwrap_or(&0)))
}

fn provisioned_figures(result: &RunResult) -> Vec<(Column, Figure)> {
    if result.systems.iter().any(|s| crashes(s).is_some()) {
        return crash_figures();
    }
    let mut figures: Vec<(Column, Figure)> = Vec::new();
    let mut add = |group, title, figure: Figure| figures.push((Column { group, title }, figure));

    add("", "memory by", |_, s| Some(text::name(&s.name)));
    add("Mops", "mean", |_, s| s.mean_mops.map(short));
    add("Mops", "end", |_, s| s.steady_mops.map(short));
    if result.systems.iter().any(|s| s.name == "static") {
        add("% of", "static", |c, s| {
            let fixed = c.result.systems.iter().find(|s| s.name == "static")?;
            ratio(s.mean_mops, fixed.mean_mops).map(percent)
        });
    }
    add("hot in", "fast%", |_, s| Some(percent(s.hot_in_fast_final)));
    add("taken", "GiB/s", |_, s| {
        s.provisioning.as_ref()?.inflate_gib_per_s.map(short)
    });
    add("returned", "%", |_, s| {
        let p = s.provisioning.as_ref()?;
        let bytes = |bytes: Option<u64>| bytes.map(|bytes| bytes as f64);
        ratio(bytes(p.host_bytes_returned), bytes(p.bytes_inflated)).map(percent)
    });
    add("free MiB", "fast", |_, s| {
        s.provisioning.as_ref()?.fast_free_bytes.map(mib)
    });
    add("free MiB", "slow", |_, s| {
        s.provisioning.as_ref()?.slow_free_bytes.map(mib)
    });
    add("p99 Mops", "resizing", |_, s| {
        s.provisioning.as_ref()?.p99_resizing_mops.map(short)
    });
    add("p99 Mops", "else", |_, s| {
        s.provisioning.as_ref()?.p99_other_mops.map(short)
    });
    add("resized", "late, s", |_, s| {
        let resizes = &s.provisioning.as_ref()?.resizes;
        let longest = resizes
            .iter()
            .map(|r| r.took_s)
            .try_fold(0.0, |longest: f64, took_s| Some(longest.max(took_s?)));
        longest.filter(|_| !resizes.is_empty()).map(short)
    });
    add("over", "pool", |_, s| {
        s.provisioning.as_ref()?.pool_violations.map(count)
    });
    add("wrong", "words", |_, s| s.verify_errors.map(count));
    figures
}

/// `part / whole`, where both are known and the quotient means something.
fn ratio(part: Option<f64>, whole: Option<f64>) -> Option<f64> {
    let ratio = part? / whole?;
    ratio.is_finite().then_some(ratio)
}

/// Seconds of a clock that ticks in whole ones.
fn seconds(seconds: f64) -> String {
    if seconds < 999.95 {
        format!("{seconds:.1}")
    } else {
        short(seconds)
    }
}

fn mib(bytes: u64) -> String {
    count(bytes.div_ceil(1 << 20))
}
