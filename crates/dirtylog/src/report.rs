//! The result of a measurement, and its text.

use std::fmt::{self, Display, Formatter};

use serde::Serialize;

use crate::offer::{EagerSplit, Offer};
use crate::samples::{Sample, merged};
use crate::settings::{BLOCK_BYTES, Settings};
use crate::stats::Counters;

/// Width of the drawing, characters.
const COLUMNS: usize = 72;

/// One measurement.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    /// The settings.
    pub settings: Settings,
    /// The kernel's capabilities.
    pub offer: Offer,
    /// Number of pages that the guest writes in each sweep.
    pub pages_written: u64,
    /// The steps, in order.
    pub steps: Vec<Step>,
    /// Speed from enabling logging to the end of the last pass, divided by the speed before.
    pub speed_kept: f64,
    /// The longest wait of a virtual CPU between two stores in that time, microseconds.
    pub worst_wait_us: f64,
    /// The guest's speed over time.
    pub samples: Vec<Sample>,
}

/// A step of a measurement.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Step {
    /// The kind of step.
    pub what: What,
    /// Number of its pass, from 1; 0 before logging.
    pub pass: u32,
    /// Milliseconds since the start of the measurement.
    pub from_ms: f64,
    /// Duration, milliseconds.
    pub ms: f64,
    /// The guest's speed during the step.
    #[serde(flatten)]
    pub speed: Speed,
    /// KVM's counters during the step.
    #[serde(flatten)]
    pub counts: Counts,
    /// Number of dirty pages, if the log was read.
    pub dirty_pages: Option<u64>,
}

/// The kind of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, strum::Display)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub enum What {
    /// The guest runs without logging.
    Before,
    /// Logging is enabled.
    Enable,
    /// The guest runs until each virtual CPU has swept its slice.
    Sweep,
    /// The log is read.
    Get,
    /// The log is cleared.
    Clear,
    /// Logging is disabled.
    Disable,
}

/// The guest's speed.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Speed {
    /// Stores of all virtual CPUs per second.
    pub stores_per_s: f64,
    /// The longest wait of a virtual CPU between two stores, microseconds.
    pub worst_wait_us: f64,
}

/// KVM's counters; `None` if this kernel does not have the counter.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Counts {
    /// Faults of second-level page tables (`pf_taken`).
    pub faults: Option<u64>,
    /// Faults that only restored a permission, without KVM's lock (`pf_fast`).
    pub faults_fast: Option<u64>,
    /// Exits of virtual CPUs to KVM.
    pub exits: Option<u64>,
    /// Flushes of the TLBs of all virtual CPUs (`remote_tlb_flush`).
    pub flushes: Option<u64>,
    /// Blocks of 2 MiB mapped by huge pages at the end (`pages_2m`, `pages_1g`).
    pub huge_blocks: Option<u64>,
}

impl Counts {
    /// The difference of two readings.
    ///
    /// Faults have mapped all memory that a guest has written. If all these counters are zero, KVM does not count.
    pub(crate) fn between(before: &Counters, after: &Counters) -> Self {
        let grown = |name: &str| Some(after.get(name)?.wrapping_sub(*before.get(name)?));
        let now = |name: &str| after.get(name).copied();
        let faults = now("pf_taken")
            .filter(|&faults| faults > 0)
            .and_then(|_| grown("pf_taken"));
        let (small, huge, giant) = (
            now("pages_4k"),
            now("pages_2m"),
            now("pages_1g").unwrap_or(0),
        );
        let blocks_a_gib = (1u64 << 30) / BLOCK_BYTES;
        Self {
            faults,
            faults_fast: faults.and_then(|_| grown("pf_fast")),
            exits: grown("exits"),
            flushes: grown("remote_tlb_flush"),
            huge_blocks: match (small, huge) {
                (Some(0), Some(0)) if giant == 0 => None,
                (_, huge) => {
                    huge.map(|huge| huge.saturating_add(giant.saturating_mul(blocks_a_gib)))
                }
            },
        }
    }
}

