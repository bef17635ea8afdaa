//! The figures of runs that compare how memory is provisioned, and of those that crash things.

use super::{Figures, add_speed, hot_in_fast, mib, ratio, seconds};

use demeter_outcome::CrashFigures;

use crate::measure::Measure;
use crate::text::clean;
use crate::text::number::{count, percent, short};
use demeter_outcome::SystemResult;

/// How to read figures of provisioning.
const PROVISIONED: &str = "The end (steady) is the last third of the run; before it the VM was \
     sized: how fast memory was taken, how much of that the host has back, and what programs then \
     found free in each tier; p99 is what 99 % of the intervals reached, in which a resize was under \
     way and in all others; late is the longest resize, - if one was never done in full; over pool \
     counts the moments at which the host had promised more than it has.";

/// How to read figures of crashes.
const CRASHES: &str = "Agent, host controller or VM was killed, or the VM reset, at a random \
     point after its sizes were changed; well again means: the VM owns what it should and its workload \
     has verified a round that began after the crash (the longest is shown).";

/// The figures, if these systems are compared by how they provision memory, and how to read them.
pub(super) fn figures(systems: &[SystemResult]) -> Option<(Figures, &'static str)> {
    if systems.iter().any(|s| crashes(s).is_some()) {
        Some((crash_figures(), CRASHES))
    } else if systems.iter().any(|s| s.provisioning.is_some()) {
        Some((provisioned_figures(systems), PROVISIONED))
    } else {
        None
    }
}

fn crashes(system: &SystemResult) -> Option<&CrashFigures> {
    system.provisioning.as_ref()?.crashes.as_ref()
}

fn crash_figures() -> Figures {
    let mut figures = Figures::default();
    figures.add("", "memory by", |_, s| Some(clean::name(&s.name)));
    figures.add("", "crashes", |_, s| Some(count(crashes(s)?.cycles)));
    for (title, victim) in [
        ("agent", "kill agent"),
        ("host", "kill host"),
        ("VM", "kill vm"),
        ("reset", "reset vm"),
    ] {
        figures.add("of these", title, move |_, s| of_victim(s, victim));
    }
    figures.add("well again", "after s", |_, s| {
        Some(seconds(crashes(s)?.recovered_max_s))
    });
    figures.add("verified", "rounds", |_, s| Some(count(crashes(s)?.rounds)));
    figures.add("verified", "words", |_, s| Some(count(crashes(s)?.words)));
    figures.add("wrong", "words", |_, s| {
        Some(count(crashes(s)?.wrong_words))
    });
    figures.add("over", "pool", |_, s| Some(count(crashes(s)?.violations)));
    figures
}

fn of_victim(system: &SystemResult, victim: &str) -> Option<String> {
    Some(count(*crashes(system)?.by_victim.get(victim).unwrap_or(&0)))
}

fn provisioned_figures(systems: &[SystemResult]) -> Figures {
    let mut figures = Figures::default();
    figures.add("", "memory by", |_, s| Some(clean::name(&s.name)));
    add_speed(&mut figures, systems, true);
    if systems.iter().any(|s| s.name == "static") {
        figures.add("% of", "static", |c, s| {
            let fixed = c.peer("static")?;
            c.measure.speed(s, fixed).map(percent)
        });
    }
    if systems.iter().any(|s| s.hot_in_fast_final.is_some()) {
        figures.add("hot in", "fast%", hot_in_fast);
    }
    figures.add("taken", "GiB/s", |_, s| {
        s.provisioning.as_ref()?.inflate_gib_per_s.map(short)
    });
    figures.add("returned", "%", |_, s| {
        let p = s.provisioning.as_ref()?;
        let bytes = |bytes: Option<u64>| bytes.map(|bytes| bytes as f64);
        ratio(bytes(p.host_bytes_returned), bytes(p.bytes_inflated)).map(percent)
    });
    figures.add("free MiB", "fast", |_, s| {
        s.provisioning.as_ref()?.fast_free_bytes.map(mib)
    });
    figures.add("free MiB", "slow", |_, s| {
        s.provisioning.as_ref()?.slow_free_bytes.map(mib)
    });
    let p99 = format!("p99 {}", Measure::speed_of(systems.iter()).heading());
    figures.add(p99.clone(), "resizing", |_, s| {
        s.provisioning.as_ref()?.p99_resizing.map(short)
    });
    figures.add(p99, "else", |_, s| {
        s.provisioning.as_ref()?.p99_other.map(short)
    });
    figures.add("resized", "late, s", |_, s| {
        let resizes = &s.provisioning.as_ref()?.resizes;
        let longest = resizes
            .iter()
            .map(|r| r.took_s)
            .try_fold(0.0, |longest: f64, took_s| Some(longest.max(took_s?)));
        longest.filter(|_| !resizes.is_empty()).map(short)
    });
    figures.add("over", "pool", |_, s| {
        s.provisioning.as_ref()?.pool_violations.map(count)
    });
    figures.add("wrong", "words", |_, s| s.verify_errors.map(count));
    figures
}
