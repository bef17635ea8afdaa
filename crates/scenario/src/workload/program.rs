//! Real programs as a workload: command, files, readiness and figure.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use demeter_policy::Share;
use regex_lite::Regex;
use serde::{Deserialize, Serialize};

use super::Parameters;
use crate::fault::{at_least_one, is_plain_name, refuse_if, within};

/// Maximum number of programs side by side.
const PROGRAMS_MAX: usize = 16;
/// Maximum number of arguments, variables, files or packages of a program.
const WORDS_MAX: usize = 256;
/// Longest name of a unit, bytes.
const UNIT_BYTES_MAX: usize = 32;
/// Longest time before the timed phase, seconds.
const WAIT_MAX_S: u64 = 3600;

/// Parameters of a workload of real programs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Programs {
    /// Memory that they use in total, MiB, if known; the machine must have it.
    #[serde(default)]
    pub size_mib: u64,
    /// Time between the last program's readiness and the timed phase, seconds. No system is active yet.
    #[serde(default)]
    pub warm_up_s: u64,
    /// A trace of the programs, written by `demeter trace`, for the simulator, which runs no programs; relative to the
    /// current folder.
    #[serde(default)]
    pub trace: Option<PathBuf>,
    /// The programs, in starting order.
    #[serde(rename = "program")]
    pub programs: Vec<Program>,
}

/// One program.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Program {
    /// Its name in results; by default the command's file name.
    #[serde(default)]
    pub name: String,
    /// The program and its arguments. `{seed}` and `{duration_s}` in an argument are replaced by the scenario's values.
    /// A name without a slash is searched in its packages, then among Demeter's own programs, then in this machine's
    /// `PATH`.
    pub command: Vec<String>,
    /// Its environment, in addition to `PATH`, `HOME` and `LANG=C`.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// Data files, which are placed into its working folder; relative to the current folder.
    #[serde(default)]
    pub files: Vec<PathBuf>,
    /// Distribution packages that are unpacked for it, but not installed. Shared libraries that they need are added
    /// automatically.
    #[serde(default)]
    pub packages: Vec<String>,
    /// The condition for its readiness, after which the next program starts. A program without it starts with the timed
    /// phase, and must be listed after the others.
    #[serde(default)]
    pub ready: Option<Ready>,
    /// Time limit for its readiness, seconds.
    #[serde(default = "two_minutes")]
    pub ready_within_s: u64,
    /// The measured figure.
    #[serde(default)]
    pub figure: Figure,
    /// Its own cgroup (v2), created by the lab, with its share of fast memory. The result then has its fast memory,
    /// too. The agent divides fast memory by these shares; other systems only see cgroups.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cgroup: Option<Cgroup>,
}

/// A tenant's share of fast memory, as in the agent's `[[cgroup]]`. Programs without a cgroup together have a weight of
/// 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Cgroup {
    /// Fast memory that it always gets, but no more than it uses, MiB.
    #[serde(default)]
    pub guarantee_mib: u64,
    /// Its part of the rest, relative to the other groups' weights: 1 to 10000.
    #[serde(default = "one")]
    pub weight: u32,
}

fn one() -> u32 {
    1
}

fn two_minutes() -> u64 {
    120
}

/// How to detect that a program has started and filled its memory.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Ready {
    /// It prints a line that matches this regular expression.
    Line(String),
    /// It accepts connections on this TCP port of the loopback address.
    Port(u16),
    /// This many seconds have passed.
    AfterS(u64),
}

/// The measured figure of a program.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Default)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Figure {
    /// Seconds until it ends successfully. The timed phase ends when all such programs have ended, or after the
    /// scenario's `duration_s`.
    #[default]
    Time,
    /// Number of successful runs; it is restarted repeatedly.
    Runs,
    /// A number that it, or another command, prints repeatedly.
    Number(Number),
    /// None: it serves the others, and runs until all of them have ended.
    None,
}

/// A number in a program's output.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Number {
    /// A command that prints it, run every second; by default the program itself prints it.
    #[serde(default)]
    pub command: Vec<String>,
    /// A regular expression whose first group is the number.
    pub regex: String,
    /// The figure's unit: of a throughput, such as `requests/s`, where more is better; or `ns`, `us`, `ms` or `s`,
    /// where less is.
    pub unit: String,
    /// Whether the number is a counter; the figure is then its increase per second.
    #[serde(default)]
    pub counter: bool,
}

impl Program {
    /// Its name in results.
    pub fn name(&self) -> &str {
        if !self.name.is_empty() {
            return &self.name;
        }
        let command = self.command.first().map_or("", String::as_str);
        let file = Path::new(command).file_name();
        file.and_then(|name| name.to_str()).unwrap_or_default()
    }