impl Report {
    pub(crate) fn new(
        settings: Settings,
        offer: Offer,
        steps: Vec<Step>,
        samples: Vec<Sample>,
    ) -> Self {
        let before = steps.iter().filter(|step| step.what == What::Before);
        let before = before.map(|step| step.speed.stores_per_s).next();
        let logged = || {
            steps
                .iter()
                .filter(|step| !matches!(step.what, What::Before | What::Disable))
        };
        let stores: f64 = logged().map(|step| step.speed.stores_per_s * step.ms).sum();
        let took: f64 = logged().map(|step| step.ms).sum();
        let speed_kept = stores / took / before.unwrap_or(f64::NAN);
        Self {
            pages_written: settings.pages_written(),
            speed_kept: if speed_kept.is_finite() {
                speed_kept
            } else {
                0.0
            },
            worst_wait_us: logged()
                .map(|step| step.speed.worst_wait_us)
                .fold(0.0, f64::max),
            settings,
            offer,
            steps,
            samples,
        }
    }

    /// Total duration of all steps of a kind, milliseconds.
    pub fn ms(&self, what: What) -> f64 {
        let steps = self.steps.iter().filter(|step| step.what == what);
        steps.map(|step| step.ms).sum()
    }

    /// Draws the guest's speed as a line of blocks, with the starts of steps below it.
    fn drawing(&self) -> Option<(String, String)> {
        const LEVELS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
        let end_ms = self.samples.last()?.until_ms;
        let column = |ms: f64| ((ms / end_ms * COLUMNS as f64) as usize).min(COLUMNS - 1);
        let mut columns = vec![vec![]; COLUMNS];
        for &sample in &self.samples {
            let spanned = column(sample.until_ms - sample.for_ms)..=column(sample.until_ms);
            for column in &mut columns[spanned] {
                column.push(sample);
            }
        }
        let speed = |samples: &Vec<Sample>| {
            let all = merged(samples);
            (all.for_ms > 0.0).then(|| all.stores as f64 / all.for_ms)
        };
        let speeds: Vec<Option<f64>> = columns.iter().map(speed).collect();
        let most = speeds.iter().flatten().copied().fold(0.0, f64::max);
        let level = |speed: f64| LEVELS[((speed / most * 8.0) as usize).min(7)];
        let line = speeds.iter().map(|speed| match speed {
            Some(speed) if *speed > 0.0 => level(*speed),
            _ => ' ',
        });
        let mut marks = vec![' '; COLUMNS];
        for step in &self.steps {
            let mark = match step.what {
                What::Enable => 'e',
                What::Sweep => 's',
                What::Get => 'g',
                What::Clear => 'c',
                What::Disable => 'd',
                What::Before => continue,
            };
            marks[column(step.from_ms)] = mark;
        }
        let marks: String = marks.into_iter().collect();
        Some((line.collect(), marks.trim_end().to_owned()))
    }
}

impl Display for Report {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Self { settings, .. } = self;
        writeln!(f, "{}", settings.line())?;
        writeln!(
            f,
            "\nstep             ms    Mstores/s   worst wait us     faults       fast      exits  flushes    huge  dirty pages"
        )?;
        let blocks = settings.memory_bytes() / BLOCK_BYTES;
        for step in &self.steps {
            let name = match step.what {
                What::Sweep | What::Get | What::Clear => format!("{} {}", step.what, step.pass),
                _ => step.what.to_string(),
            };
            let Counts {
                faults,
                faults_fast,
                exits,
                flushes,
                huge_blocks,
            } = step.counts;
            let huge = huge_blocks.map(|huge| huge.min(blocks) * 100 / blocks);
            writeln!(
                f,
                "{name:<10} {:>8.2} {:>12.3} {:>15.1} {:>10} {:>10} {:>10} {:>8} {:>5} % {:>12}",
                step.ms,
                step.speed.stores_per_s / 1e6,
                step.speed.worst_wait_us,
                known(faults),
                known(faults_fast),
                known(exits),
                known(flushes),
                known(huge),
                step.dirty_pages
                    .map_or(String::new(), |pages| pages.to_string()),
            )?;
        }
        if let Some((line, marks)) = self.drawing() {
            writeln!(f, "\n{line}  stores per second")?;
            writeln!(f, "{marks}")?;
            writeln!(f, "e enable  s sweep  g get  c clear  d disable")?;
        }
        if self.steps.iter().any(|step| step.counts.faults.is_none()) {
            writeln!(f, "-  KVM of this host does not count it")?;
        }
        writeln!(
            f,
            "\nWhile logged: {:.1} % of the speed before; longest wait {:.1} ms; {} pages written in a sweep.",
            self.speed_kept * 100.0,
            self.worst_wait_us / 1000.0,
            self.pages_written,
        )
    }
}

