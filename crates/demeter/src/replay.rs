//! `demeter replay`: replays an agent's recording.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::PathBuf;

use anyhow::{Result, bail};
use demeter_guest::recording::{self, Decision, Reader, Replayed};
use demeter_policy::engine::{Direction, Request};
use demeter_policy::{Block, MIB, Pid, RankedRange, Relocation};
use serde_json::{Value, json};

use crate::address_heat::{AddressHeat, HeatRange};
use crate::output;

const NS_PER_MS: u64 = 1_000_000;

/// Size of the output buffer, bytes.
const OUTPUT_BYTES: usize = 1 << 16;

/// Shows what an agent decided, and checks that this version of the policy decides the same.
///
/// `demeter guest --record FILE` makes recordings. Each of its two files can be replayed by itself; FILE.1 is the older
/// one. The exit code is 1 if a decision differs or the file is damaged.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  demeter replay agent.rec              the epochs in which something moved
  demeter replay agent.rec --all        every epoch
  demeter replay agent.rec --heat       address space over time
  demeter replay agent.rec --json | jq 'select(.decision == \"move\")'")]
pub struct Args {
    /// The recording
    recording: PathBuf,
    /// Also show epochs in which nothing moved
    #[arg(long)]
    all: bool,
    /// Print each decision as one line of JSON, then one line with the result
    #[arg(long, conflicts_with = "all")]
    json: bool,
    /// Draw the heat of each process's addresses over time
    #[arg(long, conflicts_with_all = ["all", "json"])]
    heat: bool,
}

impl Args {
    /// The arguments of `demeter replay RECORDING --heat`.
    pub fn heat(recording: PathBuf) -> Self {
        Self {
            recording,
            all: false,
            json: false,
            heat: true,
        }
    }
}

/// Replays and prints.
pub fn replay(args: &Args) -> Result<()> {
    let mut reader = Reader::open(&args.recording)?;
    let mut out = Output::default();
    let header = reader.header();
    if !args.json {
        out.text = format!(
            "recorded by demeter {} with tracker {}; tiers, the fastest first:",
            header.agent, header.tracker
        );
        for tier in &header.tiers {
            let nodes: Vec<String> = tier.nodes.iter().map(u32::to_string).collect();
            out.text += &format!(" node {} ({} MiB)", nodes.join(","), tier.bytes / MIB);
        }
        out.text.push('\n');
    }
    let epoch_s = header.tuning.epoch().as_secs_f64();
    let mut epoch = Epoch::default();
    let mut heats = BTreeMap::new();
    let replayed = recording::replay(&mut reader, &mut |decision| {
        if args.json {
            out.line(&line_of(decision).to_string());
        } else if args.heat {
            look(&mut heats, decision, epoch_s);
        } else if let Some(line) = epoch.add(decision, args.all) {
            out.line(&line);
        }
    });
    for (pid, heat) in &heats {
        out.line(&format!("process {pid}: {}", heat.text()));
    }
    out.flush()?;
    let replayed = replayed?;
    output::print(match args.json {
        true => format!("{}\n", summary(&replayed)),
        false => as_text(&replayed),
    })?;
    match replayed.divergence {
        Some(d) => bail!(
            "{}, byte {}, epoch {}: the policy decides otherwise: recorded was {}, now it is {}",
            args.recording.display(),
            d.offset,
            d.epoch,
            short(&d.recorded),
            short(&d.replayed)
        ),
        None => Ok(()),
    }
}

/// Samples the heat of each process's memory at the end of an epoch.
fn look(heats: &mut BTreeMap<Pid, AddressHeat>, decision: Decision<'_>, epoch_s: f64) {
    if !matches!(decision.request, Request::Sleep { .. }) {
        return;
    }
    let mut ranges: BTreeMap<Pid, Vec<HeatRange>> = BTreeMap::new();
    for ranked in decision.ranking {
        ranges.entry(ranked.pid).or_default().push(heat_of(ranked));
    }
    for (pid, ranges) in ranges {
        let heat = heats.entry(pid).or_default();
        heat.look(f64::from(decision.epoch) * epoch_s, ranges);
    }
}

/// The drawn values of a range.
pub fn heat_of(ranked: &RankedRange) -> HeatRange {
    HeatRange {
        start: ranked.range.start().0,
        end: ranked.range.end().0,
        heat: ranked.density(),
    }
}

/// Buffered text for standard output.
#[derive(Default)]
struct Output {
    text: String,
    /// The first error; further output is dropped.
    error: Option<anyhow::Error>,
}

impl Output {
    fn line(&mut self, line: &str) {
        self.text.push_str(line);
        self.text.push('\n');
        if self.text.len() >= OUTPUT_BYTES && self.error.is_none() {
            self.error = output::print(&self.text).err();
            self.text.clear();
        }
    }

    fn flush(self) -> Result<()> {
        match self.error {
            Some(error) => Err(error),
            None => output::print(&self.text),
        }
    }
}

/// Sums of one epoch's requests.
#[derive(Default)]
struct Epoch {
    looked_up: usize,
    nodes_read: usize,
    promoted: Moved,
    demoted: Moved,
    collapsed: Moved,
}

#[derive(Default)]
struct Moved {
    blocks: usize,
    bytes: u64,
}

impl Moved {
    fn add(&mut self, blocks: &[Relocation]) {
        self.blocks += blocks.len();
        self.bytes += blocks.iter().map(|r| r.bytes.0).sum::<u64>();
    }
}

