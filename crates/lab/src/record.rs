//! Recording a real program: user-mode emulation with a plugin that tells every access.

use std::ffi::OsString;
use std::io::{self, BufReader, Read};
use std::ops::ControlFlow;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};

use demeter_policy::GuestVirtAddr;

use crate::error::Error;
use crate::vm::Lab;
use crate::vm::dies_with_this_thread;
use crate::vm::plugin::trace_plugin;

/// Accesses of the plugin's largest message.
const MESSAGE_ACCESSES_MAX: u32 = 4096;
const HEADER_BYTES: usize = 16;
/// The thread of the message that says that the program ended.
const END: u32 = u32::MAX;
const STORE: u64 = 1 << 63;

/// The socket's number in the emulator: one that programs do not use by chance.
const PLUGIN_FD: i32 = 900;

/// What a recording needs of this machine.
#[derive(Debug, Clone)]
pub struct Recorder {
    /// The user-mode emulator.
    pub qemu: PathBuf,
    /// Folder where the compiled plugin is kept.
    pub cache: PathBuf,
}

/// What one thread of the program did next.
#[derive(Debug, Clone, Copy)]
pub struct Recorded<'a> {
    /// Which thread, by the emulator's number.
    pub thread: u32,
    /// Instructions that it ran.
    pub instructions: u64,
    bytes: &'a [u8],
}

impl Recorded<'_> {
    /// What it touched, in order: address, and whether it stored.
    pub fn accesses(&self) -> impl Iterator<Item = (GuestVirtAddr, bool)> {
        self.bytes.chunks_exact(8).map(|word| {
            let word = word.iter().rev();
            let word = word.fold(0u64, |word, &byte| word << 8 | u64::from(byte));
            (GuestVirtAddr(word & !STORE), word & STORE != 0)
        })
    }
}

/// A program that runs under the recorder; it dies with this value.
#[derive(Debug)]
pub struct Recording {
    child: Child,
    messages: BufReader<UnixStream>,
    bytes: Vec<u8>,
}

impl Recorder {
    /// The usual places: `DEMETER_QEMU_USER`, else qemu-x86_64, and the lab's cache folder.
    ///
    /// # Errors
    /// When there is no folder for the cache.
    pub fn from_env() -> Result<Self, Error> {
        let qemu = std::env::var_os("DEMETER_QEMU_USER").filter(|path| !path.is_empty());
        Ok(Self {
            qemu: qemu.map_or_else(|| "qemu-x86_64".into(), PathBuf::from),
            cache: Lab::from_env()?.cache,
        })
    }

    /// Makes the plugin, in the cache.
    ///
    /// # Errors
    /// [`Error::NoPlugins`] when the emulator loads none; others when it or a C compiler is missing.
    pub fn plugin(&self) -> Result<PathBuf, Error> {
        trace_plugin(&self.cache, &self.qemu)
    }

    /// Starts `program`, found as a shell finds it, with our own input and output.
    ///
    /// # Errors
    /// When the program is missing, the system refuses, or there is no [`Recorder::plugin`].
    pub fn start(&self, program: &Path, args: &[OsString]) -> Result<Recording, Error> {
        let program = find(program)?;
        let plugin = self.plugin()?;
        let (ours, theirs) = UnixStream::pair().map_err(Error::io("create", "a socket"))?;
        let mut plugin_option = plugin.into_os_string();
        plugin_option.push(format!(",fd={PLUGIN_FD}"));
        let mut command = Command::new(&self.qemu);
        command
            .arg("-plugin")
            .arg(plugin_option)
            .arg(&program)
            .args(args);
        dies_with_this_thread(&mut command);
        let socket = theirs.as_raw_fd();
        // SAFETY: dup2 is async-signal-safe, takes two numbers, and nothing is allocated.
        unsafe {
            command.pre_exec(move || match libc::dup2(socket, PLUGIN_FD) {
                -1 => Err(io::Error::last_os_error()),
                _ => Ok(()),
            });
        }
        let child = command.spawn().map_err(Error::io("start", &self.qemu))?;
        Ok(Recording {
            child,
            messages: BufReader::with_capacity(1 << 16, ours),
            bytes: Vec::new(),
        })
    }
}

impl Recording {
    /// Hands `on_recorded` what each thread did, as it comes, until the program ends or
    /// `on_recorded` breaks, which ends it. Returns how it ended.
    ///
    /// # Errors
    /// When the emulator ends without having recorded, or its messages make no sense.
    pub fn run(
        mut self,
        mut on_recorded: impl FnMut(Recorded) -> ControlFlow<()>,
    ) -> Result<ExitStatus, Error> {
        let mut heard = false;
        loop {
            let mut header = [0; HEADER_BYTES];
            if !read(&mut self.messages, &mut header)? {
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
            if !read(&mut self.messages, &mut self.bytes)? {
                break;
            }
            let recorded = Recorded {
                thread,
                instructions: u64::from(u32_of(&header[8..12]))
                    | u64::from(u32_of(&header[12..])) << 32,
                bytes: &self.bytes,
            };
            if on_recorded(recorded).is_break() {
                // It fails only when the program has ended already, which is as well.
                let _ = self.child.kill();
                break;
            }
        }
        let status = self
            .child
            .wait()
            .map_err(Error::io("wait for", "the emulator"))?;
        if heard {
            return Ok(status);
        }
        Err(Error::Tool {
            program: "the emulator".into(),
            said: format!("it ended ({status}) before the program began"),
            mend: "PROGRAM must be an x86-64 program for Linux, no script".into(),
        })
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        // Both fail only when it has ended already, which is as well.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Fills `bytes`; false when the program ended instead, perhaps amid a message.
fn read(messages: &mut impl Read, bytes: &mut [u8]) -> Result<bool, Error> {
    match messages.read_exact(bytes) {
        Ok(()) => Ok(true),
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset
            ) =>
        {
            Ok(false)
        }
        Err(error) => Err(Error::io("read from", "the emulator's plugin")(error)),
    }
}

fn u32_of(bytes: &[u8]) -> u32 {
    let bytes = bytes.iter().rev();
    bytes.fold(0, |number, &byte| number << 8 | u32::from(byte))
}

/// The file that a shell would run: a name without a slash is looked for in `PATH`.
fn find(program: &Path) -> Result<PathBuf, Error> {
    let missing = || Error::Missing {
        what: format!("there is no program {}", program.display()),
        mend: "give its path".into(),
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
