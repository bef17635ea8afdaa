//! A process with hot memory, for tests on real kernels. It runs the test's own program.

use std::ffi::OsStr;
use std::hint::black_box;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};

use demeter_policy::chance::Chance;
use demeter_policy::{GuestVirtAddr, Pid, VirtRange};

use crate::maps::read_maps;

/// Marks the child process: the number of bytes that it updates.
const CHILD: &str = "DEMETER_TEST_UPDATE_FOR_EVER";
const READY: &str = "the array is there";

/// A process that updates an array at random, 90 % of the time in its last eighth. Ends with this value.
pub struct HotArray {
    child: Child,
    /// Stays open: a test runner that cannot write would end.
    _said: BufReader<ChildStdout>,
    /// The array.
    pub array: VirtRange,
    /// Its last eighth.
    pub hot: VirtRange,
}

impl HotArray {
    /// Starts the ignored test `name`, which calls this function, in a child. There it does not return.
    ///
    /// # Panics
    /// The process does not start or ends early.
    pub fn start(name: &str, bytes: u64) -> Self {
        if let Some(bytes) = std::env::var_os(CHILD) {
            update_for_ever(&bytes);
        }
        let program = std::env::current_exe().expect("a test has a file");
        let mut child = Command::new(program)
            .args(["--ignored", "--exact", name])
            .env(CHILD, bytes.to_string())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a test can be started once more");
        let mut said = BufReader::new(child.stdout.take().expect("it is piped"));
        let ready = said
            .by_ref()
            .lines()
            .map_while(Result::ok)
            .any(|line| line.contains(READY));
        assert!(ready, "the process with the array ended early");
        let vmas = read_maps(Path::new("/"), Pid(child.id())).expect("it runs");
        let array = vmas
            .iter()
            .map(|vma| vma.range)
            .max_by_key(|range| range.len());
        let array = array.expect("a process has memory");
        let hot = VirtRange::new(GuestVirtAddr(array.end().0 - bytes / 8), array.end());
        Self {
            child,
            _said: said,
            array,
            hot: hot.expect("an eighth is within the whole"),
        }
    }

    /// Its process.
    pub fn pid(&self) -> Pid {
        Pid(self.child.id())
    }
}

impl Drop for HotArray {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn update_for_ever(bytes: &OsStr) -> ! {
    /// Slows the loop down to the rate of a program that misses its caches.
    const PAUSES: u32 = 1000;
    let bytes = bytes.to_str().and_then(|bytes| bytes.parse().ok());
    let size: u64 = bytes.expect("a test gives a number of bytes");
    let mut memory = vec![1u64; (size / 8) as usize];
    // println's output would be captured by the test runner.
    let _ = writeln!(io::stdout(), "{READY}");
    let mut chance = Chance::new(1);
    loop {
        let random = chance.number();
        let words = if random.is_multiple_of(10) {
            size
        } else {
            size / 8
        } / 8;
        let index = size / 8 - 1 - (random >> 16) % words;
        memory[index as usize] ^= random;
        for pause in 0..PAUSES {
            black_box(pause);
        }
    }
}
