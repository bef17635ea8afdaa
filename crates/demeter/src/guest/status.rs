//! The agent's status as text.

use demeter_guest::status::{LeftAlone, Status, TargetStatus};
use demeter_policy::MIB;
use demeter_proto::shown;

use crate::host::status::share;

/// The output of `demeter guest status`: the agent, its tiers, its moves and a line for each process.
pub fn text(status: &Status) -> String {
    let state = match (status.paused, status.is_resting) {
        (true, _) => "paused",
        (false, true) => "resting: earlier moves saved less than they cost",
        (false, false) => "running",
    };
    let mut text = format!(
        "demeter {}, {state}, tracker {}\n",
        shown(&status.version),
        shown(&status.tracker)
    );
    for (number, tier) in (1..).zip(&status.tiers) {
        let nodes: Vec<_> = tier.nodes.iter().map(u32::to_string).collect();
        text += &format!(
            "tier {number}: node {}, {} MiB, {} ns a load\n",
            nodes.join(","),
            tier.bytes / MIB,
            tier.latency_ns
        );
    }
    let hit = status.fast_hit_permille;
    let hit = share(hit.map(|permille| f64::from(permille) / 1000.0));
    text += &format!(
        "in use: {} MiB in fast memory, {} MiB in slow memory; {hit} of accesses to fast memory, {} MiB of it free\n",
        status.working_set_fast_bytes / MIB,
        status.working_set_slow_bytes / MIB,
        status.fast_free_bytes / MIB,
    );
    text += &format!(
        "moves: {} MiB promoted, {} MiB demoted, {} MiB made huge; they took {:.1} s and saved {:.1} s (estimated)\n",
        status.promoted_bytes / MIB,
        status.demoted_bytes / MIB,
        status.collapsed_bytes / MIB,
        status.moves_cost_ms as f64 / 1000.0,
        status.moves_benefit_ms as f64 / 1000.0,
    );
    for (reason, bytes) in &status.failed_bytes {
        text += &format!(
            "did not move: {} MiB, {}\n",
            bytes.div_ceil(MIB),
            shown(reason)
        );
    }
    if status.balloon_wants_bytes > 0 {
        let wanted = status.balloon_wants_bytes.div_ceil(MIB);
        text += &format!("the host waits for {wanted} MiB of fast memory\n");
    }
    if let Some(error) = &status.last_error {
        text += &format!("last error: {}\n", shown(error));
    }
    text += "     pid  fast MiB  slow MiB  command\n";
    for target in &status.targets {
        text += &line(target);
    }
    text
}

fn line(target: &TargetStatus) -> String {
    let mut line = format!(
        "{:>8}  {:>8}  {:>8}  {}\n",
        target.pid,
        target.fast_bytes / MIB,
        target.slow_bytes / MIB,
        shown(&target.comm)
    );
    for LeftAlone { bytes, why } in &target.left_alone {
        let what = match bytes {
            Some(bytes) => format!("{} MiB", bytes.div_ceil(MIB)),
            None => "all of it".into(),
        };
        line += &format!("{:>8}  {what} left alone: {}\n", "", shown(why));
    }
    if target.ranges_left_out > 0 {
        line += &format!(
            "{:>8}  its {} smallest mappings are left alone\n",
            "", target.ranges_left_out
        );
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn state_problems_and_processes_are_there() {
        let mut status = Status {
            version: "1".into(),
            tracker: "damon".into(),
            promoted_bytes: 5 * MIB,
            last_error: Some("no\x1b[2Jluck".into()),
            failed_bytes: [("EBUSY".to_owned(), 1)].into(),
            targets: vec![TargetStatus {
                pid: 7,
                comm: "db".into(),
                fast_bytes: 3 * MIB,
                left_alone: vec![LeftAlone {
                    bytes: Some(1),
                    why: "bound to node 1".into(),
                }],
                ..TargetStatus::default()
            }],
            ..Status::default()
        };
        let told = text(&status);
        for part in [
            "running",
            "tracker damon",
            "5 MiB promoted",
            "did not move: 1 MiB, EBUSY",
            "       7         3         0  db",
            "1 MiB left alone: bound to node 1",
        ] {
            assert!(told.contains(part), "{part} is not in {told}");
        }
        assert!(
            !told.contains('\x1b'),
            "control characters are shown as such"
        );
        status.is_resting = true;
        assert!(text(&status).contains("resting"));
        status.paused = true;
        assert!(text(&status).contains("paused"));
    }
}
