//! Formats the probe's report for people.

use std::fmt::{self, Display, Formatter};

use demeter_policy::ByteCount;

use super::{BalloonReport, NodeOrder, ProbeReport, TrackerReport};

impl Display for ProbeReport {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "kernel         {}, {}, pages of {}",
            or_unknown(&self.kernel),
            self.architecture,
            or_unknown(&self.page_bytes.map(ByteCount))
        )?;
        for node in &self.nodes {
            writeln!(f, "{node}")?;
        }
        match &self.order {
            Some(order) => write!(f, "{order}")?,
            None => writeln!(f, "tiers          none")?,
        }
        // Without the lab its tracker is missing, which is no fault of this machine.
        let concerns = |it: &&TrackerReport| it.name != "lab" || it.works || it.is_taken;
        for tracker in self.trackers.iter().filter(concerns) {
            writeln!(f, "tracker {:<6} {tracker}", tracker.name)?;
        }
        let permissions = &self.permissions;
        writeln!(
            f,
            "permissions    CAP_SYS_NICE {}, CAP_SYS_PTRACE {}, CAP_PERFMON {}, CAP_SYS_ADMIN {}, \
             perf_event_paranoid {}",
            yes_no(permissions.sys_nice),
            yes_no(permissions.sys_ptrace),
            yes_no(permissions.perfmon),
            yes_no(permissions.sys_admin),
            or_unknown(&permissions.perf_event_paranoid),
        )?;
        writeln!(f, "huge pages     {}", or_unknown(&self.thp))?;
        writeln!(
            f,
            "kernel tiering numa_balancing {}, demotion {}; DAMON {}{}",
            or_unknown(&self.numa_balancing),
            or_unknown(&self.demotion_enabled.map(yes_no)),
            yes_no(self.damon),
            match &self.damon_owner {
                Some(owner) => format!(", in use by {owner}"),
                None => String::new(),
            },
        )?;
        writeln!(f, "balloon        {}", self.balloon)?;
        for advice in &self.advice {
            writeln!(f, "{advice}")?;
        }
        if self.advice.iter().all(|advice| !advice.blocks) {
            writeln!(f, "Demeter can work here.")?;
        }
        Ok(())
    }
}

impl Display for NodeOrder {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "tiers          {} (nodes, the fastest first; {})",
            self.tiers,
            self.decided_by.join(", ")
        )?;
        for (node, why) in &self.left_alone {
            writeln!(f, "left alone     node {node}: {why}")?;
        }
        Ok(())
    }
}

impl Display for BalloonReport {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let port = if self.port { "a" } else { "no" };
        match &self.why_not {
            None => write!(f, "the driver is loaded")?,
            Some(why_not) => write!(f, "no driver: {why_not}")?,
        }
        write!(f, "; there is {port} port to the host")
    }
}

impl Display for TrackerReport {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match (&self.why_not, &self.hint) {
            (None, _) => write!(f, "works"),
            (Some(why_not), _) if self.is_taken => write!(f, "taken: {why_not}"),
            (Some(why_not), _) if self.waits_for_statistic => write!(
                f,
                "can work: {why_not}; the agent turns that off while it works (take_damon)"
            ),
            (Some(why_not), None) => write!(f, "no: {why_not}"),
            (Some(why_not), Some(hint)) => {
                write!(f, "no: {why_not}\n               hint: {hint}")
            }
        }
    }
}

fn or_unknown(value: &Option<impl Display>) -> String {
    value
        .as_ref()
        .map_or_else(|| "unknown".into(), ToString::to_string)
}

fn yes_no(value: bool) -> &'static str {
    if value { "yes" } else { "no" }
}
