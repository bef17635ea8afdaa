//! An emulator process: start, reports, and guaranteed end.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::emulator::Emulator;
use crate::error::{Error, VmFault};
use crate::link::{GO, KILL_AGENT, LAST_WORDS, LineReader, VmMessage};

/// Interval at which a wait checks the time and the stop flag.
const TICK: Duration = Duration::from_millis(100);

/// Time limit for the emulator to exit after its link has closed or the job has finished.
const END_LIMIT: Duration = Duration::from_secs(15);

/// Maximum silence of a VM in its timed phase, when it reports every second. Even a busy machine stays far below.
const SILENCE_LIMIT: Duration = Duration::from_secs(120);

/// Size of a log's tail that is searched for the cause, bytes.
const TAIL_BYTES: u64 = 16 * 1024;

/// A running emulator. It ends when this is dropped, and with the thread that started it.
#[derive(Debug)]
pub struct VmChild {
    emulator: Emulator,
    link: LineReader<UnixStream>,
    limit: Duration,
    deadline: Instant,
    /// Maximum silence in its timed phase; `None` if seconds of its clock may take any time.
    silence: Option<Duration>,
    /// Deadline of the next report in its timed phase, and the silence that it allows.
    speaks_until: Option<(Instant, Duration)>,
    console_log: PathBuf,
    output_log: PathBuf,
    /// Its last known action, for the message about a time limit.
    doing: String,
}

impl VmChild {
    /// Starts `command` with the link as standard input and its output in `output_log`.
    pub fn start(
        mut command: Command,
        limit: Duration,
        console_log: PathBuf,
        output_log: PathBuf,
    ) -> Result<Self, Error> {
        let (ours, theirs) = UnixStream::pair().map_err(Error::io("create", "a socket"))?;
        let output = File::create(&output_log).map_err(Error::io("create", &output_log))?;
        let errors = output
            .try_clone()
            .map_err(Error::io("duplicate", &output_log))?;
        let program = command.get_program().to_owned();
        command
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(output)
            .stderr(errors)
            // In its own process group, so that Ctrl-C reaches us only, and we end it.
            .process_group(0);
        dies_with_this_thread(&mut command);
        let child = command
            .spawn()
            .map_err(Error::io("start", Path::new(&program)))?;
        // `command` still holds the other end of the link. Without it, their exit ends the stream.
        drop(command);
        Self::new(Emulator::Child(child), ours, limit, console_log, output_log)
    }

    /// A running emulator, with our end of its link.
    pub fn new(
        emulator: Emulator,
        link: UnixStream,
        limit: Duration,
        console_log: PathBuf,
        output_log: PathBuf,
    ) -> Result<Self, Error> {
        link.set_read_timeout(Some(TICK))
            .map_err(Error::io("set up", "a socket"))?;
        Ok(Self {
            emulator,
            link: LineReader::new(link),
            limit,
            deadline: Instant::now() + limit,
            silence: Some(SILENCE_LIMIT),
            speaks_until: None,
            console_log,
            output_log,
            doing: "did not boot".into(),
        })
    }

    /// PID of the emulator.
    pub fn pid(&self) -> u32 {
        self.emulator.pid()
    }

    /// The sender of orders, which let a waiting VM continue.
    pub fn orders(&self) -> Result<Orders, Error> {
        let link = self.link.source().try_clone();
        Ok(Orders(link.map_err(Error::io("duplicate", "a socket"))?))
    }

    /// Allows any silence: its clock is the model's, and a second of it takes long on a busy host. Its time limit stays.
    pub fn allow_silence(&mut self) {
        self.silence = None;
    }

    /// Kills it with SIGKILL.
    pub fn kill(&mut self) {
        self.emulator.kill();
    }

    /// The next report, or the reason that there is none.
    pub fn next_message(&mut self, stop: &AtomicBool) -> Result<VmMessage, VmFault> {
        loop {
            if let Some(report) = self.report_until(self.deadline, stop)? {
                return Ok(report);
            }
        }
    }

