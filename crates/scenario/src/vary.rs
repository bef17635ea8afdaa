//! Scenarios with several cases: keys with several values.

use demeter_outcome::Figure;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use toml::{Table, Value};

use crate::fault::refuse_if;
use crate::grid::{Axis, Grid, Point};
use crate::{Error, Scenario, System};

/// Maximum number of cases; `demeter sweep` handles more.
const CASES_MAX: usize = 256;

/// One case of a scenario.
#[derive(Debug, Clone, PartialEq)]
pub struct Case {
    /// Index of its table in `vary`, from 0.
    pub group: usize,
    /// The scenario with the case's settings.
    pub point: Point,
}

/// A published figure about the scenario, shown beside the measured one.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Published {
    /// The figure of a result, such as `elapsed_s`, `counters.flush_total` or `cpu_s.track`.
    #[cfg_attr(feature = "schema", schemars(with = "String"))]
    pub figure: Figure,
    /// The system that it is about.
    pub system: System,
    /// If given, the value is the system's figure divided by this one's.
    #[serde(default)]
    pub over: Option<System>,
    /// Settings of its case, key and value as spelled in the result; the only case if empty.
    #[serde(default)]
    pub case: BTreeMap<String, String>,
    /// Settings of the divisor's case; the same case if empty.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub over_case: BTreeMap<String, String>,
    /// The published value.
    pub value: f64,
    /// Allowed difference of the measured value, as a share of it. A ratio must also be on the same side of 1, unless
    /// it was published within 5 % of 1.
    pub within: f64,
    /// The publication.
    pub source: String,
}

impl Scenario {
    /// The cases of this scenario: every combination of the values in each table of `vary`, in order.
    ///
    /// Without `vary` it is the scenario itself, without settings.
    ///
    /// # Errors
    /// The settings of a case make no valid scenario.
    pub fn cases(&self) -> Result<Vec<Case>, Error> {
        if self.vary.is_empty() {
            return Ok(vec![Case {
                group: 0,
                point: Point {
                    settings: vec![],
                    scenario: self.clone(),
                },
            }]);
        }
        let fault = |what: String| Error::Invalid {
            name: self.name.clone(),
            what,
        };
        let plain = Self {
            vary: vec![],
            published: vec![],
            ..self.clone()
        };
        let base = Table::try_from(&plain).map_err(|e| fault(e.to_string()))?;
        let mut cases = vec![];
        for (group, table) in self.vary.iter().enumerate() {
            let axes = table.iter().map(|(key, values)| match values {
                Value::Array(values) if !values.is_empty() => Ok(Axis::new(key, values.clone())),
                _ => Err(fault(format!(
                    "vary: {key} must be a list of values, such as [1, 2]"
                ))),
            });
            let axes = axes.collect::<Result<Vec<_>, _>>()?;
            let points = Grid::new(base.clone(), self.name.clone(), axes)?.points()?;
            cases.extend(points.into_iter().map(|point| Case { group, point }));
            if cases.len() > CASES_MAX {
                return Err(fault(format!(
                    "vary: more than {CASES_MAX} cases; use demeter sweep"
                )));
            }
        }
        Ok(cases)
    }

    /// Checks the cases and the published figures.
    pub(crate) fn check_vary(&self) -> Result<(), String> {
        if self.vary.is_empty() && self.published.is_empty() {
            return Ok(());
        }
        match self.cases() {
            Ok(cases) => self.check_published(&cases),
            Err(Error::Invalid { what, .. }) => Err(what),
            Err(other) => Err(other.to_string()),
        }
    }

    fn check_published(&self, cases: &[Case]) -> Result<(), String> {
        let all: Vec<_> = cases.iter().map(|case| case.point.texts()).collect();
        for published in &self.published {
            let count = |settings| all.iter().filter(|case| fits(settings, case)).count();
            let told = format!("published: {} of {}", published.figure, published.system);
            let about = count(&published.case);
            refuse_if(about != 1, || {
                format!("{told} is about {about} cases; its `case` must name one")
            })?;
            if published.over_case.is_empty() {
                continue;
            }
            let over = count(&published.over_case);
            refuse_if(over != 1 || published.over.is_none(), || {
                format!(
                    "{told} is divided by {over} cases; its `over` must name a system, and its \
                     `over_case` one case"
                )
            })?;
        }
        Ok(())
    }
}

impl Published {
    /// Whether it is about the case with these settings, as spelled in [`Point::texts`].
    pub fn is_about(&self, settings: &[(String, String)]) -> bool {
        fits(&self.case, settings)
    }

    /// Whether the case with these settings is the divisor's.
    pub fn is_over(&self, settings: &[(String, String)]) -> bool {
        if self.over_case.is_empty() {
            return self.is_about(settings);
        }
        fits(&self.over_case, settings)
    }
}

