//! The catalogue of systems, one row each.
//!
//! `--help`, error messages, `demeter systems`, the colours of pictures and the book's table come from here. Tests
//! check that simulator and lab have the systems that the rows assign to them.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A place where systems run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Place {
    /// On the simulator: `demeter run --on sim`.
    Sim,
    /// In the lab's VMs: `demeter run --on lab`.
    Lab,
    /// In the lab on a host and in its guest: `[machine] place = "host"`.
    Host,
    /// On this machine's own two nodes: `demeter run --on here`.
    Here,
    /// On a real guest, managed by `demeter guest`.
    Live,
}

/// The colour of a system in pictures.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[expect(missing_docs, reason = "the names say it")]
pub enum Color {
    Ink,
    Grey,
    Blue,
    Vermilion,
    Green,
    Purple,
    Orange,
    Sky,
}

/// The catalogue's entry for a system.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Row {
    /// The name that scenarios and the command line use.
    pub name: &'static str,
    /// Description in one line.
    pub about: &'static str,
    /// Its publication, or the first kernel that has it; empty for a yardstick.
    pub source: &'static str,
    /// Places where it runs.
    pub runs_on: &'static [Place],
    /// Its colour in pictures. Without one it gets a free colour.
    pub color: Option<Color>,
}

/// Declares [`System`] together with its rows.
macro_rules! catalogue {
    ($($system:ident {
        name: $name:literal,
        about: $about:literal,
        source: $source:literal,
        runs_on: $runs_on:expr,
        color: $color:expr,
    })+) => {
        /// The system that manages the tiers.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "&'static str")]
        pub enum System {
            $(#[doc = $about] $system,)+
        }

        impl System {
            /// All systems.
            pub const ALL: &[Self] = &[$(Self::$system),+];

            /// Its row of the catalogue.
            pub fn row(self) -> &'static Row {
                match self {
                    $(Self::$system => &Row {
                        name: $name,
                        about: $about,
                        source: $source,
                        runs_on: $runs_on,
                        color: $color,
                    },)+
                }
            }
        }
    };
}

use {Color as C, Place as P};