    /// The next report, if it arrives before `until`.
    pub fn report_until(
        &mut self,
        until: Instant,
        stop: &AtomicBool,
    ) -> Result<Option<VmMessage>, VmFault> {
        loop {
            if stop.load(Ordering::Relaxed) {
                return Err(VmFault::Interrupted);
            }
            let now = Instant::now();
            if now >= self.deadline {
                return Err(VmFault::TimeLimit {
                    limit: self.limit,
                    doing: self.doing.clone(),
                });
            }
            if now >= until {
                return Ok(None);
            }
            match self.link.next_line() {
                // A VM's first line is empty.
                Ok(Some(line)) if line.is_empty() => {}
                Ok(Some(line)) => {
                    let report = serde_json::from_str(&line).map_err(|e| {
                        VmFault::Nonsense(format!("{e} in {:?}", first_chars(&line)))
                    })?;
                    self.note(&report);
                    return Ok(Some(report));
                }
                Ok(None) => return Err(self.last_words()),
                // Check silence only now, since its reports may have waited for us.
                Err(e) if is_timeout(&e) => {
                    if let Some((deadline, limit)) = self.speaks_until
                        && now >= deadline
                    {
                        return Err(VmFault::Silent {
                            limit,
                            doing: self.doing.clone(),
                        });
                    }
                }
                Err(e) if e.kind() == io::ErrorKind::InvalidData => {
                    return Err(VmFault::Nonsense(e.to_string()));
                }
                // The other end closed while data was in flight.
                Err(e) if e.kind() == io::ErrorKind::ConnectionReset => {
                    return Err(self.last_words());
                }
                Err(e) => return Err(VmFault::Link(e)),
            }
        }
    }

    /// Waits briefly for the emulator to exit; dropping it does the rest.
    pub fn finish(mut self) {
        self.wait();
    }

    fn note(&mut self, report: &VmMessage) {
        self.doing = match report {
            VmMessage::Booted { .. } | VmMessage::Sized { .. } => "was filling memory".into(),
            VmMessage::Start { .. } => "had begun the timed phase".into(),
            VmMessage::Interval(interval) => {
                format!("was {:.0} s into the timed phase", interval.t_s)
            }
            VmMessage::Filled
            | VmMessage::Shift { .. }
            | VmMessage::Program(_)
            | VmMessage::Uses { .. } => return,
            VmMessage::Done { .. } => "was verifying data".into(),
            VmMessage::Verified { .. }
            | VmMessage::AgentLog { .. }
            | VmMessage::AgentRecording { .. }
            | VmMessage::Failed { .. }
            | VmMessage::Finished => "was powering off".into(),
        };
        let reports_each_second = matches!(report, VmMessage::Interval(_));
        let silence = self.silence.filter(|_| reports_each_second);
        self.speaks_until = silence.map(|limit| (Instant::now() + limit, limit));
    }

    /// The reason that the link closed, from the last output of kernel and emulator.
    fn last_words(&mut self) -> VmFault {
        let status = self.wait();
        let console = tail(&self.console_log);
        if let Some(panic) = console.lines().rfind(|line| line.contains("Kernel panic")) {
            return VmFault::Panicked(panic.trim().to_owned());
        }
        if let Some(said) = console.lines().find_map(|l| l.strip_prefix(LAST_WORDS)) {
            return VmFault::Job(said.trim().to_owned());
        }
        let output = tail(&self.output_log);
        let said = [&output, &console]
            .into_iter()
            .find_map(|text| text.lines().rfind(|line| !line.trim().is_empty()));
        let said = said.unwrap_or_default().trim().to_owned();
        match status {
            Some(status) => VmFault::Ended { status, said },
            None => VmFault::TimeLimit {
                limit: self.limit,
                doing: "closed its link".into(),
            },
        }
    }

    /// Its exit status, if it exits soon.
    fn wait(&mut self) -> Option<String> {
        let deadline = Instant::now() + END_LIMIT;
        loop {
            match self.emulator.ended() {
                Ok(Some(status)) => return Some(status),
                Ok(None) if Instant::now() < deadline => std::thread::sleep(TICK / 10),
                _ => return None,
            }
        }
    }
}

