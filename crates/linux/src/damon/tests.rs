//! Tests of DAMON's users and of leftovers, on a simulated sysfs.

use std::fs;
use std::path::Path;

use super::*;
use demeter_policy::{BLOCK_SIZE, Block, GuestVirtAddr};

const ADMIN: &str = "sys/kernel/mm/damon/admin/kdamonds";
const STAT: &str = "sys/module/damon_stat/parameters/enabled";
const RECLAIM: &str = "sys/module/damon_reclaim/parameters";

/// Static copies of DAMON's files.
struct Machine(tempfile::TempDir);

/// DAMON's visible state: number of kdamonds, state of the first, DAMON_STAT.
type Seen = (String, String, Option<String>);

impl Machine {
    fn new() -> Self {
        let machine = Self(tempfile::tempdir().unwrap());
        for (file, text) in [
            ("nr_kdamonds", "0\n"),
            ("0/state", "off\n"),
            ("0/contexts/nr_contexts", "0\n"),
            ("0/contexts/0/avail_operations", "vaddr\nfvaddr\npaddr\n"),
            ("0/contexts/0/operations", "vaddr\n"),
            ("0/contexts/0/targets/nr_targets", "0\n"),
            ("0/contexts/0/schemes/nr_schemes", "0\n"),
            (
                "0/contexts/0/monitoring_attrs/intervals/update_us",
                "60000000\n",
            ),
        ] {
            machine.write(&format!("{ADMIN}/{file}"), text);
        }
        machine
    }

    fn with(files: &[(&str, &str)]) -> Self {
        let machine = Self::new();
        for (file, text) in files {
            machine.write(file, text);
        }
        machine
    }

    /// A machine whose DAMON has `targets` targets, each with `regions` regions.
    fn with_regions(targets: u32, regions: u32) -> Self {
        let machine = Self::new();
        let write = |file: String| machine.write(&format!("{ADMIN}/0/contexts/0/{file}"), "");
        for target in 0..targets {
            write(format!("targets/{target}/pid_target"));
            write(format!("targets/{target}/regions/nr_regions"));
            for region in 0..regions {
                write(format!("targets/{target}/regions/{region}/start"));
                write(format!("targets/{target}/regions/{region}/end"));
            }
        }
        for file in ["min", "max"] {
            write(format!("monitoring_attrs/nr_regions/{file}"));
        }
        machine
    }

    fn root(&self) -> &Path {
        self.0.path()
    }

