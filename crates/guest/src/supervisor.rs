//! Runs the agent and the balloon's relay, from configuration to clean end.
//!
//! The relay outlives the agent: an agent that fails, or whose processes have ended, must not cut the balloon's link to
//! the host. Where there is a relay, a failed agent is restarted after a pause. An agent whose tracker another process
//! uses is restarted, too, and so is one whose tracker has a successor.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use demeter_linux::damon::{self, Owner};
use demeter_policy::{NodeId, Pid};

use crate::agent::{self, Agent, AgentError, Checked, Control, Effects, Ended};
use crate::balloon::link::{BesideAgent, LinkError, RunningRelay};
use crate::config::{BalloonMode, Config};
use crate::latency::{self, LoadProbe};
use crate::nodes::TierOrder;
use crate::pages::LivePages;
use crate::probe::{self, Advice};
use crate::server::{Server, ServerError};
use crate::status::StatusCell;
use crate::targets::TargetFinder;
use crate::tracker::{Choice, PassedOver, Settings, TrackerError, choose};

/// Pause before a failed agent is restarted. Each further failure doubles it, up to a limit. There is none where another
/// tracker takes the place of one that failed.
const AGAIN: Duration = Duration::from_secs(5);
const AGAIN_MAX: Duration = Duration::from_secs(60);

/// Number of targets that are listed at the start.
const NAMED: usize = 8;

/// Nice level of the agent. Its bursts are short and bounded by the rate limit, and the workload is slow while hot
/// memory waits to be moved.
const NICE: libc::c_int = -10;