/// Makes the child of `command` die with the thread that starts it.
pub fn dies_with_this_thread(command: &mut Command) {
    let parent = std::process::id();
    // SAFETY: between fork and exec only async-signal-safe calls are made, and nothing is allocated.
    unsafe {
        command.pre_exec(move || {
            if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) != 0 {
                return Err(io::Error::last_os_error());
            }
            // The parent may have died before the call above.
            if libc::getppid() as u32 != parent {
                return Err(io::Error::from_raw_os_error(libc::ESRCH));
            }
            Ok(())
        });
    }
}

/// The sender of orders to a VM.
#[derive(Debug)]
pub struct Orders(UnixStream);

impl Orders {
    /// Lets a waiting VM continue.
    pub fn go(&mut self) -> Result<(), VmFault> {
        self.say(GO)
    }

    /// Makes a VM that runs rounds kill its agent.
    pub fn kill_agent(&mut self) -> Result<(), VmFault> {
        self.say(KILL_AGENT)
    }

    fn say(&mut self, order: &str) -> Result<(), VmFault> {
        self.0
            .write_all(format!("{order}\n").as_bytes())
            .map_err(VmFault::Link)
    }
}

impl Drop for VmChild {
    fn drop(&mut self) {
        self.kill();
    }
}

fn is_timeout(e: &io::Error) -> bool {
    matches!(
        e.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut
    )
}

fn first_chars(line: &str) -> String {
    line.chars().take(80).collect()
}

/// The tail of a log; empty if unreadable.
fn tail(path: &Path) -> String {
    let read = || -> io::Result<Vec<u8>> {
        let mut file = File::open(path)?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(TAIL_BYTES)))?;
        let mut bytes = Vec::new();
        file.take(TAIL_BYTES).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    String::from_utf8_lossy(&read().unwrap_or_default()).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::{Interval, Totals};

    /// A VM that sends these reports, and then stays silent for a minute.
    fn says(messages: &[VmMessage]) -> (tempfile::TempDir, VmChild) {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let lines = messages
            .iter()
            .map(|m| serde_json::to_string(m).unwrap() + "\n");
        std::fs::write(path("said"), lines.collect::<String>()).unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", "cat \"$1\" >&0; exec sleep 60", "sh"]);
        command.arg(path("said"));
        let limit = Duration::from_secs(50);
        let vm = VmChild::start(command, limit, path("console"), path("output")).unwrap();
        (folder, vm)
    }

    #[test]
    fn a_vm_that_falls_silent_while_its_workload_runs_is_not_waited_for() {
        let interval = |t_s| {
            VmMessage::Interval(Interval {
                t_s,
                rate: None,
                programs: Vec::new(),
                hot_in_fast: None,
                totals: Totals::default(),
            })
        };
        let stop = AtomicBool::new(false);
        let (_folder, mut vm) =
            says(&[interval(1.0), interval(2.0), VmMessage::Shift { t_s: 2.0 }]);
        vm.silence = Some(Duration::from_millis(200));
        for _ in 0..3 {
            vm.next_message(&stop).unwrap();
        }
        match vm.next_message(&stop) {
            Err(VmFault::Silent { doing, .. }) => assert_eq!(doing, "was 2 s into the timed phase"),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_vm_by_the_models_clock_may_take_any_time_for_a_second() {
        let stop = AtomicBool::new(false);
        let interval = Interval {
            t_s: 1.0,
            rate: None,
            programs: Vec::new(),
            hot_in_fast: None,
            totals: Totals::default(),
        };
        let (_folder, mut vm) = says(&[VmMessage::Interval(interval)]);
        vm.silence = Some(Duration::from_millis(1));
        vm.allow_silence();
        vm.next_message(&stop).unwrap();
        let until = Instant::now() + Duration::from_millis(300);
        assert!(vm.report_until(until, &stop).unwrap().is_none());
    }

    #[test]
    fn a_vm_may_take_its_time_to_fill_and_to_verify_memory() {
        let stop = AtomicBool::new(false);
        let (_folder, mut vm) = says(&[VmMessage::Filled]);
        vm.silence = Some(Duration::from_millis(200));
        vm.next_message(&stop).unwrap();
        let until = Instant::now() + Duration::from_millis(600);
        assert!(vm.report_until(until, &stop).unwrap().is_none());
    }
}
