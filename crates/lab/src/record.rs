//! Records the memory accesses of a real program, by user-mode emulation with a plugin.
//!
//! Recording of a scenario's program starts when it is ready. Before that, it populates its memory.

use std::ffi::OsString;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, BufReader, Read};
use std::ops::ControlFlow;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use demeter_policy::GuestVirtAddr;
use demeter_scenario::{Programs, Ready, Scenario};
use regex_lite::Regex;

use crate::error::Error;
use crate::launch::Launch;
use crate::program::{Meter, OutputParser, lock};
use crate::vm::plugin::trace_plugin;
use crate::vm::{Finder, Lab, dies_with_this_thread, in_place};

/// Accesses in the plugin's largest message.
const MESSAGE_ACCESSES_MAX: u32 = 4096;
const HEADER_BYTES: usize = 16;
/// Thread number of the message for the end of the program.
const END: u32 = u32::MAX;
const STORE: u64 = 1 << 63;

/// The socket's descriptor in the emulator; programs rarely use this number.
const PLUGIN_FD: i32 = 900;

/// Time limit until a program is ready; under emulation it is far slower.
const READY_LIMIT: Duration = Duration::from_secs(1800);

/// Interval at which a wait for an idle program checks whether to continue.
const TICK: Duration = Duration::from_millis(200);

/// Requirements of a recording on this machine.
#[derive(Debug, Clone)]
pub struct Recorder {
    /// The user-mode emulator.
    pub qemu: PathBuf,
    /// The lab, with its cache for the compiled plugin, and our own programs.
    pub lab: Lab,
}

/// The next actions of one of the program's threads.
#[derive(Debug, Clone, Copy)]
pub struct Recorded<'a> {
    /// The emulator's number of the thread.
    pub thread: u32,
    /// Number of instructions executed.
    pub instructions: u64,
    bytes: &'a [u8],
}

impl Recorded<'_> {
    /// Its accesses in order: address, and whether it is a store.
    pub fn accesses(&self) -> impl Iterator<Item = (GuestVirtAddr, bool)> {
        self.bytes.chunks_exact(8).map(|word| {
            let word = word.iter().rev();
            let word = word.fold(0u64, |word, &byte| word << 8 | u64::from(byte));
            (GuestVirtAddr(word & !STORE), word & STORE != 0)
        })
    }
}

/// A program under the recorder. Dropping this kills it.
#[derive(Debug)]
pub struct Recording {
    child: Child,
    messages: BufReader<UnixStream>,
    bytes: Vec<u8>,
    until: Until,
    heard: Arc<Mutex<OutputParser>>,
    began: Instant,
}

/// The condition that starts the recording.
#[derive(Debug, Clone, Copy)]
enum Until {
    /// None: recording starts at once.
    Start,
    /// The program prints its readiness line.
    Line,
    /// A time is reached.
    Time(Instant),
}

/// The result of a recording.
#[derive(Debug)]
pub struct RecordingEnd {
    /// Exit status of the program.
    pub status: ExitStatus,
    /// Its last output.
    pub last_lines: String,
    /// Whether it became ready, and was therefore recorded.
    pub was_ready: bool,
}

impl Recorder {
    /// The default paths: `DEMETER_QEMU_USER`, otherwise qemu-x86_64, and the lab's cache folder.
    ///
    /// # Errors
    /// When there is no folder for the cache.
    pub fn from_env() -> Result<Self, Error> {
        let qemu = std::env::var_os("DEMETER_QEMU_USER").filter(|path| !path.is_empty());
        Ok(Self {
            qemu: qemu.map_or_else(|| "qemu-x86_64".into(), PathBuf::from),
            lab: Lab::from_env()?,
        })
    }

    /// Builds the plugin in the cache.
    ///
    /// # Errors
    /// [`Error::NoPlugins`] when the emulator does not support plugins. Others when it or a C compiler is missing.
    pub fn plugin(&self) -> Result<PathBuf, Error> {
        trace_plugin(&self.lab.cache, &self.qemu)
    }

