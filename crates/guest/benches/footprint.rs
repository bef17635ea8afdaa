//! Measures an idle agent with 16 processes: CPU time and resident memory.
//!
//! The processes are real. The two nodes and the tracker are simulated. The tracker first plays a busy phase, so that
//! every classifier is full.

use std::collections::BTreeMap;
use std::error::Error;
use std::fs;
use std::io::Read;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Child, Command as Process, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use demeter_guest::agent::{Agent, Control, Effects};
use demeter_guest::config::Config;
use demeter_guest::latency::LoadProbe;
use demeter_guest::pages::LivePages;
use demeter_guest::status::StatusCell;
use demeter_guest::targets::TargetFinder;
use demeter_guest::tracker::{Drained, Tracker, TrackerError};
use demeter_policy::{GuestVirtAddr, Pid, Sample, Tuning};

const PROCESSES: usize = 16;
const BYTES_EACH: usize = 64 << 20;
const BUSY_EPOCHS: u32 = 20;
const IDLE_EPOCHS: u32 = 40;
const EPOCH_MS: u64 = 500;

/// Samples all over the processes' memory for some epochs, then no samples.
struct BusyThenIdle {
    targets: Vec<Pid>,
    epoch: u32,
}

impl Tracker for BusyThenIdle {
    fn name(&self) -> &'static str {
        "busy, then idle"
    }

    fn set_targets(&mut self, targets: &[Pid]) -> Result<(), TrackerError> {
        self.targets = targets.to_vec();
        Ok(())
    }

    fn drain(&mut self, out: &mut Vec<Sample>, max: usize) -> Result<Drained, TrackerError> {
        self.epoch += 1;
        if self.epoch <= BUSY_EPOCHS {
            for &pid in &self.targets {
                let spaces =
                    demeter_guest::maps::read_maps(Path::new("/"), pid).unwrap_or_default();
                let blocks = spaces
                    .iter()
                    .filter(|v| v.range.len().0 >= BYTES_EACH as u64);
                for start in blocks.map(|v| v.range.start().0) {
                    let samples = (0..600).map(|i| start + i * i * 4096 % BYTES_EACH as u64);
                    let sample = |a| Sample {
                        pid,
                        addr: GuestVirtAddr(a),
                        weight: 1,
                    };
                    out.extend(samples.map(sample));
                }
            }
        }
        out.truncate(max);
        Ok(Drained {
            taken: out.len() as u64,
            ..Drained::default()
        })
    }

    fn pause(&mut self) -> Result<(), TrackerError> {
        Ok(())
    }

    fn resume(&mut self) -> Result<(), TrackerError> {
        Ok(())
    }
}

/// A child that holds memory until its standard input closes.
fn child() {
    let mut memory = vec![0u8; BYTES_EACH];
    memory.iter_mut().step_by(4096).for_each(|b| *b = 1);
    std::hint::black_box(&memory);
    println!("ready");
    let _ = std::io::stdin().read(&mut [0]);
}

struct Children(Vec<Child>);

impl Drop for Children {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn node(root: &Path, id: u32) -> std::io::Result<()> {
    let dir = root.join(format!("sys/devices/system/node/node{id}"));
    fs::create_dir_all(&dir)?;
    let meminfo = format!("Node {id} MemTotal: 4194304 kB\nNode {id} MemFree: 1048576 kB\n");
    fs::write(dir.join("meminfo"), meminfo)?;
    fs::write(dir.join("cpulist"), if id == 0 { "0\n" } else { "\n" })?;
    fs::write(dir.join("distance"), "10 20\n")?;
    let zone = "  pages free     262144\n        low      1000\n        high     2000\n";
    let zones = format!("Node 0, zone   Normal\n{zone}Node 1, zone   Normal\n{zone}");
    fs::create_dir_all(root.join("proc"))?;
    fs::write(root.join("proc/zoneinfo"), zones)
}

fn cpu_time() -> Duration {
    // SAFETY: getrusage fills the struct that it gets; all zeroes are a valid value of it.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_SELF, &mut usage);
        usage
    };
    let of = |t: libc::timeval| {
        Duration::from_secs(t.tv_sec as u64) + Duration::from_micros(t.tv_usec as u64)
    };
    of(usage.ru_utime) + of(usage.ru_stime)
}

fn resident_mib() -> Result<f64, Box<dyn Error>> {
    let statm = fs::read_to_string("/proc/self/statm")?;
    let pages: f64 = statm
        .split(' ')
        .nth(1)
        .ok_or("statm has no second field")?
        .parse()?;
    Ok(pages * 4096.0 / (1 << 20) as f64)
}

fn main() -> Result<(), Box<dyn Error>> {
    if std::env::args().any(|a| a == "child") {
        child();
        return Ok(());
    }
    let mut children = Children(vec![]);
    for _ in 0..PROCESSES {
        let mut process = Process::new(std::env::current_exe()?);
        process
            .arg("child")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut child = process.spawn()?;
        let mut out = child.stdout.take().ok_or("a child without output")?;
        children.0.push(child);
        out.read_exact(&mut [0; 6])?;
    }

    let root = tempfile::tempdir()?;
    node(root.path(), 0)?;
    node(root.path(), 1)?;
    for child in &children.0 {
        let name = child.id().to_string();
        symlink(
            Path::new("/proc").join(&name),
            root.path().join("proc").join(&name),
        )?;
    }
    let config = Config {
        pids: children.0.iter().map(Child::id).collect(),
        tuning: Tuning {
            epoch_ms: EPOCH_MS,
            ..Tuning::default()
        },
        ..Config::default()
    };
    let tracker = Box::new(BusyThenIdle {
        targets: vec![],
        epoch: 0,
    });
    let status = StatusCell::default();
    let effects = Effects {
        finder: TargetFinder::new(root.path(), config.targets()?),
        tracker,
        pages: Box::new(LivePages::default()),
        measured_ns: BTreeMap::new(),
        load: LoadProbe::default(),
        cpus: 1,
    };
    let mut agent = Agent::new(root.path().into(), config, effects, status.clone())?;

    let start = Instant::now();
    for _ in 0..BUSY_EPOCHS {
        agent.step()?;
    }
    println!(
        "busy: {:.2} ms an epoch",
        start.elapsed().as_secs_f64() * 1e3 / f64::from(BUSY_EPOCHS)
    );
    for _ in 0..40 {
        agent.step()?;
    }
    let (controls, received) = mpsc::channel();
    let (cpu, start) = (cpu_time(), Instant::now());
    let timer = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(EPOCH_MS * u64::from(IDLE_EPOCHS)));
        controls.send(Control::Stop)
    });
    agent.run(&received)?;
    let share = (cpu_time() - cpu).as_secs_f64() / start.elapsed().as_secs_f64();
    timer.join().map_err(|_| "the timer panicked")??;
    println!(
        "idle with {} processes: {:.3} % of one CPU over {IDLE_EPOCHS} epochs, resident {:.1} MiB",
        status.get().targets.len(),
        share * 100.0,
        resident_mib()?,
    );
    Ok(())
}