    fn check(&self) -> Result<(), String> {
        let name = self.name();
        refuse_if(self.command.first().is_none_or(String::is_empty), || {
            "command: name a program".into()
        })?;
        refuse_if(!is_plain_name(name), || {
            format!("name = {name:?}: 1 to 64 letters, digits, - or _ (a folder is named after it)")
        })?;
        for (key, count) in [
            ("command", self.command.len()),
            ("env", self.env.len()),
            ("files", self.files.len()),
            ("packages", self.packages.len()),
        ] {
            refuse_if(count > WORDS_MAX, || format!("{key}: at most {WORDS_MAX}"))?;
        }
        for word in self.words() {
            refuse_if(word.contains('\0'), || {
                format!("{word:?}: no system takes a zero byte")
            })?;
        }
        for variable in self.env.keys() {
            refuse_if(variable.is_empty() || variable.contains('='), || {
                format!("env: {variable:?} cannot be a variable's name")
            })?;
        }
        for file in &self.files {
            refuse_if(file.file_name().is_none(), || {
                format!("files: {file:?} names no file")
            })?;
        }
        for package in &self.packages {
            refuse_if(!is_package(package), || {
                format!("packages: {package:?} cannot be a package's name")
            })?;
        }
        within("ready_within_s", self.ready_within_s, 1..=WAIT_MAX_S)?;
        if let Some(cgroup) = &self.cgroup {
            let guarantee_max = Share::GUARANTEE_MAX_MIB;
            within("cgroup.weight", cgroup.weight, 1..=Share::WEIGHT_MAX)?;
            within(
                "cgroup.guarantee_mib",
                cgroup.guarantee_mib,
                0..=guarantee_max,
            )?;
        }
        self.check_ready()?;
        self.check_figure()
    }

    /// All texts that are passed to the system.
    fn words(&self) -> impl Iterator<Item = &String> {
        let run = match &self.figure {
            Figure::Number(number) => &number.command[..],
            _ => &[],
        };
        let env = self.env.iter().flat_map(|(name, value)| [name, value]);
        self.command.iter().chain(run).chain(env)
    }

    fn check_ready(&self) -> Result<(), String> {
        match &self.ready {
            None => Ok(()),
            Some(Ready::Line(regex)) => {
                check_regex(regex, 0).map_err(|what| format!("ready.line: {what}"))
            }
            Some(Ready::Port(port)) => at_least_one("ready.port", (*port).into()),
            Some(Ready::AfterS(s)) => within("ready.after_s", *s, 0..=self.ready_within_s),
        }
    }

    fn check_figure(&self) -> Result<(), String> {
        let Figure::Number(number) = &self.figure else {
            return Ok(());
        };
        refuse_if(number.command.first().is_some_and(String::is_empty), || {
            "figure.number.command: name a program".into()
        })?;
        refuse_if(!(1..=UNIT_BYTES_MAX).contains(&number.unit.len()), || {
            "figure.number.unit: give one, as in \"requests/s\"".into()
        })?;
        check_regex(&number.regex, 1).map_err(|what| format!("figure.number.regex: {what}"))
    }
}

impl Programs {
    /// Whether some of them have cgroups.
    pub fn have_cgroups(&self) -> bool {
        self.programs.iter().any(|program| program.cgroup.is_some())
    }

    /// Time limit before the timed phase, seconds.
    pub fn start_limit_s(&self) -> u64 {
        let started = self.programs.iter().filter(|p| p.ready.is_some());
        started.map(|p| p.ready_within_s).sum::<u64>() + self.warm_up_s
    }
}

impl Parameters for Programs {
    fn size_mib(&self) -> u64 {
        self.size_mib
    }

    fn is_real(&self) -> bool {
        true
    }

    fn tells_hot_set(&self) -> bool {
        false
    }

    fn check(&self, _duration_s: u64) -> Result<(), String> {
        refuse_if(!(1..=PROGRAMS_MAX).contains(&self.programs.len()), || {
            format!("workload.program: give 1 to {PROGRAMS_MAX}")
        })?;
        let mut names = BTreeSet::new();
        for program in &self.programs {
            let name = program.name();
            program
                .check()
                .map_err(|what| format!("workload.program {name:?}: {what}"))?;
            refuse_if(!names.insert(name), || {
                format!("workload.program: two are called {name:?}; give one a name")
            })?;
        }
        for pair in self.programs.windows(2) {
            refuse_if(pair[0].ready.is_none() && pair[1].ready.is_some(), || {
                let (first, second) = (pair[0].name(), pair[1].name());
                format!(
                    "workload.program {second:?}: it waits to be ready but stands behind {first:?}, \
                     which starts with the timed phase: swap them, or say when {first:?} is ready"
                )
            })?;
        }
        refuse_if(
            self.programs.iter().all(|p| p.figure == Figure::None),
            || "workload.program: give one of them a figure other than \"none\"".into(),
        )?;
        within("workload.warm_up_s", self.warm_up_s, 0..=WAIT_MAX_S)
    }
}

/// Rejects an invalid regular expression, or one with too few groups.
fn check_regex(regex: &str, groups: usize) -> Result<(), String> {
    let parsed =
        Regex::new(regex).map_err(|e| format!("{regex:?} is no regular expression: {e}"))?;
    // The whole match counts as one.
    refuse_if(parsed.captures_len() <= groups, || {
        format!("{regex:?} has no group: put the number in parentheses, as in 'ops=([0-9.]+)'")
    })
}