/// An error that ends the command.
#[derive(Debug, thiserror::Error)]
pub enum SupervisorError {
    /// The agent cannot start, or failed without a relay.
    #[error(transparent)]
    Agent(#[from] AgentError),
    /// The system refuses a call that the agent needs.
    #[error("{what}; {hint}", what = .0.what, hint = .0.hint)]
    Refused(Advice),
    /// No target process may be inspected.
    #[error(
        "cannot look at the memory of {0} and of the other named processes; run as root, or grant CAP_SYS_PTRACE"
    )]
    Unreadable(String),
    /// Status and metrics cannot be served.
    #[error(transparent)]
    Server(#[from] ServerError),
    /// The relay was the only task, and it cannot start.
    #[error(transparent)]
    Link(#[from] LinkError),
}

/// Runs the agent on the system below `root`, with a relay if configured and possible.
///
/// It runs until [`Control::Stop`] or until its processes have ended. Server and relay send commands to `controls`.
/// `say` gets one line at a time: the agent's setup and its problems, at any log level.
///
/// # Errors
/// Invalid settings, before anything is set up. Later, errors that end the agent without a relay.
pub fn run(
    root: &Path,
    config: &Config,
    controls: Sender<Control>,
    received: &Receiver<Control>,
    say: &dyn Fn(&str),
) -> Result<(), SupervisorError> {
    let checked = agent::check(root, config, latency::measure)?;
    warn_of_missing(root, say)?;
    let status = StatusCell::default();
    for (node, ns) in &checked.measured_ns {
        tracing::info!("a load from node {node} takes {ns} ns");
    }
    introduce(root, &checked.finder, &checked.order, say)?;
    let Checked {
        finder,
        mut measured_ns,
        ..
    } = checked;
    let link = match config.balloon {
        BalloonMode::Auto => link(root, &status, &controls),
        BalloonMode::Off => None,
    };
    let start = |measured_ns: &_| start(root, config, &finder, measured_ns, &status, say);
    let mut agent = match start(&measured_ns) {
        Err(AgentError::Tracker(error)) if waits_for(config, &error, link.is_some()) => {
            say(&waiting(&error));
            status.update(|s| s.last_error = Some(error.to_string()));
            None
        }
        agent => Some(agent?),
    };
    let _server = Server::start(&config.socket, config.listen, status.clone(), controls)?;
    let goes_on = |error: &AgentError| link.is_some() || error.is_temporary();
    loop {
        let again_in = match agent {
            None => Some(AGAIN),
            Some(mut agent) => {
                let ended = agent.run(received);
                drop(agent);
                let last = serde_json::to_string(&status.get()).unwrap_or_default();
                tracing::info!("at the end: {last}");
                match ended {
                    Ok(Ended::Stopped) => {
                        tracing::info!("stopped; memory stays as it is");
                        return Ok(());
                    }
                    Ok(Ended::NothingLeft) => {
                        tracing::info!("all target processes have ended");
                        if link.is_none() {
                            return Ok(());
                        }
                        None
                    }
                    Ok(Ended::OtherTiers) => {
                        tracing::info!("the machine has other tiers now; starting anew");
                        let found = agent::find_tiers(root, config, latency::measure);
                        let order;
                        (order, measured_ns) = found.map_err(AgentError::from)?;
                        introduce(root, &finder, &order, say)?;
                        Some(Duration::ZERO)
                    }
                    Err(error) if goes_on(&error) => {
                        tracing::error!("{error}");
                        status.update(|s| s.last_error = Some(error.to_string()));
                        Some(match error.has_successor() {
                            true => Duration::ZERO,
                            false => AGAIN,
                        })
                    }
                    Err(error) => return Err(error.into()),
                }
            }
        };
        agent = await_next(received, again_in, || start(&measured_ns), goes_on)?;
        if agent.is_none() {
            return Ok(());
        }
    }
}

/// Warns of what the machine lacks; refuses to start where the agent could do nothing.
fn warn_of_missing(root: &Path, say: &dyn Fn(&str)) -> Result<(), SupervisorError> {
    for advice in probe::missing(root) {
        if advice.blocks {
            return Err(SupervisorError::Refused(advice));
        }
        say(&format!("warning: {}; {}", advice.what, advice.hint));
    }
    Ok(())
}

/// Whether the agent waits for a tracker: its error may pass, or the host sizes this VM meanwhile.
fn waits_for(config: &Config, error: &TrackerError, has_link: bool) -> bool {
    config.tracker == Choice::Auto && (error.is_temporary() || has_link)
}

/// The line about a start without a tracker.
fn waiting(error: &TrackerError) -> String {
    match error.is_temporary() {
        true => format!("waiting for a tracker: {error}"),
        false => format!("nothing is moved, but the host can size this VM: {error}"),
    }
}

/// Runs only the relay between host and balloon driver, until [`Control::Stop`].
///
/// # Errors
/// The port does not exist or cannot be used.
pub fn relay(root: &Path, received: &Receiver<Control>) -> Result<(), LinkError> {
    let _link = RunningRelay::start(root, None)?;
    tracing::info!("relaying between the host and the balloon driver");
    // The start function does nothing and cannot fail.
    let _ = await_next(received, None, || Ok(()), |_| true);
    Ok(())
}

/// Cleans up after a killed agent in the kernel, and reports it. Does nothing if another process uses DAMON or the
/// system has no DAMON.
pub fn clean_up(root: &Path, say: &dyn Fn(&str)) {
    match damon::clean_up(root) {
        Ok(undone) => undone.into_iter().for_each(say),
        Err(error) => tracing::info!("nothing to clean up: {error}"),
    }
}

/// Waits until the agent can be restarted or should end (`None`). Without a pause it is never restarted.
///
/// An error that cannot pass ends the wait.
fn await_next<A>(
    received: &Receiver<Control>,
    again_in: Option<Duration>,
    mut start: impl FnMut() -> Result<A, AgentError>,
    goes_on: impl Fn(&AgentError) -> bool,
) -> Result<Option<A>, AgentError> {
    let due_in = |pause: Duration| Instant::now() + pause;
    let mut again_in = again_in;
    let mut due = again_in.map(due_in);
    let mut said = String::new();
    loop {
        let heard = match due {
            Some(due) => received.recv_timeout(due.saturating_duration_since(Instant::now())),
            None => received.recv().map_err(|_| RecvTimeoutError::Disconnected),
        };
        match heard {
            Ok(Control::Stop) | Err(RecvTimeoutError::Disconnected) => {
                tracing::info!("stopped; the balloon keeps its memory");
                return Ok(None);
            }
            // There is no agent to do this; the relay lets the kernel reclaim.
            Ok(Control::Pause | Control::Resume | Control::MakeRoom(_) | Control::Look) => {}
            Err(RecvTimeoutError::Timeout) => match start() {
                Ok(agent) => return Ok(Some(agent)),
                Err(error) if goes_on(&error) => {
                    let error = error.to_string();
                    if error != said {
                        tracing::warn!("{error}");
                        said = error;
                    }
                    again_in = again_in.map(after);
                    due = again_in.map(due_in);
                }
                Err(error) => return Err(error),
            },
        }
    }
}

/// The pause after one that was too short.
fn after(pause: Duration) -> Duration {
    match pause {
        Duration::ZERO => AGAIN,
        pause => (pause * 2).min(AGAIN_MAX),
    }
}

/// Starts an agent with the best tracker available now.
fn start(
    root: &Path,
    config: &Config,
    finder: &TargetFinder,
    measured_ns: &BTreeMap<NodeId, u32>,
    status: &StatusCell,
    say: &dyn Fn(&str),
) -> Result<Agent, AgentError> {
    let slowest_ns = measured_ns.values().copied().max().unwrap_or_default();
    let settings = Settings {
        root: root.to_owned(),
        period: config.tuning.loads_per_sample(slowest_ns),
        latency_threshold_ns: config.tuning.latency_threshold_ns,
        epoch: config.tuning.epoch(),
        cpu_percent: config.tracker_cpu_percent,
        take_damon: config.take_damon,
    };
    let owner = Owner::in_kernel(root);
    let (tracker, passed_over) = choose(config.tracker, &settings)?;
    name_tracker(config, tracker.name(), &passed_over, say);
    if owner == Some(Owner::Statistic) && tracker.name() == "damon" {
        say("  DAMON_STAT is off while the agent uses DAMON, and is turned on again at its end");
    }
    status.update(|s| s.passed_over = passed_over.iter().map(|p| p.why.to_string()).collect());
    raise_priority();
    let effects = Effects {
        finder: finder.clone(),
        tracker,
        pages: Box::new(LivePages::default()),
        load: LoadProbe::on(measured_ns),
        measured_ns: measured_ns.clone(),
        cpus: std::thread::available_parallelism().map_or(1, |n| n.get() as u32),
    };
    Agent::new(root.to_owned(), config.clone(), effects, status.clone())
}

/// Reports the tracker, why better ones were not used, and its CPU limit.
fn name_tracker(config: &Config, tracker: &str, passed_over: &[PassedOver], say: &dyn Fn(&str)) {
    let bound = match tracker {
        "damon" => format!(
            " (accessed bits, looked at by the kernel's DAMON, for at most {} % of one CPU for each sixteen)",
            config.tracker_cpu_percent
        ),
        _ => String::new(),
    };
    say(&format!("tracker: {tracker}{bound}"));
    for passed in passed_over {
        say(&format!("  not {}: {}", passed.tracker, passed.why));
    }
}

/// Reports the agent's setup and problems.
fn introduce(
    root: &Path,
    finder: &TargetFinder,
    order: &TierOrder,
    say: &dyn Fn(&str),
) -> Result<(), SupervisorError> {
    say(&format!(
        "memory: tiers {} (nodes by tier, the fastest first), {}",
        order.tiers,
        order
            .decided_by
            .iter()
            .map(ToString::to_string)
            .collect::<Vec<_>>()
            .join(", ")
    ));
    for (node, why) in &order.left_alone {
        say(&format!("  not node {node}: {why}"));
    }
    for contradiction in &order.contradictions {
        say(&format!("warning: {contradiction}"));
    }
    let targets = finder.clone().find().map_err(AgentError::from)?;
    let names = targets.iter().take(NAMED);
    let names: Vec<_> = names.map(|t| format!("{} ({})", t.pid, t.comm)).collect();
    say(&match targets.len() {
        0 => "looking after: nothing yet".into(),
        count if count > NAMED => format!(
            "looking after: {} and {} more",
            names.join(", "),
            count - NAMED
        ),
        _ => format!("looking after: {}", names.join(", ")),
    });
    let unreadable: Vec<_> = targets
        .iter()
        .filter(|t| !is_readable(root, t.pid))
        .collect();
    if let Some(first) = unreadable.first() {
        let first = format!("{} ({})", first.pid, first.comm);
        if unreadable.len() == targets.len() {
            return Err(SupervisorError::Unreadable(first));
        }
        say(&format!(
            "warning: {} of {} processes cannot be looked at, among them {first}; grant CAP_SYS_PTRACE",
            unreadable.len(),
            targets.len()
        ));
    }
    if let Some(option) = finder.hidden() {
        say(&format!(
            "warning: /proc is mounted with {option} and shows no process of others; run as root, grant \
             CAP_SYS_PTRACE, or add the agent to the group of the mount's gid="
        ));
    }
    if probe::numa_balancing(root).is_some_and(|mode| mode != 0) {
        let (what, hint) = probe::BALANCING_ADVICE;
        say(&format!("warning: {what}; {hint}"));
    }
    Ok(())
}

/// Whether the kernel shows a process's mappings. A process that has ended counts as readable.
fn is_readable(root: &Path, pid: Pid) -> bool {
    let opened = File::open(root.join(format!("proc/{pid}/maps")));
    !opened.is_err_and(|error| error.kind() == io::ErrorKind::PermissionDenied)
}

/// Starts the relay. If it cannot start, the agent runs without it.
fn link(root: &Path, status: &StatusCell, controls: &Sender<Control>) -> Option<RunningRelay> {
    let agent = BesideAgent {
        status: status.clone(),
        controls: controls.clone(),
    };
    let started = RunningRelay::start(root, Some(agent));
    started
        .inspect_err(|error| tracing::info!("no balloon: {error}"))
        .ok()
}

/// Raises this process's priority, if permitted.
fn raise_priority() {
    // SAFETY: setpriority takes numbers only.
    let refused = unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, NICE) } != 0;
    if refused {
        tracing::info!(
            "no precedence over other processes: {}",
            io::Error::last_os_error()
        );
    }
}