    /// Starts `program`, searched as a shell does, with our own input and output.
    ///
    /// # Errors
    /// When the program is missing, the system refuses, or [`Recorder::plugin`] fails.
    pub fn start(&self, program: &Path, args: &[OsString]) -> Result<Recording, Error> {
        let mut command = Command::new(&self.qemu);
        let heard = OutputParser::new(None, None, Meter::default());
        self.spawn(&mut command, &find(program)?, args, Until::Start, heard)
    }

    /// The only program of a scenario, with its start parameters for this machine. It runs in `folder`.
    ///
    /// # Errors
    /// [`Error::Unfit`] if more than one program would have to be recorded; others as in a run.
    pub fn launch(
        &self,
        scenario: &Scenario,
        programs: &Programs,
        folder: &Path,
    ) -> Result<Launch, Error> {
        let refuse = |what: String| {
            Error::Unfit {
            what,
            hint: "record it by hand (`demeter trace record`) and name the file in workload.trace, or \
                   use --on lab"
                .into(),
        }
        };
        let [program] = &programs.programs[..] else {
            let count = programs.programs.len();
            return Err(refuse(format!(
                "a trace is of one program, and the scenario has {count}"
            )));
        };
        if let Some(Ready::Port(port)) = program.ready {
            return Err(refuse(format!(
                "nothing would use the program that listens on port {port} while it is recorded"
            )));
        }
        let finder = Finder::new(&self.lab.programs, &self.lab.cache, programs)?;
        let mut launches = in_place(&finder, scenario, programs, folder)?;
        launches
            .pop()
            .ok_or_else(|| refuse("the scenario has no program".into()))
    }

    /// Path of a cached trace of a scenario's program. It depends on the program, its data, its arguments and the
    /// scenario's seed.
    ///
    /// # Errors
    /// When one of the files cannot be read.
    pub fn kept_at(&self, scenario: &Scenario, launch: &Launch) -> Result<PathBuf, Error> {
        let mut hasher = DefaultHasher::new();
        (&launch.args, scenario.seed, scenario.duration_s).hash(&mut hasher);
        format!("{:?}", scenario.workload).hash(&mut hasher);
        let data = fs::read_dir(&launch.folder).map_err(Error::io("read", &launch.folder))?;
        let data = data.map(|entry| entry.map(|entry| entry.path()));
        let data: Vec<PathBuf> = data
            .collect::<Result<_, _>>()
            .map_err(Error::io("read", &launch.folder))?;
        for file in data.iter().chain([&launch.file]) {
            let about = fs::metadata(file).map_err(Error::io("read", file))?;
            (about.len(), about.modified().ok()).hash(&mut hasher);
        }
        let name = format!("{}-{:016x}.trace", launch.name, hasher.finish());
        Ok(self.lab.cache.join(name))
    }

    /// Starts a scenario's program. Recording starts when it is ready. Its output is parsed but not shown.
    ///
    /// # Errors
    /// As [`Recorder::start`].
    pub fn start_launch(&self, launch: &Launch) -> Result<Recording, Error> {
        let line = match &launch.ready {
            Some(Ready::Line(line)) => Some(Regex::new(line).map_err(|error| Error::Unfit {
                what: format!("program {}: ready.line: {error}", launch.name),
                hint: "correct it".into(),
            })?),
            _ => None,
        };
        let until = match &launch.ready {
            Some(Ready::AfterS(s)) => Until::Time(Instant::now() + Duration::from_secs(*s)),
            Some(Ready::Line(_)) => Until::Line,
            Some(Ready::Port(_)) | None => Until::Start,
        };
        let (output, theirs) = io::pipe().map_err(Error::io("create", "a pipe"))?;
        let mut command = Command::new(&self.qemu);
        let errors = theirs.try_clone().map_err(Error::io("create", "a pipe"))?;
        command
            .env_clear()
            .envs(&launch.env)
            .current_dir(&launch.folder)
            .stdin(Stdio::null())
            .stdout(theirs)
            .stderr(errors);
        let args: Vec<OsString> = launch.args.iter().map(OsString::from).collect();
        let heard = OutputParser::new(line, None, Meter::default());
        let recording = self.spawn(&mut command, &launch.file, &args, until, heard)?;
        // `command` still holds the other end of the pipe.
        drop(command);
        let heard = Arc::clone(&recording.heard);
        std::thread::spawn(move || listen(output, &heard));
        Ok(recording)
    }