    fn write(&self, file: &str, text: &str) {
        let path = self.root().join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    /// A file's first line, which is all that sysfs would take of a write.
    fn text(&self, file: &str) -> Option<String> {
        let text = fs::read_to_string(self.root().join(file)).ok()?;
        text.lines().next().map(str::to_owned)
    }

    fn seen(&self) -> Seen {
        let text = |file: &str| self.text(&format!("{ADMIN}/{file}")).unwrap();
        (text("nr_kdamonds"), text("0/state"), self.text(STAT))
    }

    fn claim(&self, statistic: Statistic) -> Result<Vec<Kdamond>, DamonError> {
        Kdamond::claim(self.root(), 1, statistic)
    }

    /// Simulates a kill. A killed process runs no destructors and loses its locks, while forgotten values here keep
    /// them; so the locked file is replaced by a copy.
    fn kill(&self, demeter: Vec<Kdamond>) {
        std::mem::forget(demeter);
        let count = self.root().join(ADMIN).join("nr_kdamonds");
        let text = fs::read_to_string(&count).unwrap();
        fs::remove_file(&count).unwrap();
        fs::write(count, text).unwrap();
    }

    /// Whether /run has notes.
    fn has_notes(&self) -> bool {
        let notes = fs::read_dir(self.root().join("run/demeter"));
        notes.is_ok_and(|notes| notes.count() > 0)
    }
}

fn seen(kdamonds: &str, state: &str, statistic: Option<&str>) -> Seen {
    (kdamonds.into(), state.into(), statistic.map(str::to_owned))
}

#[test]
fn the_statistic_is_off_while_we_have_damon() {
    let machine = Machine::with(&[(STAT, "Y\n")]);
    let ours = machine.claim(Statistic::TurnOff).unwrap();
    assert_eq!(machine.seen(), seen("1", "off", Some("N")));
    drop(ours);
    assert_eq!(machine.seen(), seen("0", "off", Some("Y")));
    assert!(!machine.has_notes());
}

#[test]
fn a_statistic_that_was_off_stays_off() {
    let machine = Machine::with(&[(STAT, "N\n")]);
    drop(machine.claim(Statistic::TurnOff).unwrap());
    assert_eq!(machine.seen(), seen("0", "off", Some("N")));
}

#[test]
fn a_statistic_that_is_to_be_left_keeps_us_from_damon() {
    let machine = Machine::with(&[(STAT, "Y\n")]);
    let error = machine.claim(Statistic::Leave).unwrap_err();
    assert!(matches!(error, DamonError::Held(Owner::Statistic)));
    let said = error.to_string();
    assert!(
        said.contains("DAMON_STAT") && said.contains(&format!("echo N > /{STAT}")),
        "{said}"
    );
    assert_eq!(machine.seen(), seen("0", "off", Some("Y")));
    assert!(!machine.has_notes());
}

#[test]
fn what_somebody_uses_is_never_taken() {
    let context = format!("{ADMIN}/0/contexts/0");
    let nr_kdamonds = format!("{ADMIN}/nr_kdamonds");
    let [state, contexts, targets, schemes] = [
        format!("{ADMIN}/0/state"),
        format!("{ADMIN}/0/contexts/nr_contexts"),
        format!("{context}/targets/nr_targets"),
        format!("{context}/schemes/nr_schemes"),
    ];
    let reclaim = format!("{RECLAIM}/enabled");
    let cases: [(&str, &[(&str, &str)]); 5] = [
        (
            "runs",
            &[(&nr_kdamonds, "1\n"), (&state, "on\n"), (&contexts, "1\n")],
        ),
        (
            "watches",
            &[(&nr_kdamonds, "1\n"), (&contexts, "1\n"), (&targets, "1\n")],
        ),
        (
            "has schemes",
            &[(&nr_kdamonds, "1\n"), (&contexts, "1\n"), (&schemes, "1\n")],
        ),
        ("blank, but nobody noted it", &[(&nr_kdamonds, "1\n")]),
        ("DAMON_RECLAIM", &[(&reclaim, "Y\n")]),
    ];
    for (name, files) in cases {
        // Neither a note of ours nor a DAMON_STAT that we could turn off makes these kdamonds ours.
        for noted in [false, name != "blank, but nobody noted it"] {
            let machine = Machine::with(files);
            if noted {
                machine.write("run/demeter/damon-kdamonds", "");
            }
            let before = machine.seen();
            let error = machine.claim(Statistic::TurnOff).unwrap_err();
            assert!(matches!(error, DamonError::Held(_)), "{name}: {error}");
            assert_eq!(machine.seen(), before, "{name}");
            // A clean-up does not touch DAMON_RECLAIM.
            let _ = clean_up(machine.root());
            assert_eq!(machine.seen(), before, "{name}");
        }
    }
}

#[test]
fn a_module_is_named_with_the_command_that_frees_damon() {
    let files = [(&*format!("{RECLAIM}/enabled"), "Y\n"), (STAT, "N\n")];
    let machine = Machine::with(&files);
    let said = machine.claim(Statistic::TurnOff).unwrap_err().to_string();
    assert!(
        said.contains("DAMON_RECLAIM")
            && said.contains("echo N > /sys/module/damon_reclaim/parameters/enabled"),
        "{said}"
    );
    // Enabled, but it failed to start: older kernels still say Y.
    machine.write(&format!("{RECLAIM}/kdamond_pid"), "-1\n");
    assert!(machine.claim(Statistic::TurnOff).is_ok());
}

/// A kill at each instant leaves another state.
#[test]
fn a_kill_at_any_instant_is_undone_by_the_next_start_and_by_a_clean_up() {
    type Instant = fn(&Machine);
    let note = |machine: &Machine, name: &str| machine.write(&format!("run/demeter/{name}"), "");
    fn admin(machine: &Machine, files: &[(&str, &str)]) {
        for (file, text) in files {
            machine.write(&format!("{ADMIN}/{file}"), text);
        }
    }
    let instants: [(&str, Instant); 5] = [
        ("DAMON_STAT still on", |_| {}),
        ("DAMON_STAT off", |machine| machine.write(STAT, "N\n")),
        ("a kdamond without a context", |machine| {
            machine.write(STAT, "N\n");
            machine.write("run/demeter/damon-kdamonds", "");
            admin(machine, &[("nr_kdamonds", "1\n")]);
        }),
        ("a context without settings", |machine| {
            machine.write(STAT, "N\n");
            machine.write("run/demeter/damon-kdamonds", "");
            admin(
                machine,
                &[("nr_kdamonds", "1\n"), ("0/contexts/nr_contexts", "1\n")],
            );
        }),
        ("at work", |machine| {
            machine.write(STAT, "N\n");
            let demeter = machine.claim(Statistic::TurnOff).unwrap();
            admin(
                machine,
                &[
                    ("0/state", "on\n"),
                    ("0/contexts/0/targets/nr_targets", "1\n"),
                ],
            );
            machine.kill(demeter);
        }),
    ];
    for (name, leave) in instants {
        let left = || {
            let machine = Machine::with(&[(STAT, "Y\n")]);
            note(&machine, "damon-stat-off");
            leave(&machine);
            machine
        };
        let machine = left();
        let undone = clean_up(machine.root()).unwrap();
        assert!(!undone.is_empty(), "{name}");
        assert_eq!(machine.seen(), seen("0", "off", Some("Y")), "{name}");
        assert!(!machine.has_notes(), "{name}");
        assert_eq!(
            clean_up(machine.root()).unwrap(),
            [""; 0],
            "{name}: nothing is left"
        );

        let machine = left();
        let next = machine.claim(Statistic::TurnOff).unwrap();
        assert_eq!(machine.seen(), seen("1", "off", Some("N")), "{name}");
        drop(next);
        assert_eq!(machine.seen(), seen("0", "off", Some("Y")), "{name}");
        assert!(!machine.has_notes(), "{name}");

        // An agent that may no longer turn it off turns it on again.
        let machine = left();
        let error = machine.claim(Statistic::Leave).unwrap_err();
        assert!(
            matches!(error, DamonError::Held(Owner::Statistic)),
            "{name}"
        );
        assert_eq!(machine.seen(), seen("0", "off", Some("Y")), "{name}");
    }
}

#[test]
fn a_running_demeter_is_not_cleaned_up() {
    let machine = Machine::with(&[(STAT, "Y\n")]);
    let ours = machine.claim(Statistic::TurnOff).unwrap();
    assert!(matches!(clean_up(machine.root()), Err(DamonError::Taken)));
    assert_eq!(machine.seen(), seen("1", "off", Some("N")));
    drop(ours);
}

#[test]
fn without_a_way_to_remember_it_the_statistic_stays_on() {
    let machine = Machine::with(&[(STAT, "Y\n"), ("run", "no folder")]);
    let error = machine.claim(Statistic::TurnOff).unwrap_err().to_string();
    assert!(error.contains("damon-stat-off"), "{error}");
    assert_eq!(machine.seen(), seen("0", "off", Some("Y")));
    // Our kdamonds are recognized without DAMON_STAT.
    machine.write(STAT, "N\n");
    drop(machine.claim(Statistic::TurnOff).unwrap());
    assert_eq!(machine.seen(), seen("0", "off", Some("N")));
}

/// A process that had many regions may have few now, while another has many.
#[test]
fn fillers_are_bounded_whichever_process_had_the_regions() {
    let machine = Machine::with_regions(2, 100);
    let context = format!("{ADMIN}/0/contexts/0");
    let kdamond = machine.claim(Statistic::TurnOff).unwrap().remove(0);
    for many_first in [true, false, true] {
        let counts = if many_first { [100, 2] } else { [2, 100] };
        let regions: Vec<_> = (7..)
            .zip(counts)
            .flat_map(|(pid, count)| (0..count).map(move |block| (Pid(pid), block)))
            .map(|(pid, block)| {
                let range = VirtRange::new(Block(block).start(), Block(block + 1).start());
                (pid, range.unwrap())
            })
            .collect();
        let reported = kdamond.set_regions(&regions).unwrap();
        assert!((102..=4 * 102 + 16).contains(&reported), "{reported}");
    }
    // Two more processes with few regions do not inherit the regions of those before. The kernel needs three in all.
    let few: Vec<_> = (9..11)
        .map(|pid| {
            (
                Pid(pid),
                VirtRange::new(Block(1).start(), Block(2).start()).unwrap(),
            )
        })
        .collect();
    assert!((3..=6).contains(&kdamond.set_regions(&few).unwrap()));
    let number = |file: &str| -> u64 {
        let text = machine.text(&format!("{context}/monitoring_attrs/nr_regions/{file}"));
        text.unwrap().parse().unwrap()
    };
    assert!(number("min") >= 3 && number("min") <= number("max"));
}

#[test]
fn files_of_regions_are_kept_and_what_is_left_of_them_watches_nothing() {
    let machine = Machine::with_regions(1, 4);
    let context = format!("{ADMIN}/0/contexts/0");
    let regions = format!("{context}/targets/0/regions");
    let kdamond = machine.claim(Statistic::TurnOff).unwrap().remove(0);
    let watch = |pid: u32, blocks: std::ops::Range<u64>| {
        let range = |block| VirtRange::new(Block(block).start(), Block(block + 1).start()).unwrap();
        let regions: Vec<_> = blocks.map(|block| (Pid(pid), range(block))).collect();
        kdamond.set_regions(&regions).unwrap()
    };
    let ranges = || -> Vec<VirtRange> {
        let number = |file: &str| machine.text(&format!("{regions}/{file}")).unwrap().parse();
        let range = |region: u32| {
            let start = GuestVirtAddr(number(&format!("{region}/start")).unwrap());
            VirtRange::new(
                start,
                GuestVirtAddr(number(&format!("{region}/end")).unwrap()),
            )
            .unwrap()
        };
        (0..4).map(range).collect()
    };
    assert_eq!(watch(7, 10..14), 4);
    assert_eq!(ranges().iter().filter(|range| is_filler(range)).count(), 0);
    // The kernel would remove the other regions' files.
    machine.write(&format!("{regions}/nr_regions"), "untouched");
    assert_eq!(watch(8, 20..22), 4);
    let pid = machine.text(&format!("{context}/targets/0/pid_target"));
    assert_eq!(pid.as_deref(), Some("8"));
    let there = ranges();
    assert_eq!(there[1].end(), Block(22).start());
    assert!(is_filler(&there[2]) && is_filler(&there[3]));
    // Sorted and not adjacent.
    assert!(
        there[1..]
            .windows(2)
            .all(|pair| pair[0].end() < pair[1].start())
    );
    assert_eq!(watch(8, 30..34), 4);
    assert_eq!(ranges().iter().filter(|range| is_filler(range)).count(), 0);
    let count = machine.text(&format!("{regions}/nr_regions"));
    assert_eq!(count.as_deref(), Some("untouched"));
}

/// Kernels split regions larger than all memory divided by the minimum number of regions, and merge smaller ones.
#[test]
fn no_kernel_has_a_reason_to_split_or_merge() {
    let machine = Machine::with_regions(1, 40);
    let context = format!("{ADMIN}/0/contexts/0");
    let regions = format!("{context}/targets/0/regions");
    let kdamond = machine.claim(Statistic::TurnOff).unwrap().remove(0);
    for blocks in [1, 2, 3, 40, 23, 12] {
        let range = |block| VirtRange::new(Block(block).start(), Block(block + 1).start()).unwrap();
        let wanted: Vec<_> = (0..blocks).map(|block| (Pid(7), range(block))).collect();
        let reported = kdamond.set_regions(&wanted).unwrap();
        let number = |file: &str| -> u64 { machine.text(file).unwrap().parse().unwrap() };
        let bytes = |region: usize| {
            number(&format!("{regions}/{region}/end"))
                - number(&format!("{regions}/{region}/start"))
        };
        let all: u64 = (0..reported).map(bytes).sum();
        let limit = all / number(&format!("{context}/monitoring_attrs/nr_regions/min"));
        assert!(
            (BLOCK_SIZE..2 * BLOCK_SIZE).contains(&limit),
            "{blocks}: {limit}"
        );
        assert!(number(&format!("{context}/monitoring_attrs/nr_regions/max")) >= reported as u64);
    }
}