impl Settings {
    /// All counters in one line.
    pub(crate) fn line(&self) -> String {
        let mut line = format!(
            "{} vCPUs x {} MiB, backing {}, a store every {} KiB, protect {}",
            self.vcpus, self.slice_mib, self.backing, self.stride_kib, self.protect,
        );
        if let Some(mib) = self.clear_chunk_mib {
            line.push_str(&format!(", clear {mib} MiB at a time"));
        }
        if self.clear_pause_us > 0 {
            line.push_str(&format!(", pause {} us", self.clear_pause_us));
        }
        if let Some(kib) = self.eager_split_kib {
            line.push_str(&format!(", split {kib} KiB at a time"));
        }
        line
    }
}

impl Display for Offer {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let yes_no = |value| if value { "yes" } else { "no" };
        let eager = match &self.eager_split {
            EagerSplit::Parameter { on: true } => "on, for all VMs (kvm.eager_page_split)".into(),
            EagerSplit::Parameter { on: false } => {
                "off: echo Y > /sys/module/kvm/parameters/eager_page_split".into()
            }
            EagerSplit::Chunk { sizes_kib } => format!("by chunks of {sizes_kib:?} KiB"),
            EagerSplit::Unknown => "unknown".into(),
        };
        writeln!(
            f,
            "kernel {}; manual protect {}, log begins full {}, eager split {eager}\n\
             PML {}, dirty ring {}, counters {}, at most {} vCPUs",
            self.kernel,
            yes_no(self.manual),
            yes_no(self.initially_set),
            self.pml.map_or("none", yes_no),
            yes_no(self.ring),
            yes_no(self.counters),
            self.vcpus_max,
        )
    }
}

fn known(count: Option<u64>) -> String {
    count.map_or("-".into(), |count| count.to_string())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A report with a given speed before logging, and one step.
    pub(crate) fn report(
        settings: Settings,
        before: f64,
        logged: f64,
        worst_wait_us: f64,
    ) -> Report {
        let step = |what, from_ms, stores_per_s, worst_wait_us| Step {
            what,
            pass: 1,
            from_ms,
            ms: 100.0,
            speed: Speed {
                stores_per_s,
                worst_wait_us,
            },
            counts: Counts::default(),
            dirty_pages: None,
        };
        let steps = vec![
            step(What::Before, 0.0, before, 1.0),
            step(What::Enable, 100.0, logged, worst_wait_us),
            step(What::Disable, 200.0, 0.0, 1e9),
        ];
        let sample = |until_ms, stores| Sample {
            until_ms,
            for_ms: 100.0,
            stores,
            worst_wait_us: 0.0,
        };
        let samples = vec![sample(100.0, before as u64), sample(200.0, logged as u64)];
        Report::new(settings, offer(), steps, samples)
    }

    pub(crate) fn offer() -> Offer {
        Offer {
            kernel: "6.12".into(),
            manual: true,
            initially_set: true,
            eager_split: EagerSplit::Parameter { on: false },
            pml: None,
            ring: true,
            counters: true,
            vcpus_max: 8,
        }
    }

    #[test]
    fn only_what_was_logged_counts() {
        let report = report(Settings::default(), 200.0, 50.0, 9000.0);
        assert_eq!(report.speed_kept, 0.25);
        assert_eq!(report.worst_wait_us, 9000.0);
        let text = report.to_string();
        assert!(
            text.contains("25.0 % of the speed before; longest wait 9.0 ms"),
            "{text}"
        );
        assert!(text.contains("\n████"), "{text}");
    }

    #[test]
    fn counts_are_differences_and_what_is_not_counted_is_unknown() {
        let counters = |faults, fast, huge, giant| {
            let named = [
                ("pf_taken", faults),
                ("pf_fast", fast),
                ("pages_4k", 0),
                ("pages_2m", huge),
                ("pages_1g", giant),
            ];
            Counters::from(named.map(|(name, value)| (name.to_owned(), value)))
        };
        let counts = Counts::between(&counters(10, 1, 5, 1), &counters(30, 1, 3, 1));
        assert_eq!((counts.faults, counts.faults_fast), (Some(20), Some(0)));
        assert_eq!(counts.huge_blocks, Some(515));
        assert_eq!(counts.flushes, None);
        let nothing = counters(0, 0, 0, 0);
        assert_eq!(Counts::between(&nothing, &nothing), Counts::default());
    }
}