/// Whether Debian's policy allows the package name, which is used in a command line.
fn is_package(name: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "+-.".contains(c);
    name.chars().all(is_plain) && name.starts_with(|c: char| c.is_ascii_alphanumeric())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Scenario, System, Workload};

    /// A scenario with these programs, if it is valid.
    fn checked(programs: &str) -> Result<Scenario, String> {
        let text = format!(
            "name = \"x\"\nduration_s = 9\nsystems = [\"none\"]\n[machine]\nvcpus = 1\n\
             fast = {{ usable_mib = 100, latency_ns = 80, bandwidth_gbps = 50 }}\n\
             slow = {{ usable_mib = 100, latency_ns = 250, bandwidth_gbps = 20 }}\n\
             [workload]\nkind = \"program\"\nsize_mib = 50\n{programs}"
        );
        let scenario: Scenario = toml::from_str(&text).map_err(|e| e.message().to_owned())?;
        scenario.check().map_err(|e| e.to_string())?;
        Ok(scenario)
    }

    #[test]
    fn a_server_and_its_clients() {
        let scenario = checked(
            r#"
            [[workload.program]]
            command = ["/usr/bin/redis-server", "--save", ""]
            packages = ["redis-server"]
            ready = { line = "Ready to accept" }
            figure = "none"
            cgroup = { weight = 3 }
            [[workload.program]]
            name = "load"
            command = ["kvload", "--seed", "{seed}"]
            ready = { after_s = 3 }
            figure = { number = { regex = 's  ([0-9.]+) Mops', unit = "Mops" } }
            [[workload.program]]
            command = ["stat"]
            figure = { number = { command = ["a", "b"], regex = "([0-9]+)", unit = "x/s", counter = true } }
            "#,
        )
        .unwrap();
        let Workload::Program(programs) = &scenario.workload else {
            panic!("{scenario:?}")
        };
        let names: Vec<&str> = programs.programs.iter().map(Program::name).collect();
        assert_eq!(names, ["redis-server", "load", "stat"]);
        assert_eq!(programs.start_limit_s(), 240);
        let share = Cgroup {
            guarantee_mib: 0,
            weight: 3,
        };
        assert_eq!(programs.programs[0].cgroup, Some(share));
        assert!(programs.have_cgroups());
        assert_eq!(scenario.footprint_mib(), 50);
        let text = toml::to_string(&scenario).unwrap();
        assert_eq!(toml::from_str::<Scenario>(&text).unwrap(), scenario);
    }

    #[test]
    fn each_fault_names_its_key() {
        let with = |keys: &str| format!("[[workload.program]]\ncommand = [\"x\"]\n{keys}");
        for (programs, key) in [
            (String::new(), "program"),
            ("[[workload.program]]\ncommand = []".into(), "command"),
            ("[[workload.program]]\ncommand = [\"a/..\"]".into(), "name"),
            (with("name = \"a b\""), "name"),
            (with("env = { \"A=B\" = \"1\" }"), "env"),
            (with("env = { A = \"\\u0000\" }"), "zero byte"),
            (with("files = [\"..\"]"), "files"),
            (with("packages = [\"-o=x\"]"), "packages"),
            (with("packages = [\"A b\"]"), "packages"),
            (with("ready = { line = \"(\" }"), "ready.line"),
            (with("ready = { port = 0 }"), "ready.port"),
            (with("ready = { after_s = 121 }"), "ready.after_s"),
            (with("ready_within_s = 0"), "ready_within_s"),
            (with("cgroup = { weight = 0 }"), "cgroup.weight"),
            (with("cgroup = { weight = 10001 }"), "cgroup.weight"),
            (
                with("cgroup = { guarantee_mib = 16777217 }"),
                "cgroup.guarantee_mib",
            ),
            (with("cgroup = { share = 3 }"), "share"),
            (
                with("figure = { number = { regex = \"x\", unit = \"y\" } }"),
                "no group",
            ),
            (
                with("figure = { number = { regex = \"(x)\", unit = \"\" } }"),
                "unit",
            ),
            (
                with("figure = { number = { command = [\"\"], regex = \"(x)\", unit = \"y\" } }"),
                "figure.number.command",
            ),
            (with("figure = \"none\""), "figure"),
            (with("figure = \"speed\""), "speed"),
            (with("") + "\n" + &with(""), "two are called \"x\""),
            (
                with("") + "\n" + &with("name = \"y\"\nready = { after_s = 1 }"),
                "stands behind \"x\"",
            ),
        ] {
            let said = checked(&programs).expect_err(&programs);
            assert!(said.contains(key), "{said:?} does not name {key}");
        }
    }

    #[test]
    fn nobody_knows_a_programs_hot_set() {
        let mut scenario = checked("[[workload.program]]\ncommand = [\"x\"]").unwrap();
        scenario.systems = vec![System::Oracle];
        assert!(scenario.check().unwrap_err().to_string().contains("oracle"));
    }
}
