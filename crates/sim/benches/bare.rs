//! Benchmarks the access loop against the same model in plain C (`bare.c`), which must give equal results.
//!
//! Run `cargo bench -p demeter-sim --bench bare`; words after `--` select the lines that begin with them. Passes of
//! both versions alternate, so that other load slows both down. The output shows median CPU times, and the median ratio
//! of paired passes. It needs a C compiler, `cc`.

use std::io::{Read, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use demeter_sim::{BATCH, Model, Testbed};

use self::accesses::{ACCESSES, Case};

mod accesses;

/// Measured passes of each version, after one warm-up pass.
const PASSES: usize = 21;

/// The models, indexed by their number in `bare.c`.
const MODELS: [Model; 4] = [
    Model::Native,
    Model::Nested,
    Model::NativeCaches,
    Model::Full,
];

/// The C program, with the accesses of a case.
struct Bare {
    child: Child,
    ask: ChildStdin,
    answers: ChildStdout,
}

impl Bare {
    fn start(program: &Path, case: &Case) -> std::io::Result<Self> {
        let mut child = Command::new(program)
            .arg(case.size.0.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let (Some(mut ask), Some(answers)) = (child.stdin.take(), child.stdout.take()) else {
            unreachable!("both are piped");
        };
        let store = |access: &demeter_sim::Access| u64::from(access.is_store()) << 63;
        let words = case.accesses.iter().map(|a| a.gva().0 | store(a));
        let words = [ACCESSES as u64].into_iter().chain(words);
        ask.write_all(&words.flat_map(u64::to_ne_bytes).collect::<Vec<u8>>())?;
        Ok(Self {
            child,
            ask,
            answers,
        })
    }

    /// Runs one pass in C; returns CPU time and simulated picoseconds.
    fn pass(&mut self, model: u8) -> std::io::Result<(Duration, u64)> {
        self.ask.write_all(&[model])?;
        let mut numbers = [[0; 8]; 2];
        for number in &mut numbers {
            self.answers.read_exact(number)?;
        }
        let [ns, ps] = numbers.map(u64::from_ne_bytes);
        Ok((Duration::from_nanos(ns), ps))
    }

    fn end(mut self) -> std::io::Result<()> {
        drop(self.ask);
        self.child.wait().map(drop)
    }
}

/// Runs one pass of our model; returns CPU time and simulated picoseconds.
fn pass(testbed: &mut Testbed, model: Model, case: &Case) -> (Duration, u64) {
    let before = accesses::cpu_time();
    let batches = case.accesses.chunks(BATCH);
    let ps = batches.map(|batch| testbed.run(model, batch)).sum();
    (accesses::cpu_time() - before, ps)
}

/// The median.
fn median(figures: impl Iterator<Item = f64>) -> f64 {
    let mut figures: Vec<f64> = figures.collect();
    figures.sort_by(f64::total_cmp);
    figures[figures.len() / 2]
}

/// Million accesses per second.
fn rate(times: &[Duration]) -> f64 {
    let rates = times
        .iter()
        .map(|time| ACCESSES as f64 / time.as_secs_f64() / 1e6);
    median(rates)
}

fn main() -> std::io::Result<()> {
    // Cargo adds `--bench`.
    let chosen = std::env::args().skip(1).find(|arg| !arg.starts_with('-'));
    let chosen = chosen.unwrap_or_default();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/bare.c");
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join("bare");
    let flags = ["-O3", "-std=c11", "-D_POSIX_C_SOURCE=200809L", "-o"];
    let mut cc = Command::new("cc");
    let built = cc.args(flags).arg(&program).arg(source).status()?;
    assert!(built.success(), "cc cannot build bare.c");
    println!("million accesses per second      ours       C   ratio");
    for case in accesses::cases() {
        let label = |model: Model| format!("{:13} {:13}", case.name, format!("{model:?}"));
        let is_chosen = |model: &Model| label(*model).starts_with(&chosen);
        if !MODELS.iter().any(is_chosen) {
            continue;
        }
        let mut testbed = Testbed::new(case.size);
        let mut bare = Bare::start(&program, &case)?;
        for (number, model) in MODELS.into_iter().enumerate() {
            if !is_chosen(&model) {
                continue;
            }
            let (mut ours, mut theirs) = (vec![], vec![]);
            for round in 0..=PASSES {
                let (our_time, our_ps) = pass(&mut testbed, model, &case);
                let (their_time, their_ps) = bare.pass(number as u8)?;
                assert_eq!(our_ps, their_ps, "{} {model:?}", case.name);
                if round > 0 {
                    ours.push(our_time);
                    theirs.push(their_time);
                }
            }
            let pairs = ours.iter().zip(&theirs);
            let ratio = median(pairs.map(|(our, their)| their.as_secs_f64() / our.as_secs_f64()));
            let (ours, theirs) = (rate(&ours), rate(&theirs));
            println!("{} {ours:9.1} {theirs:7.1} {ratio:7.2}", label(model));
        }
        bare.end()?;
    }
    Ok(())
}
