//! Settings of a rival: documented parameters, under a name.

use serde::{Deserialize, Serialize};

use crate::fault::{refuse_if, within};
use crate::{Scenario, System, Thp};

/// Maximum number of settings in a scenario.
const SETTINGS_MAX: usize = 64;
/// Longest name of settings, characters.
const NAME_CHARS_MAX: usize = 80;
/// Longest interval, milliseconds.
const INTERVAL_MAX_MS: u32 = 600_000;
/// Highest amount that a rival may scan at once or move per second, MiB.
const RATE_MAX_MIB: u32 = 1 << 20;

/// Settings of one system. A system with several settings runs under each, and the table shows the best. A system
/// without any runs once, as its documentation recommends. Other parameters keep the kernel's defaults.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Settings {
    /// Name in tables, such as `small pages`.
    pub name: String,
    /// The system.
    pub system: System,
    /// Transparent huge pages, instead of the machine's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub thp: Option<Thp>,
    /// `linux`, `damon`: `vm.watermark_scale_factor`, the free memory at which kswapd wakes and sleeps, ten-thousandths
    /// of a node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub watermark_scale_factor: Option<u32>,
    /// `linux`: whether reclaim uses the multi-gen LRU (`/sys/kernel/mm/lru_gen/enabled`) or two lists; by default as
    /// the kernel boots.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub multi_gen_lru: Option<bool>,
    /// `linux`: memory that is unmapped for hint faults at once, MiB: `sched/numa_balancing/scan_size_mb` in debugfs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scan_size_mib: Option<u32>,
    /// `linux`: shortest time between two such scans, milliseconds: `scan_period_min_ms` there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scan_period_min_ms: Option<u32>,
    /// `linux`: longest time between two such scans, milliseconds: `scan_period_max_ms` there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scan_period_max_ms: Option<u32>,
    /// `linux`: maximum promotion rate, MiB per second: `kernel.numa_balancing_promote_rate_limit_MBps`. `damon`:
    /// maximum rate of either scheme.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate_mib_per_s: Option<u32>,
    /// `damon`: sampling interval, milliseconds. An aggregation takes twenty samples, the default. If not given, the
    /// intervals are tuned automatically where the kernel can.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sample_ms: Option<u32>,
}

impl Settings {
    /// Settings without any change.
    pub fn new(system: System, name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            system,
            thp: None,
            watermark_scale_factor: None,
            multi_gen_lru: None,
            scan_size_mib: None,
            scan_period_min_ms: None,
            scan_period_max_ms: None,
            rate_mib_per_s: None,
            sample_ms: None,
        }
    }

    fn check(&self) -> Result<(), String> {
        let key = |key: &str| format!("settings \"{}\": {key}", self.name);
        let is_named = (1..=NAME_CHARS_MAX).contains(&self.name.chars().count())
            && !self.name.chars().any(char::is_control);
        refuse_if(!is_named, || {
            format!(
                "settings: name = {:?}: give 1 to {NAME_CHARS_MAX} characters, as \"small pages\"",
                self.name
            )
        })?;
        let linux = matches!(self.system, System::Linux | System::HLinux | System::GLinux);
        let damon = matches!(self.system, System::Damon | System::HDamon);
        let knobs = [
            (
                "watermark_scale_factor",
                self.watermark_scale_factor,
                linux || damon,
                3000,
            ),
            ("scan_size_mib", self.scan_size_mib, linux, RATE_MAX_MIB),
            (
                "scan_period_min_ms",
                self.scan_period_min_ms,
                linux,
                INTERVAL_MAX_MS,
            ),
            (
                "scan_period_max_ms",
                self.scan_period_max_ms,
                linux,
                INTERVAL_MAX_MS,
            ),
            (
                "rate_mib_per_s",
                self.rate_mib_per_s,
                linux || damon,
                RATE_MAX_MIB,
            ),
            ("sample_ms", self.sample_ms, damon, INTERVAL_MAX_MS),
        ];
        let has = |name, is_known: bool| {
            refuse_if(!is_known, || {
                format!("{}: {} has no such knob; remove it", key(name), self.system)
            })
        };
        for (name, value, is_known, most) in knobs {
            let Some(value) = value else { continue };
            has(name, is_known)?;
            within(&key(name), value, 1..=most)?;
        }
        has("multi_gen_lru", linux || self.multi_gen_lru.is_none())?;
        let periods = self.scan_period_min_ms.zip(self.scan_period_max_ms);
        refuse_if(periods.is_some_and(|(min, max)| min > max), || {
            format!(
                "{} is above scan_period_max_ms: swap them",
                key("scan_period_min_ms")
            )
        })
    }
}

impl Scenario {
    /// The settings of all systems, in order: at least one for each system, without a name if the scenario has none.
    pub fn settings_to_run(&self) -> impl Iterator<Item = Settings> {
        self.systems.iter().flat_map(|&system| {
            let own = self.settings.iter().filter(|s| s.system == system);
            let own: Vec<Settings> = own.cloned().collect();
            if own.is_empty() {
                vec![Settings::new(system, "")]
            } else {
                own
            }
        })
    }

    /// The scenario with a system's settings applied; it keeps the ones that the system itself applies.
    pub fn under(&self, settings: &Settings) -> Self {
        let mut scenario = self.clone();
        scenario.machine.thp = settings.thp.unwrap_or(self.machine.thp);
        scenario
    }

    pub(crate) fn check_settings(&self) -> Result<(), String> {
        let count = self.settings.len();
        refuse_if(count > SETTINGS_MAX, || {
            format!("settings: {count} are more than {SETTINGS_MAX}; remove some")
        })?;
        refuse_if(count > 0 && self.provision.is_some(), || {
            "settings: systems that share a host's memory have none; remove them".into()
        })?;
        for (i, settings) in self.settings.iter().enumerate() {
            settings.check()?;
            let is_same = |s: &Settings| s.system == settings.system && s.name == settings.name;
            refuse_if(self.settings[..i].iter().any(is_same), || {
                format!(
                    "settings: \"{}\" of {} stands twice; rename one",
                    settings.name, settings.system
                )
            })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn a_system_runs_under_each_of_its_settings_or_once_as_it_is() {
        let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scenarios/ci.toml");
        let mut scenario = Scenario::load(&shipped).unwrap();
        scenario.systems = vec![System::None, System::Linux];
        let small = Settings {
            thp: Some(Thp::Never),
            ..Settings::new(System::Linux, "small")
        };
        // DAMON does not run, so its settings are not used.
        scenario.settings = vec![
            small.clone(),
            Settings::new(System::Damon, "often"),
            Settings::new(System::Linux, "huge"),
        ];
        scenario.check().unwrap();
        let runs: Vec<_> = scenario.settings_to_run().collect();
        let names: Vec<_> = runs.iter().map(|s| (s.system, s.name.as_str())).collect();
        assert_eq!(
            names,
            [
                (System::None, ""),
                (System::Linux, "small"),
                (System::Linux, "huge")
            ]
        );
        let thp = |settings| scenario.under(settings).machine.thp;
        assert_eq!([thp(&small), thp(&runs[0])], [Thp::Never, Thp::Always]);
    }
}