catalogue! {
    None {
        name: "none",
        about: "no management: pages stay where first touch put them",
        source: "",
        runs_on: &[P::Sim, P::Lab, P::Host, P::Here],
        color: Some(C::Grey),
    }
    Oracle {
        name: "oracle",
        about: "the hot set lies in fast memory from the start: the limit",
        source: "",
        runs_on: &[P::Sim, P::Lab, P::Host, P::Here],
        color: Some(C::Ink),
    }
    Linux {
        name: "linux",
        about: "Linux's own: numa_balancing=2, and demotion by reclaim",
        source: "Linux 6.7",
        runs_on: &[P::Sim, P::Lab, P::Here],
        color: Some(C::Vermilion),
    }
    Damon {
        name: "damon",
        about: "DAMON's migrate_hot and migrate_cold over physical memory",
        source: "Linux 6.11",
        runs_on: &[P::Sim, P::Lab],
        color: Some(C::Green),
    }
    LinuxDamonAuto {
        name: "linux-damon-auto",
        about: "DAMON that tunes itself by goals of the fast node's use",
        source: "Linux 6.16",
        runs_on: &[P::Sim],
        color: None,
    }
    LinuxPghot {
        name: "linux-pghot",
        about: "pghot on hint faults: a kernel thread promotes hot pages",
        source: "Linux patches, 2026",
        runs_on: &[P::Sim],
        color: None,
    }
    LinuxPghotIbs {
        name: "linux-pghot-ibs",
        about: "the same on samples of AMD's memory profiler",
        source: "Linux patches, 2026",
        runs_on: &[P::Sim],
        color: None,
    }
    LinuxInterleave {
        name: "linux-interleave",
        about: "fresh memory on both nodes by their bandwidth; no moves",
        source: "Linux 6.16",
        runs_on: &[P::Sim],
        color: None,
    }
    HLinux {
        name: "h-linux",
        about: "Linux's own in the host, on the hypervisor's process",
        source: "Linux 6.7",
        runs_on: &[P::Sim, P::Host],
        color: Some(C::Orange),
    }
    GLinux {
        name: "g-linux",
        about: "Linux's own in the guest, with a node of each tier",
        source: "Linux 6.7",
        runs_on: &[P::Host],
        color: Some(C::Vermilion),
    }
    GTpp {
        name: "g-tpp",
        about: "TPP in the guest's kernel: hint faults, early demotion",
        source: "TPP, ASPLOS 2023",
        runs_on: &[P::Sim],
        color: Some(C::Orange),
    }
    HTpp {
        name: "h-tpp",
        about: "TPP in the hypervisor, on second-level tables",
        source: "Demeter, SOSP 2025",
        runs_on: &[P::Sim],
        color: Some(C::Purple),
    }
    HTpp613 {
        name: "h-tpp-6.13",
        about: "the same on KVM of 6.13: it looks without a flush",
        source: "Linux 6.13",
        runs_on: &[P::Sim],
        color: None,
    }
    HTpp615 {
        name: "h-tpp-6.15",
        about: "the same on KVM of 6.15: it looks without the lock, too",
        source: "Linux 6.15",
        runs_on: &[P::Sim],
        color: None,
    }
    HDamon {
        name: "h-damon",
        about: "DAMON's migrate_hot and migrate_cold over the host's memory",
        source: "Linux 6.11",
        runs_on: &[P::Host],
        color: Some(C::Green),
    }
    HHistory {
        name: "h-history",
        about: "demeter host by histories of access bits, no agent",
        source: "this project",
        runs_on: &[P::Host],
        color: Some(C::Sky),
    }
    Memtis {
        name: "memtis",
        about: "Memtis in the guest's kernel: a histogram of samples",
        source: "Memtis, SOSP 2023",
        runs_on: &[P::Sim],
        color: Some(C::Green),
    }
    Nomad {
        name: "nomad",
        about: "Nomad in the guest's kernel: copies beside the program",
        source: "Nomad, OSDI 2024",
        runs_on: &[P::Sim],
        color: None,
    }
    Hemem {
        name: "hemem",
        about: "HeMem: a library that counts samples of each 2 MiB",
        source: "HeMem, SOSP 2021",
        runs_on: &[P::Sim],
        color: None,
    }
    Colloid {
        name: "colloid",
        about: "Colloid on HeMem's tracking: both tiers equally quick",
        source: "Colloid, SOSP 2024",
        runs_on: &[P::Sim],
        color: None,
    }
    ColloidTpp {
        name: "colloid-tpp",
        about: "Colloid on TPP's tracking: hot pages to the quicker tier",
        source: "Colloid, SOSP 2024",
        runs_on: &[P::Sim],
        color: None,
    }
    HybridTier {
        name: "hybridtier",
        about: "HybridTier: frequency and momentum in small filters",
        source: "HybridTier, ASPLOS 2025",
        runs_on: &[P::Sim],
        color: None,
    }
    Arms {
        name: "arms",
        about: "ARMS: moving averages and measured costs, no thresholds",
        source: "ARMS, arXiv 2508.04417",
        runs_on: &[P::Sim],
        color: None,
    }
    AltoLinux {
        name: "alto-linux",
        about: "Alto on Linux's tiering: marks less where misses overlap",
        source: "Alto, OSDI 2025",
        runs_on: &[P::Sim],
        color: None,
    }
    AltoTpp {
        name: "alto-tpp",
        about: "Alto on TPP: promotes less where misses overlap",
        source: "Alto, OSDI 2025",
        runs_on: &[P::Sim],
        color: None,
    }
    Pact {
        name: "pact",
        about: "PACT: pages weigh the stalls that they cause",
        source: "PACT, ASPLOS 2026",
        runs_on: &[P::Sim],
        color: None,
    }
    Nimble {
        name: "nimble",
        about: "Nimble in the guest's kernel: LRU lists, quick copies",
        source: "Nimble, ASPLOS 2019",
        runs_on: &[P::Sim],
        color: None,
    }
    XenHistory {
        name: "xen-history",
        about: "a history of accesses for each frame, in Xen",
        source: "Lee et al., MSPC 2013",
        runs_on: &[P::Sim],
        color: None,
    }
    Raminate {
        name: "raminate",
        about: "RAMinate in the hypervisor: written pages, VM paused",
        source: "RAMinate, SoCC 2016",
        runs_on: &[P::Sim],
        color: None,
    }
    Vtmm {
        name: "vtmm",
        about: "vTMM in the hypervisor: guest tables, temperatures",
        source: "vTMM, EuroSys 2023",
        runs_on: &[P::Sim],
        color: None,
    }
    HeteroOs {
        name: "heteroos",
        about: "HeteroOS: the hypervisor finds hot memory, guests move it",
        source: "HeteroOS, ISCA 2017",
        runs_on: &[P::Sim],
        color: None,
    }
    FlatMode {
        name: "flat-mode",
        about: "Intel's Flat Memory Mode: the controller exchanges lines",
        source: "Memstrata, OSDI 2024",
        runs_on: &[P::Sim],
        color: None,
    }
    Memstrata {
        name: "memstrata",
        about: "the same, and pages that are all fast go where they help",
        source: "Memstrata, OSDI 2024",
        runs_on: &[P::Sim],
        color: None,
    }
    Demeter {
        name: "demeter",
        about: "Demeter on hardware's samples",
        source: "this project",
        runs_on: &[P::Sim, P::Lab, P::Host, P::Here, P::Live],
        color: Some(C::Blue),
    }
    DemeterDamon {
        name: "demeter-damon",
        about: "Demeter on the DAMON tracker: what a stock cloud guest gets",
        source: "this project",
        runs_on: &[P::Sim, P::Lab, P::Host, P::Here, P::Live],
        color: Some(C::Purple),
    }
    DemeterWorker {
        name: "demeter-worker",
        about: "Demeter with a thread that polls for samples",
        source: "this project",
        runs_on: &[P::Sim],
        color: None,
    }
    DemeterBlocks {
        name: "demeter-blocks",
        about: "Plain counts for each 2 MiB, and the planner of `history`",
        source: "this project",
        runs_on: &[P::Sim],
        color: None,
    }
    DemeterSequential {
        name: "demeter-sequential",
        about: "Demeter promoting page by page; reclaim makes room",
        source: "this project",
        runs_on: &[P::Sim],
        color: None,
    }
    DemeterPaper {
        name: "demeter-paper",
        about: "Demeter as in its paper: ranges halved, pages exchanged",
        source: "Demeter, SOSP 2025",
        runs_on: &[P::Sim],
        color: None,
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sim => "sim",
            Self::Lab => "lab",
            Self::Host => "host",
            Self::Here => "here",
            Self::Live => "live",
        })
    }
}