#[cfg(test)]
mod refusals;

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::path::PathBuf;
    use std::sync::mpsc;

    use demeter_policy::ByteCount;

    use super::*;
    use crate::config::ConfigError;

    /// DAMON's files with a running kdamond; its update interval identifies its owner.
    fn kdamond(update_us: &str) -> (tempfile::TempDir, PathBuf) {
        let root = tempfile::tempdir().unwrap();
        let admin = root.path().join("sys/kernel/mm/damon/admin/kdamonds");
        for (file, text) in [
            ("nr_kdamonds", "1\n"),
            ("0/state", "on\n"),
            ("0/contexts/nr_contexts", "1\n"),
            ("0/contexts/0/avail_operations", "vaddr\nfvaddr\npaddr\n"),
            ("0/contexts/0/operations", "vaddr\n"),
            (
                "0/contexts/0/monitoring_attrs/intervals/update_us",
                update_us,
            ),
        ] {
            let path = admin.join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        (root, admin)
    }

    #[test]
    fn cleaning_up_ends_our_kdamond_and_nobody_elses() {
        // The agent's interval, and DAMON's default.
        for (update_us, want) in [("1000003\n", ["0", "off"]), ("60000000\n", ["1", "on"])] {
            let (root, admin) = kdamond(update_us);
            let said = RefCell::new(vec![]);
            clean_up(root.path(), &|line| said.borrow_mut().push(line.to_owned()));
            assert_eq!(said.borrow().len(), usize::from(want[0] == "0"));
            let found = ["nr_kdamonds", "0/state"]
                .map(|file| std::fs::read_to_string(admin.join(file)).unwrap());
            assert_eq!(found.each_ref().map(|text| text.trim()), want);
        }
        // Without DAMON there is nothing to clean up.
        clean_up(tempfile::tempdir().unwrap().path(), &|line| {
            panic!("{line}")
        });
    }

    #[test]
    fn without_a_tracker_the_host_can_still_size_the_vm() {
        let error = TrackerError::NoneWorks(vec![]);
        let auto = Config::default();
        assert!(waits_for(&auto, &error, true) && !waits_for(&auto, &error, false));
        assert!(waiting(&error).starts_with("nothing is moved, but the host can size this VM: "));
        // A tracker that is named must work.
        let named = Config {
            tracker: Choice::Damon,
            ..Config::default()
        };
        assert!(!waits_for(&named, &error, true));
    }

    #[test]
    fn pauses_grow_and_end_every_rush() {
        assert_eq!(after(Duration::ZERO), AGAIN);
        assert_eq!(after(AGAIN), 2 * AGAIN);
        assert_eq!(after(AGAIN_MAX), AGAIN_MAX);
    }

    #[test]
    fn the_relay_goes_on_until_it_is_stopped_or_an_agent_runs_again() {
        let (controls, received) = mpsc::channel();
        let pause = Some(Duration::from_millis(1));
        let mut tries = 0;
        let mut start = || {
            tries += 1;
            match tries {
                1 | 2 => Err(ConfigError::Targets.into()),
                _ => Ok("agent"),
            }
        };
        let agent = await_next(&received, pause, &mut start, |_| true);
        assert_eq!((agent.unwrap(), tries), (Some("agent"), 3));

        for control in [
            Control::MakeRoom(ByteCount(1)),
            Control::Pause,
            Control::Stop,
            Control::Resume,
        ] {
            controls.send(control).unwrap();
        }
        assert_eq!(
            await_next(&received, None, || Ok(()), |_| true).unwrap(),
            None
        );
        assert_eq!(
            received.try_recv(),
            Ok(Control::Resume),
            "it stopped at Stop"
        );
        // An error that cannot pass ends the wait.
        let failed = await_next(
            &received,
            pause,
            || Err::<(), _>(ConfigError::Targets.into()),
            AgentError::is_temporary,
        );
        assert!(matches!(failed, Err(AgentError::Config(_))));
        drop(controls);
        assert_eq!(
            await_next(&received, None, || Ok(()), |_| true).unwrap(),
            None
        );
    }
}
