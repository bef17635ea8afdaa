//! Figures of runs that compare provisioning, and of crash tests.

use super::{Figures, add_speed, hot_in_fast, mib, ratio, seconds};

use std::collections::BTreeSet;

use demeter_outcome::{CrashFigures, SoakFigures, Use};

use crate::measure::Measure;
use crate::text::clean;
use crate::text::number::{count, percent, short};
use demeter_outcome::SystemResult;

/// Explains figures of provisioning.
const PROVISIONED: &str = "The end (steady) is the last third of the run; before it the VM was \
     sized: how fast memory was taken, how much of that the host has back, and what programs then \
     found free in each tier; p99 is what 99 % of the intervals reached, in which a resize was under \
     way and in all others; late is the longest resize, - if one was never done in full; over pool \
     counts the moments at which the host had promised more than it has.";

/// Explains figures of crashes.
const CRASHES: &str = "Agent, host controller or VM was killed, or the VM had another event of its \
     life, at a random point after its sizes were changed; well again means: the VM owns what it should and its workload \
     has verified a round that began after that (the longest is shown).";

/// Explains figures of a soak test.
const SOAK: &str = "What is used must not grow: the most in the second quarter of the run (early) is \
     held against the most in its last (late), of the controller, of each VM's agent and of its kernel's \
     own memory; the result file has them all.";

/// Maximum number of event kinds shown separately.
const EVENTS_MAX: usize = 16;

/// Figures and their explanation, if these systems are compared by provisioning.
pub(super) fn figures(systems: &[SystemResult]) -> Option<(Figures, &'static str)> {
    if systems.iter().any(|s| crashes(s).is_some()) {
        Some((crash_figures(systems), CRASHES))
    } else if systems.iter().any(|s| soak(s).is_some()) {
        Some((soak_figures(), SOAK))
    } else if systems.iter().any(|s| s.provisioning.is_some()) {
        Some((provisioned_figures(systems), PROVISIONED))
    } else {
        None
    }
}

fn crashes(system: &SystemResult) -> Option<&CrashFigures> {
    system.provisioning.as_ref()?.crashes.as_ref()
}

fn soak(system: &SystemResult) -> Option<&SoakFigures> {
    system.provisioning.as_ref()?.soak.as_ref()
}

fn soak_figures() -> Figures {
    let mut figures = Figures::default();
    figures.add("", "memory by", |_, s| Some(clean::name(&s.name)));
    figures.add("", "s", |_, s| Some(count(soak(s)?.seconds)));
    figures.add("", "resizes", |_, s| Some(count(soak(s)?.resizes)));
    figures.add("verified", "rounds", |_, s| Some(count(soak(s)?.rounds)));
    figures.add("verified", "words", |_, s| Some(count(soak(s)?.words)));
    figures.add("wrong", "words", |_, s| Some(count(soak(s)?.wrong_words)));
    figures.add("looked", "at", |_, s| {
        Some(count(soak(s)?.uses.len() as u64))
    });
    figures.add("of these", "grew", |_, s| {
        let grew = soak(s)?.uses.iter().filter(|of| of.grew);
        Some(count(grew.count() as u64))
    });
    for what in ["KiB", "descriptors", "threads"] {
        for (group, when) in SOAK_TIMES {
            figures.add(format!("controller {group}"), what, move |_, s| {
                let mut uses = soak(s)?.uses.iter();
                let found = uses.find(|of| of.who == "controller" && of.what == what)?;
                Some(count(when(found)))
            });
        }
    }
    figures.add("over", "pool", |_, s| {
        s.provisioning.as_ref()?.pool_violations.map(count)
    });
    figures
}

/// The period of a use.
type When = fn(&Use) -> u64;

const SOAK_TIMES: [(&str, When); 2] = [("early", |of| of.early), ("late", |of| of.late)];

fn crash_figures(systems: &[SystemResult]) -> Figures {
    let mut figures = Figures::default();
    figures.add("", "memory by", |_, s| Some(clean::name(&s.name)));
    figures.add("", "events", |_, s| Some(count(crashes(s)?.cycles)));
    let seen = systems.iter().filter_map(crashes);
    let events: BTreeSet<&String> = seen.flat_map(|of| of.by_event.keys()).collect();
    for event in events.into_iter().take(EVENTS_MAX) {
        let name = clean::name(event);
        let (what, whom) = name.split_once(' ').unwrap_or(("", &name));
        let event = event.clone();
        figures.add(what, whom, move |_, s| {
            Some(count(*crashes(s)?.by_event.get(&event).unwrap_or(&0)))
        });
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