    /// Starts `file` with `command`, which is the emulator with its environment set.
    fn spawn(
        &self,
        command: &mut Command,
        file: &Path,
        args: &[OsString],
        until: Until,
        heard: OutputParser,
    ) -> Result<Recording, Error> {
        let plugin = self.plugin()?;
        let (ours, theirs) = UnixStream::pair().map_err(Error::io("create", "a socket"))?;
        let mut plugin_option = plugin.into_os_string();
        plugin_option.push(format!(",fd={PLUGIN_FD}"));
        command
            .arg("-plugin")
            .arg(plugin_option)
            .arg(file)
            .args(args);
        dies_with_this_thread(command);
        let socket = theirs.as_raw_fd();
        // SAFETY: dup2 is async-signal-safe, takes two numbers, and nothing is allocated.
        unsafe {
            command.pre_exec(move || match libc::dup2(socket, PLUGIN_FD) {
                -1 => Err(io::Error::last_os_error()),
                _ => Ok(()),
            });
        }
        ours.set_read_timeout(Some(TICK))
            .map_err(Error::io("set up", "a socket"))?;
        let child = command.spawn().map_err(Error::io("start", &self.qemu))?;
        Ok(Recording {
            child,
            messages: BufReader::with_capacity(1 << 16, ours),
            bytes: Vec::new(),
            until,
            heard: Arc::new(Mutex::new(heard)),
            began: Instant::now(),
        })
    }
}

impl Recording {
    /// Passes each thread's actions to `on_recorded` until the program exits. It ends the program if `on_recorded`
    /// breaks or `stop` is set. Returns the result.
    ///
    /// # Errors
    /// When the emulator exits without recording, or its messages are invalid; [`Error::Interrupted`] after a stop.
    pub fn run(
        mut self,
        stop: &AtomicBool,
        mut on_recorded: impl FnMut(Recorded) -> ControlFlow<()>,
    ) -> Result<RecordingEnd, Error> {
        let mut heard = false;
        let mut was_ready = false;
        loop {
            if !was_ready {
                was_ready = self.is_ready()?;
            }
            if stop.load(Ordering::Relaxed) {
                return Err(Error::Interrupted);
            }
            let mut header = [0; HEADER_BYTES];
            if !read(&mut self.messages, &mut header, stop)? {
                break;
            }
            heard = true;
            let [thread, count] = [&header[..4], &header[4..8]].map(u32_of);
            if thread == END {
                break;
            }
            if count > MESSAGE_ACCESSES_MAX {
                let fault = io::Error::new(io::ErrorKind::InvalidData, "a message too long");
                return Err(Error::io("understand", "the emulator's plugin")(fault));
            }
            self.bytes.resize(count as usize * 8, 0);
            if !read(&mut self.messages, &mut self.bytes, stop)? {
                break;
            }
            if !was_ready {
                continue;
            }
            let recorded = Recorded {
                thread,
                instructions: u64::from(u32_of(&header[8..12]))
                    | u64::from(u32_of(&header[12..])) << 32,
                bytes: &self.bytes,
            };
            if on_recorded(recorded).is_break() {
                // It fails only if the program has exited already.
                let _ = self.child.kill();
                break;
            }
        }
        let status = self
            .child
            .wait()
            .map_err(Error::io("wait for", "the emulator"))?;
        if heard {
            return Ok(RecordingEnd {
                status,
                last_lines: lock(&self.heard).last_lines(),
                was_ready,
            });
        }
        Err(Error::Tool {
            program: "the emulator".into(),
            said: format!("it ended ({status}) before the program began"),
            hint: "PROGRAM must be an x86-64 program for Linux, no script".into(),
        })
    }
}

