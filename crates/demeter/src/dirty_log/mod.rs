//! `demeter dirty-log`: measures the cost of dirty logging for a guest.

mod result;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Result;
use demeter_dirtylog::{Backing, Protect, Report, Settings, Watch, offer, run, sweep};
use serde::Serialize;

use crate::names::names;
use crate::output;
use crate::signals;

const ROOT: &str = "/";

/// Measures what dirty logging, as in a live migration, costs a guest on this host.
///
/// Makes a VM of its own whose virtual CPUs store to slices of memory, enables KVM's log of dirty pages, and reads it
/// as a migration does. Other VMs are not touched, but share the machine with it: measure on a quiet one. Each row of
/// the table is a step. `fast` counts faults that only restored a write permission. `exits` counts exits of virtual
/// CPUs to KVM, for example at faults. `huge` is the memory that huge pages still map.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  demeter dirty-log                                       one virtual CPU, 256 MiB, the gentlest settings
  demeter dirty-log --vcpus 8 --slice-mib 1024 --sweep    try all settings, and say which to take
  demeter dirty-log --protect get                         as a VMM without manual protection does it
  demeter dirty-log --backing 2m --stride-kib 2048 --protect get --passes 1
                                                          who splits huge pages: enabling, or faults?
  demeter dirty-log --clear-chunk-mib 16 --clear-pause-us 1000    clear in parts, and let the guest breathe
  demeter dirty-log --sweep --result log.json             a result file, for demeter report (package demeter-lab)
  demeter dirty-log --offers                              what KVM of this kernel offers; measures nothing")]
pub struct Args {
    /// Number of virtual CPUs, each with its own slice of memory
    #[arg(long, value_name = "N", default_value_t = Settings::default().vcpus)]
    vcpus: u32,
    /// Size of each slice, MiB
    #[arg(long, value_name = "MIB", default_value_t = Settings::default().slice_mib)]
    slice_mib: u64,
    /// Pages of the VM's memory: small, transparent huge, or reserved huge pages
    #[arg(long, value_parser = names::<Backing>(), default_value_t = Settings::default().backing)]
    backing: Backing,
    /// Distance of stores, KiB: 4 stores to every page, 2048 to one in each block of 2 MiB
    #[arg(long, value_name = "KIB", default_value_t = Settings::default().stride_kib)]
    stride_kib: u64,
    /// When KVM write-protects pages [default: the last of these that the kernel offers]. `get`: at each reading of the
    /// log. `manual`: at each clearing. `initially-set`: at the first clearing of a log that begins full
    #[arg(long, value_name = "WHEN", value_parser = names::<Protect>(), conflicts_with = "sweep")]
    protect: Option<Protect>,
    /// Clear the log in chunks of this size [default: all at once]
    #[arg(long, value_name = "MIB", conflicts_with = "sweep")]
    clear_chunk_mib: Option<u64>,
    /// Pause after each chunk, microseconds
    #[arg(long, value_name = "US", default_value_t = 0, conflicts_with = "sweep")]
    clear_pause_us: u64,
    /// Arm: split huge pages in chunks of this size before they are write-protected [default: at faults]
    #[arg(long, value_name = "KIB", conflicts_with = "sweep")]
    eager_split_kib: Option<u64>,
    /// Number of passes over the log
    #[arg(long, value_name = "N", default_value_t = Settings::default().passes)]
    passes: u32,
    /// Length of the run before logging, seconds
    #[arg(long, value_name = "S", default_value_t = Settings::default().before_s)]
    before_s: f64,
    /// Time limit of a pass, seconds
    #[arg(long, value_name = "S", default_value_t = Settings::default().pass_limit_s)]
    pass_limit_s: f64,
    /// Try all settings in turn, and recommend one
    #[arg(long)]
    sweep: bool,
    /// Only list the features of this kernel's KVM
    #[arg(long, conflicts_with = "sweep")]
    offers: bool,
    /// Print JSON instead of text
    #[arg(long)]
    json: bool,
    /// Also write a result file, which `demeter report` draws
    #[arg(long, value_name = "FILE", conflicts_with = "offers")]
    result: Option<PathBuf>,
}

/// The output of `--sweep --json`.
#[derive(Serialize)]
struct Swept<'a> {
    reports: &'a [Report],
    recommendation: Option<sweep::Recommendation>,
}

/// Prints progress; a signal stops the measurement.
struct Watcher<'a> {
    stop: &'a AtomicBool,
    /// Number of this measurement, of how many.
    place: String,
}

impl Watch for Watcher<'_> {
    fn begins(&self, what: &str) {
        output::say(format_args!("{}{what}", self.place));
    }

    fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}

/// Measures and prints.
pub fn dirty_log(args: &Args) -> Result<()> {
    let root = Path::new(ROOT);
    // Invalid settings are reported before KVM is opened.
    args.settings(Protect::InitiallySet).check()?;
    let offer = offer(root)?;
    if args.offers {
        return match args.json {
            true => print_json(&offer),
            false => output::print(offer.to_string()),
        };
    }
    let settings = args.settings(offer.gentlest());
    let stop = signals::stop_flag()?;
    let all = match args.sweep {
        true => sweep::tried(&settings, &offer),
        false => vec![settings],
    };
    let measure = |(index, settings): (usize, &Settings)| {
        let watcher = Watcher {
            stop: &stop,
            place: match args.sweep {
                true => format!("{}/{}: ", index + 1, all.len()),
                false => String::new(),
            },
        };
        run(root, settings, &watcher)
    };
    let reports = all
        .iter()
        .enumerate()
        .map(measure)
        .collect::<Result<Vec<_>, _>>()?;
    if let Some(path) = &args.result {
        result::result(&reports).save(path)?;
    }
    match (&reports[..], args.sweep, args.json) {
        ([report], false, true) => print_json(report),
        ([report], false, false) => output::print(format!("{offer}\n{report}")),
        (_, _, true) => print_json(&Swept {
            recommendation: sweep::recommend(&reports),
            reports: &reports,
        }),
        (_, _, false) => output::print(format!("{offer}\n{}", sweep::table(&reports))),
    }
}

impl Args {
    fn settings(&self, gentlest: Protect) -> Settings {
        Settings {
            vcpus: self.vcpus,
            slice_mib: self.slice_mib,
            backing: self.backing,
            stride_kib: self.stride_kib,
            protect: self.protect.unwrap_or(gentlest),
            clear_chunk_mib: self.clear_chunk_mib,
            clear_pause_us: self.clear_pause_us,
            eager_split_kib: self.eager_split_kib,
            passes: self.passes,
            before_s: self.before_s,
            pass_limit_s: self.pass_limit_s,
        }
    }
}

fn print_json(what: &impl Serialize) -> Result<()> {
    output::print(serde_json::to_string_pretty(what)? + "\n")
}
