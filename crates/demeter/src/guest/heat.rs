//! `demeter guest heat`: draws the heat of each process's addresses over time.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use demeter_guest::heat::{Heat, ProcessHeat};

use super::client::Client;
use crate::address_heat::{AddressHeat, HeatRange};
use crate::{output, replay, signals, simulated};

/// Sampling interval: once per epoch by default.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// Draws the heat of each process's addresses over time, from a running agent, a recording or a simulated run.
///
/// A line is a moment, and a column a part of the memory that was mapped at any time. Each shade is twice as hot as the
/// one before.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  demeter guest heat                        of the agent that runs, for half a minute
  demeter guest heat --seconds 600          for ten minutes; Ctrl-C draws what there is
  demeter guest heat --recording agent.rec  of a recording (demeter guest --record)
  demeter guest heat --scenario scenarios/gups-shift.toml  of a simulated run
  demeter guest heat --json | jq .          each look as one line of JSON")]
pub struct Args {
    #[command(flatten)]
    client: Client,
    /// Time to observe the agent, seconds
    #[arg(long, value_name = "S", default_value_t = 30)]
    seconds: u32,
    /// Draw a recording instead
    #[arg(long, value_name = "FILE", conflicts_with_all = ["socket", "seconds", "json"])]
    recording: Option<PathBuf>,
    /// Run this scenario under demeter on the simulator, and draw its agent's heat (package
    /// demeter-lab)
    #[arg(long, value_name = "FILE", conflicts_with_all = ["socket", "seconds", "json", "recording"])]
    scenario: Option<PathBuf>,
    /// Print each sample as one line of JSON, as it comes, instead of drawing
    #[arg(long)]
    json: bool,
}

/// Draws the heat.
pub fn heat(args: &Args) -> anyhow::Result<()> {
    if let Some(recording) = &args.recording {
        return replay::replay(&replay::Args::heat(recording.clone()));
    }
    let stop = signals::stop_flag()?;
    if let Some(scenario) = &args.scenario {
        let mut picture = AddressHeat::default();
        simulated::look(scenario, &stop, |t_s, ranking, _| {
            picture.look(t_s, ranking.iter().map(replay::heat_of));
        })?;
        return output::print(picture.text());
    }
    let mut pictures = Pictures::default();
    let ask = || args.client.get("/v1/heat");
    watch(
        ask,
        args.seconds,
        LOOK_EVERY,
        &stop,
        |t_s, heat| match args.json {
            true => output::print(serde_json::to_string(&heat)? + "\n"),
            false => {
                pictures.look(t_s, &heat);
                Ok(())
            }
        },
    )?;
    match args.json {
        true => Ok(()),
        false => output::print(pictures.text()),
    }
}

/// Asks the agent repeatedly, until the time is over, a signal arrives, or the agent ends after the first answer.
pub(super) fn watch<T>(
    ask: impl Fn() -> anyhow::Result<T>,
    seconds: u32,
    every: Duration,
    stop: &AtomicBool,
    mut seen: impl FnMut(f64, T) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let began = Instant::now();
    let end = began + Duration::from_secs(seconds.into());
    let mut said = began;
    output::say(format_args!(
        "looking for {seconds} s; Ctrl-C ends it sooner"
    ));
    let mut next = began;
    let mut looks = 0;
    while !stop.load(Ordering::Relaxed) && Instant::now() < end {
        match ask() {
            Ok(answer) => seen(began.elapsed().as_secs_f64(), answer)?,
            Err(error) if looks == 0 => return Err(error),
            Err(error) => {
                output::say(format_args!("{error:#}"));
                break;
            }
        }
        looks += 1;
        if said.elapsed() >= output::SAY_EVERY {
            said = Instant::now();
            output::say(format_args!("{} of {seconds} s", began.elapsed().as_secs()));
        }
        // Signals do not interrupt this sleep, which is short.
        next = (next + every).max(Instant::now());
        thread::sleep(next.saturating_duration_since(Instant::now()));
    }
    Ok(())
}

/// A picture for each process.
#[derive(Debug, Default)]
pub struct Pictures(BTreeMap<u32, AddressHeat>);

impl Pictures {
    /// Adds a sample; `t_s` is the time since the first one.
    pub fn look(&mut self, t_s: f64, heat: &Heat) {
        for process in &heat.processes {
            let picture = self.0.entry(process.pid).or_default();
            picture.look(t_s, ranges(process));
        }
    }

    /// The picture of one process, if it was sampled.
    pub fn of(&self, pid: u32) -> Option<&AddressHeat> {
        self.0.get(&pid)
    }

    /// All pictures, one below the other.
    fn text(&self) -> String {
        if self.0.is_empty() {
            return "no process accessed its memory\n".into();
        }
        let pictures = self.0.iter();
        let pictures = pictures.map(|(pid, heat)| format!("process {pid}: {}", heat.text()));
        pictures.collect::<Vec<_>>().join("\n")
    }
}

fn ranges(process: &ProcessHeat) -> impl Iterator<Item = HeatRange> {
    process.ranges.iter().map(|range| HeatRange {
        start: range.start,
        end: range.end,
        heat: range.density(),
    })
}

#[cfg(test)]
mod tests {
    use demeter_guest::heat::RangeHeat;

    use super::*;

    #[test]
    fn each_process_has_its_picture() {
        let process = |pid, samples| ProcessHeat {
            pid,
            ranges: vec![
                RangeHeat {
                    start: 1 << 20,
                    end: 2 << 20,
                    samples,
                    ..RangeHeat::default()
                },
                RangeHeat {
                    start: 2 << 20,
                    end: 3 << 20,
                    ..RangeHeat::default()
                },
            ],
        };
        let mut pictures = Pictures::default();
        assert!(pictures.text().contains("no process"));
        pictures.look(
            0.0,
            &Heat {
                processes: vec![process(7, 5.0), process(8, 0.0)],
                ..Heat::default()
            },
        );
        let text = pictures.text();
        let [seven, eight] = [text.find("process 7"), text.find("process 8")].map(Option::unwrap);
        assert!(text[seven..eight].contains(&format!("|{}{}|", "@".repeat(36), " ".repeat(36))));
        assert!(text[eight..].contains(&format!("|{}|", " ".repeat(72))));
        assert!(pictures.of(9).is_none());
    }
}