/// Whether a case has all of these settings.
fn fits(wanted: &BTreeMap<String, String>, settings: &[(String, String)]) -> bool {
    let among = |(key, value): (&String, &String)| {
        let same = |(k, v): &(String, String)| (k, v) == (key, value);
        settings.iter().any(same)
    };
    wanted.iter().all(among)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::tests::checked_with;

    fn scenario(vary: &str) -> Result<Scenario, String> {
        checked_with("kind = \"btree\", size_mib = 80", vary)
    }

    fn cases(vary: &str) -> Vec<String> {
        let cases = scenario(vary).unwrap().cases().unwrap();
        cases.iter().map(|case| case.point.to_string()).collect()
    }

    #[test]
    fn tables_follow_each_other_and_the_keys_of_one_are_combined() {
        assert_eq!(cases(""), [""]);
        assert_eq!(
            cases(
                "[[vary]]\n\"sim.vms\" = [1, 2]\n\"machine.thp\" = [\"never\"]\n\
                 [[vary]]\nduration_s = [3]"
            ),
            [
                "machine.thp=never sim.vms=1",
                "machine.thp=never sim.vms=2",
                "duration_s=3"
            ]
        );
    }

    #[test]
    fn a_whole_table_is_told_by_its_kind() {
        let vary = "[[vary]]\nworkload = [{ kind = \"btree\", size_mib = 60 }, \
                    { kind = \"silo\", size_mib = 60, mix = \"tpcc\" }]";
        assert_eq!(cases(vary), ["workload=btree", "workload=silo"]);
        let scenarios = scenario(vary).unwrap().cases().unwrap();
        assert_eq!(scenarios[1].point.scenario.workload.kind(), "silo");
        assert!(scenarios[1].point.scenario.vary.is_empty());
    }

    #[test]
    fn a_case_knows_its_table() {
        let vary = "[[vary]]\n\"sim.vms\" = [1, 2]\n[[vary]]\nduration_s = [3]";
        let cases = scenario(vary).unwrap().cases().unwrap();
        let groups: Vec<_> = cases.iter().map(|case| case.group).collect();
        assert_eq!(groups, [0, 0, 1]);
    }

    #[test]
    fn what_was_published_is_about_one_case() {
        let vary = "[[vary]]\n\"sim.vms\" = [1, 2]\nduration_s = [3, 4]\n";
        let published = |case: &str| {
            format!(
                "[[published]]\nfigure = \"elapsed_s\"\nsystem = \"none\"\nvalue = 1.0\n\
                 within = 0.1\nsource = \"a paper\"\ncase = {{ {case} }}"
            )
        };
        let with = |case: &str| scenario(&format!("{vary}{}", published(case)));
        assert!(with("\"sim.vms\" = \"2\", duration_s = \"3\"").is_ok());
        assert!(scenario(&published("")).is_ok());
        for (case, fits) in [
            ("", 4),
            ("duration_s = \"3\"", 2),
            ("duration_s = \"5\"", 0),
        ] {
            let said = with(case).unwrap_err();
            assert!(
                said.contains(&format!("elapsed_s of none is about {fits}")),
                "{said}"
            );
        }
    }

    #[test]
    fn a_figure_may_be_divided_by_that_of_another_case() {
        let with = |over: &str| {
            scenario(&format!(
                "[[vary]]\n\"sim.vms\" = [1, 2]\n[[published]]\nfigure = \"elapsed_s\"\n\
                 system = \"none\"\nvalue = 1.0\nwithin = 0.1\nsource = \"a paper\"\n\
                 case = {{ \"sim.vms\" = \"2\" }}\n{over}"
            ))
        };
        let one = |vms: &str| [("sim.vms".to_owned(), vms.to_owned())];
        let fine = with("over = \"none\"\nover_case = { \"sim.vms\" = \"1\" }").unwrap();
        assert!(fine.published[0].is_over(&one("1")) && !fine.published[0].is_over(&one("2")));
        let same = with("over = \"none\"").unwrap();
        assert!(same.published[0].is_over(&one("2")));
        for bad in [
            "over_case = { \"sim.vms\" = \"1\" }",
            "over = \"none\"\nover_case = { \"sim.vms\" = \"3\" }",
        ] {
            let said = with(bad).unwrap_err();
            assert!(said.contains("over_case"), "{said}");
        }
    }

    #[test]
    fn a_published_figure_that_no_result_has_is_refused() {
        let published = |figure: &str| {
            scenario(&format!(
                "[[published]]\nfigure = \"{figure}\"\nsystem = \"none\"\nvalue = 1.0\n\
                 within = 0.1\nsource = \"a paper\""
            ))
        };
        assert!(published("counters.flush_host_vcpu").is_ok());
        for figure in ["elapsed", "counters.flush_host_vpcu", "cpu_s.track+migrat"] {
            let said = published(figure).unwrap_err();
            assert!(
                said.contains(&format!("there is no figure {figure}: ")),
                "{said}"
            );
        }
    }
}