impl Epoch {
    /// Adds a decision. Returns the epoch's line with its last decision.
    fn add(&mut self, decision: Decision<'_>, all: bool) -> Option<String> {
        match decision.request {
            Request::LookUp { blocks, .. } => self.looked_up += blocks.len(),
            Request::ReadNodes => self.nodes_read += 1,
            Request::Move {
                direction, blocks, ..
            } => {
                let moved = match direction {
                    Direction::Promotion => &mut self.promoted,
                    Direction::Demotion => &mut self.demoted,
                };
                moved.add(blocks);
            }
            Request::Collapse { blocks, .. } => self.collapsed.add(blocks),
            Request::Sleep { epochs } => return self.end(&decision, epochs, all),
            Request::Refresh | Request::Samples { .. } | Request::Reclaim => {}
        }
        None
    }

    fn end(&mut self, decision: &Decision<'_>, sleep: u32, all: bool) -> Option<String> {
        let Self {
            looked_up,
            nodes_read,
            promoted,
            demoted,
            collapsed,
        } = std::mem::take(self);
        if !all && promoted.blocks + demoted.blocks + collapsed.blocks == 0 {
            return None;
        }
        let mut line = format!("epoch {:6}", decision.epoch);
        let done = [
            ("promote", promoted),
            ("demote", demoted),
            ("collapse", collapsed),
        ];
        for (what, moved) in done {
            if moved.blocks > 0 {
                let mib = moved.bytes as f64 / MIB as f64;
                // Writing to a String cannot fail.
                let _ = write!(line, "  {what} {} blocks, {mib:.1} MiB;", moved.blocks);
            }
        }
        let _ = write!(
            line,
            "  looked up {looked_up} blocks, read the nodes {nodes_read} times, sleep {sleep}"
        );
        let balance = decision.balance;
        let _ = write!(
            line,
            ";  so far moves took {} ms and saved {} ms{}",
            balance.cost_ns / NS_PER_MS,
            balance.benefit_ns / NS_PER_MS as i64,
            if balance.is_resting { ", resting" } else { "" }
        );
        Some(line)
    }
}

/// A decision as JSON.
fn line_of(decision: Decision<'_>) -> Value {
    let address = |block: Block| format!("{:#x}", block.start().0);
    let mut line = json!({ "epoch": decision.epoch, "decision": decision.request.name() });
    let blocks_of = |blocks: &[Relocation]| {
        let block = |r: &Relocation| json!({ "address": address(r.block), "bytes": r.bytes.0 });
        blocks.iter().map(block).collect::<Vec<_>>()
    };
    let more = match decision.request {
        Request::LookUp { pid, blocks } => json!({
            "pid": pid.0,
            "blocks": blocks.iter().map(|&b| address(b)).collect::<Vec<_>>(),
        }),
        Request::Move {
            pid,
            level,
            direction,
            blocks,
        } => json!({
            "pid": pid.0,
            "boundary_below_tier": level.index(),
            "to": match direction {
                Direction::Promotion => "fast",
                Direction::Demotion => "slow",
            },
            "blocks": blocks_of(blocks),
        }),
        Request::Collapse { pid, blocks } => json!({ "pid": pid.0, "blocks": blocks_of(blocks) }),
        Request::Sleep { epochs } => json!({
            "epochs": epochs,
            "moves_cost_ms": decision.balance.cost_ns / NS_PER_MS,
            "moves_benefit_ms": decision.balance.benefit_ns / NS_PER_MS as i64,
        }),
        _ => json!({}),
    };
    if let (Some(line), Value::Object(more)) = (line.as_object_mut(), more) {
        line.extend(more);
    }
    line
}

/// The last line of JSON output.
fn summary(replayed: &Replayed) -> Value {
    let divergence = replayed.divergence.as_ref().map(|d| {
        json!({
            "epoch": d.epoch, "offset": d.offset, "recorded": d.recorded, "replayed": d.replayed,
        })
    });
    json!({
        "decision": "end",
        "first_epoch": replayed.first_epoch,
        "last_epoch": replayed.last_epoch,
        "decisions": replayed.decisions,
        "samples": replayed.figures.samples,
        "promoted_bytes": replayed.figures.promoted.0,
        "demoted_bytes": replayed.figures.demoted.0,
        "is_ended": replayed.is_ended,
        "divergence": divergence,
    })
}

/// The summary as text.
fn as_text(replayed: &Replayed) -> String {
    let mut text = format!(
        "epochs {} to {}: {} decisions, {}\n",
        replayed.first_epoch,
        replayed.last_epoch,
        replayed.decisions,
        match &replayed.divergence {
            Some(_) => "the last one differs",
            None => "all as recorded",
        }
    );
    let f = replayed.figures;
    let _ = writeln!(
        text,
        "since the agent's start: {} samples, {} MiB promoted, {} MiB demoted",
        f.samples,
        f.promoted.0 / MIB,
        f.demoted.0 / MIB
    );
    if replayed.divergence.is_none() && !replayed.is_ended {
        text.push_str("the recording has no end: the agent still writes it, or was killed\n");
    }
    text
}

/// A decision, shortened to a line.
fn short(text: &str) -> String {
    const CHARS: usize = 120;
    match text.char_indices().nth(CHARS) {
        Some((at, _)) => format!("{}...", &text[..at]),
        None => text.into(),
    }
}