impl Row {
    /// Its places, in words.
    pub fn places(&self) -> String {
        let places: Vec<String> = self.runs_on.iter().map(Place::to_string).collect();
        places.join(", ")
    }
}

impl System {
    /// Whether it can run in a place.
    pub fn runs_on(self, place: Place) -> bool {
        self.row().runs_on.contains(&place)
    }

    /// Whether the agent (`demeter guest`) manages memory.
    pub fn has_agent(self) -> bool {
        self.runs_on(Place::Live)
    }
}

impl fmt::Display for System {
    /// The name as in scenario files.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.row().name)
    }
}

impl From<System> for &'static str {
    fn from(system: System) -> Self {
        system.row().name
    }
}

impl FromStr for System {
    type Err = UnknownSystem;

    fn from_str(name: &str) -> Result<Self, UnknownSystem> {
        let named = Self::ALL.iter().find(|system| system.row().name == name);
        named.copied().ok_or_else(|| UnknownSystem(name.into()))
    }
}

impl TryFrom<String> for System {
    type Error = UnknownSystem;

    fn try_from(name: String) -> Result<Self, UnknownSystem> {
        name.parse()
    }
}

/// No system has this name.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("no system {0:?}: use {names}", names = names())]
pub struct UnknownSystem(String);

/// All names, for an error message.
fn names() -> String {
    let names: Vec<_> = System::ALL.iter().map(|system| system.row().name).collect();
    match names.split_last() {
        Some((last, others)) => format!("{} or {last}", others.join(", ")),
        None => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_means_one_system_on_the_command_line_and_in_a_file() {
        #[derive(Debug, PartialEq, Serialize, Deserialize)]
        struct Holder {
            systems: Vec<System>,
        }
        let all = Holder {
            systems: System::ALL.to_vec(),
        };
        for &system in System::ALL {
            assert_eq!(system.row().name.parse(), Ok(system));
        }
        let text = toml::to_string(&all).unwrap();
        assert_eq!(toml::from_str::<Holder>(&text).unwrap(), all);
    }

    #[test]
    fn an_unknown_name_is_answered_with_all_names() {
        let said = "tpp".parse::<System>().unwrap_err().to_string();
        assert!(
            said.starts_with("no system \"tpp\": use none, oracle, "),
            "{said}"
        );
        assert!(said.contains("demeter-damon"), "{said}");
    }

    #[test]
    fn every_system_runs_somewhere_and_is_described_in_a_line() {
        for system in System::ALL {
            let row = system.row();
            assert!(!row.runs_on.is_empty(), "{system}");
            assert!((10..=60).contains(&row.about.len()), "{system}");
        }
    }
}