impl Recording {
    /// Whether the program has populated its memory, by its scenario's condition.
    fn is_ready(&self) -> Result<bool, Error> {
        let is_ready = match self.until {
            Until::Start => true,
            Until::Line => lock(&self.heard).is_ready(),
            Until::Time(time) => Instant::now() >= time,
        };
        if !is_ready && self.began.elapsed() > READY_LIMIT {
            return Err(Error::Unfit {
                what: format!(
                    "the program was not ready within {} s of recording",
                    READY_LIMIT.as_secs()
                ),
                hint: "reduce its work before that".into(),
            });
        }
        Ok(is_ready)
    }
}

/// Parses a program's output up to its end.
fn listen(mut output: impl Read, heard: &Mutex<OutputParser>) {
    let mut bytes = [0; 4096];
    loop {
        match output.read(&mut bytes) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Ok(0) | Err(_) => return,
            Ok(read) => {
                lock(heard).take(&bytes[..read], 0.0);
            }
        }
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        // Both fail only if it has exited already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Fills `bytes`; returns false if the program exited, possibly within a message.
fn read(messages: &mut impl Read, bytes: &mut [u8], stop: &AtomicBool) -> Result<bool, Error> {
    let mut filled = 0;
    while filled < bytes.len() {
        match messages.read(&mut bytes[filled..]) {
            Ok(0) => return Ok(false),
            Ok(count) => filled += count,
            Err(error) => match error.kind() {
                io::ErrorKind::ConnectionReset => return Ok(false),
                io::ErrorKind::Interrupted => {}
                io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                    if stop.load(Ordering::Relaxed) {
                        return Err(Error::Interrupted);
                    }
                }
                _ => return Err(Error::io("read from", "the emulator's plugin")(error)),
            },
        }
    }
    Ok(true)
}

fn u32_of(bytes: &[u8]) -> u32 {
    let bytes = bytes.iter().rev();
    bytes.fold(0, |number, &byte| number << 8 | u32::from(byte))
}

/// The file that a shell would run: a name without a slash is searched in `PATH`.
fn find(program: &Path) -> Result<PathBuf, Error> {
    let missing = || Error::Missing {
        what: format!("there is no program {}", program.display()),
        hint: "give its path".into(),
    };
    if program.components().count() > 1 || program.is_absolute() {
        return program
            .is_file()
            .then(|| program.into())
            .ok_or_else(missing);
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .map(|folder| folder.join(program))
        .find(|file| file.is_file())
        .ok_or_else(missing)
}

#[cfg(test)]
mod tests {
    use demeter_scenario::Workload;

    use super::*;

    #[test]
    fn what_a_trace_cannot_stand_for_is_refused() {
        let with = |programs: &str| {
            let text = format!(
                "name = \"x\"\nduration_s = 9\nsystems = [\"none\"]\n[machine]\nvcpus = 1\n\
                 fast = {{ usable_mib = 1, latency_ns = 80, bandwidth_gbps = 50 }}\n\
                 slow = {{ usable_mib = 1, latency_ns = 250, bandwidth_gbps = 20 }}\n\
                 [workload]\nkind = \"program\"\n{programs}"
            );
            let scenario: Scenario = toml::from_str(&text).unwrap();
            let Workload::Program(programs) = &scenario.workload else {
                panic!("{scenario:?}")
            };
            let folder = tempfile::tempdir().unwrap();
            let recorder = Recorder {
                qemu: "/no/qemu".into(),
                lab: Lab::from_env().unwrap(),
            };
            let refused = recorder.launch(&scenario, programs, folder.path());
            refused.unwrap_err().to_string()
        };
        let program = "[[workload.program]]\ncommand = [\"true\"]\n";
        let two = with(&format!("{program}{program}name = \"b\"\n"));
        assert!(two.contains("the scenario has 2"), "{two}");
        assert!(two.contains("demeter trace record"), "{two}");
        let server = with(&format!("{program}ready = {{ port = 7 }}\n"));
        assert!(server.contains("port 7"), "{server}");
    }
}
