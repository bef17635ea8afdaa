//! Records a trace of a scenario's program, for the simulator, which runs no programs.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, bail};
use demeter_lab::{Launch, Recorder};
use demeter_scenario::{Scenario, Workload};
use demeter_sim::trace::Writer;

use super::record::{last_words, write};
use crate::output;

/// Number of recorded accesses, which are replayed repeatedly.
const ACCESSES: u64 = 100_000_000;

/// Records the program of a scenario without a trace, and sets the trace. Recordings are cached.
pub fn stand_in(scenario: &mut Scenario, stop: &AtomicBool) -> Result<()> {
    let Workload::Program(programs) = &scenario.workload else {
        return Ok(());
    };
    // The simulator rejects cgroups in any case.
    if programs.trace.is_some() || programs.have_cgroups() {
        return Ok(());
    }
    let recorder = Recorder::from_env()?;
    let work = tempfile::Builder::new()
        .prefix("demeter-trace-")
        .tempdir()
        .context("cannot create a folder for the program")?;
    let launch = recorder.launch(scenario, programs, work.path())?;
    let kept = recorder.kept_at(scenario, &launch)?;
    if !kept.exists() {
        record(&recorder, &launch, &kept, stop)
            .with_context(|| format!("cannot record program {}", launch.name))?;
    }
    output::say(format_args!(
        "the simulator replays what {} did once: {}",
        launch.name,
        kept.display()
    ));
    if let Workload::Program(programs) = &mut scenario.workload {
        programs.trace = Some(kept);
    }
    Ok(())
}

fn record(recorder: &Recorder, launch: &Launch, kept: &Path, stop: &AtomicBool) -> Result<()> {
    output::say(format_args!(
        "recording {}: {} million accesses from when it is ready, at a tenth of its speed or less",
        launch.name,
        ACCESSES / 1_000_000
    ));
    std::fs::create_dir_all(&recorder.lab.cache).context("cannot create the cache")?;
    let writer = Writer::create(kept)?;
    let recorded = write(recorder.start_launch(launch)?, writer, ACCESSES, stop)?;
    if stop.load(Ordering::Relaxed) {
        return Err(demeter_lab::Error::Interrupted.into());
    }
    if !recorded.is_cut && !recorded.end.status.success() {
        // The trace of a failed program is not the scenario's workload.
        std::fs::remove_file(kept).context("cannot remove its trace")?;
        bail!("{}{}", recorded.end.status, last_words(&recorded.end));
    }
    output::say(super::written(kept, recorded.written));
    Ok(())
}
