//! Finds memory that the agent must leave alone because of its NUMA policy.
//!
//! # Problem
//! A program that binds memory to a node has a reason, and Linux' NUMA balancing leaves such memory alone, too. The
//! policies of other processes can be read in numa_maps only. To write that file, the kernel walks all page tables of
//! the process: 2 us a mapping, 0.1 us a small page (Linux 6.18 on a busy Zen). Meanwhile the process cannot map or
//! unmap.
//!
//! # Approach
//! Each mapping is judged once, and memory that was not judged yet is left alone. All mappings of a process are judged
//! again when a new one appears, when the policy or cpuset of its first thread changes, and after [`AGAIN`]. A
//! [`ReadingBudget`] bounds the cost of all readings, so that large processes are read less often. The engine never sees a
//! range that is left alone.
//!
//! # Properties
//! - Memory is left alone if its policy excludes or interleaves a managed node. So are the blocks at its borders.
//! - A new policy takes effect within 10 s, while the budget lasts.
//! - A process is first read within a few refreshes. All later readings take [`ReadingBudget::DIVISOR`] of one CPU's time.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use demeter_linux::policies::{NodeSet, Policy, allowed_nodes, policy_of_thread, read_policies};
use demeter_policy::{ByteCount, Pid, VirtRange};

use crate::maps::{MapsError, Vma};
use crate::targets::numbers_in;

/// Time after which unchanged mappings are judged again.
const AGAIN: Duration = Duration::from_secs(6);

/// Age at which judgements are renewed before pages move.
pub(super) const STALE: Duration = Duration::from_secs(8);

/// Time limit of one reading. Mappings that it does not reach are left alone.
const PATIENCE: Duration = Duration::from_secs(5);

/// Threads whose policies one reading looks at. Further threads are read next time.
const THREADS_MAX: usize = 1024;

/// Mappings judged per process: Linux' default limit of mappings. Further ones are left alone.
const JUDGED_MAX: usize = 1 << 16;

/// Why memory is left alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Hold {
    /// Its policy was not read yet.
    Unread,
    /// Its owner allows it on some of the managed nodes only.
    Bound,
    /// Its owner prefers some of the managed nodes.
    Preferred,
    /// Its pages are interleaved between nodes.
    Interleaved,
    /// A policy that this agent does not know.
    UnknownPolicy,
    /// It takes pages from a pool that belongs to its node.
    HugeTlb,
    /// The process may not use one of the managed nodes.
    Cpuset,
}

impl Hold {
    /// Whether the next reading will probably lift it.
    pub fn is_passing(self) -> bool {
        self == Self::Unread
    }

    /// The reason for people, as it follows "left alone: 80 MiB".
    pub fn why(self) -> &'static str {
        match self {
            Self::Unread => "whose memory policy is not read yet",
            Self::Bound => "bound by its owner",
            Self::Preferred => "that its owner prefers on certain nodes",
            Self::Interleaved => "interleaved by its owner",
            Self::UnknownPolicy => "with a memory policy that is not known",
            Self::HugeTlb => "of reserved huge pages",
            Self::Cpuset => "of a process whose cpuset excludes a node",
        }
    }
}

/// The configured rules for memory with a policy.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rules {
    /// All nodes between which memory moves.
    pub managed: NodeSet,
    /// Whether policies of mappings and threads count. Cpusets always count, since the kernel enforces them.
    pub respect_policies: bool,
}

impl Rules {
    fn hold(&self, policy: Policy) -> Option<Hold> {
        if !self.respect_policies {
            return None;
        }
        let allows_all = |nodes: NodeSet| nodes.includes(self.managed);
        match policy {
            Policy::Default => None,
            Policy::Bind(nodes) => (!allows_all(nodes)).then_some(Hold::Bound),
            Policy::Preferred(nodes) => (!allows_all(nodes)).then_some(Hold::Preferred),
            Policy::Interleaved => Some(Hold::Interleaved),
            Policy::Unknown => Some(Hold::UnknownPolicy),
        }
    }
}

/// CPU time for reading the policies of all processes.
#[derive(Debug, Default)]
pub(super) struct ReadingBudget {
    /// Time left; negative after a reading that took longer.
    left_ns: i64,
    earned_at: Duration,
    /// Time that first readings took in this refresh.
    first_ns: u64,
}

impl ReadingBudget {
    /// Later readings take this part of the time: one in `DIVISOR`.
    pub const DIVISOR: i64 = 1000;

    /// The most time that can be saved up.
    const SAVED_MAX_NS: i64 = 50_000_000;

    /// A refresh starts no further first reading after this time.
    const FIRST_MAX_NS: u64 = 100_000_000;

    /// Starts a refresh, and adds its part of the time since the last one.
    pub fn begin(&mut self, now: Duration) {
        let passed = now.saturating_sub(self.earned_at).as_nanos();
        let earned = i64::try_from(passed).unwrap_or(i64::MAX) / Self::DIVISOR;
        self.left_ns = self.left_ns.saturating_add(earned).min(Self::SAVED_MAX_NS);
        self.earned_at = now;
        self.first_ns = 0;
    }

    fn allows(&self, is_first: bool) -> bool {
        match is_first {
            true => self.first_ns < Self::FIRST_MAX_NS,
            false => self.left_ns >= 0,
        }
    }

    fn pay(&mut self, is_first: bool, took_ns: u64) {
        match is_first {
            true => self.first_ns += took_ns,
            false => {
                let took = i64::try_from(took_ns).unwrap_or(i64::MAX);
                self.left_ns = self.left_ns.saturating_sub(took);
            }
        }
    }
}

/// A mapping as it was when judged.
#[derive(Debug, Clone, Copy)]
struct Judged {
    range: VirtRange,
    hold: Option<Hold>,
    resident: ByteCount,
}

/// The judgements of one process's mappings.
#[derive(Debug, Default)]
pub(super) struct Contracts {
    /// Sorted by address.
    judged: Vec<Judged>,
    /// The kernel has no NUMA, so there are no policies.
    has_none: bool,
    /// The cpuset's reason to leave the whole process alone.
    cpuset: Option<Hold>,
    /// The reason for memory without a policy of its own.
    threads: Option<Hold>,
    /// Policy of the first thread when mappings were last judged.
    first_thread: (Policy, NodeSet),
    /// The first thread to read next time.
    next_thread: usize,
    read_at: Option<Duration>,
}

impl Contracts {
    /// Whether to judge the mappings again. `seen` are the present mappings, by address.
    pub fn are_due(&self, root: &Path, pid: Pid, seen: &[VirtRange], now: Duration) -> bool {
        let Some(read_at) = self.read_at else {
            return true;
        };
        now.saturating_sub(read_at) >= AGAIN
            || (!self.has_none && seen.len() <= JUDGED_MAX && self.has_news(seen))
            || first_thread(root, pid) != self.first_thread
    }

    /// Whether judgements are too old to move pages by, and the budget allows to renew them.
    pub fn are_stale(&self, budget: &ReadingBudget, now: Duration) -> bool {
        self.read_at
            .is_none_or(|at| now.saturating_sub(at) >= STALE)
            && budget.allows(false)
    }

    fn has_news(&self, seen: &[VirtRange]) -> bool {
        let known = |range: &VirtRange| {
            self.judged
                .binary_search_by_key(&range.start(), |judged| judged.range.start())
                .is_ok_and(|at| self.judged[at].range == *range)
        };
        !seen.iter().all(known)
    }

    /// Judges all mappings (`seen`, by address) if the budget allows. Returns whether it did.
    ///
    /// # Errors
    /// The process has ended, or cannot be inspected.
    pub fn read(
        &mut self,
        root: &Path,
        pid: Pid,
        seen: &[VirtRange],
        rules: &Rules,
        budget: &mut ReadingBudget,
        clock: &super::Clock,
    ) -> Result<bool, MapsError> {
        let is_first = self.read_at.is_none();
        if !budget.allows(is_first) {
            return Ok(false);
        }
        let began = clock.start();
        self.first_thread = first_thread(root, pid);
        let threads = self.read_threads(root, pid, rules);
        let mut judged = Vec::with_capacity(seen.len().min(JUDGED_MAX));
        let read = read_policies(root, pid, PATIENCE, |found| {
            let at = seen.binary_search_by_key(&found.start, VirtRange::start);
            let Some(&range) = at.ok().and_then(|at| seen.get(at)) else {
                return;
            };
            if judged.len() == JUDGED_MAX {
                return;
            }
            // A policy equal to the first thread's may be the mapping's own. If it is not, the policy is that of the
            // thread that first touched the pages.
            let of_threads = threads.filter(|_| found.policy == self.first_thread.0);
            let hold = match found.is_hugetlb {
                true => Some(Hold::HugeTlb),
                false => rules.hold(found.policy).or(of_threads),
            };
            judged.push(Judged {
                range,
                hold,
                resident: found.resident,
            });
        });
        self.has_none = match read {
            Err(MapsError::Gone(_)) => true,
            whole => {
                whole?;
                false
            }
        };
        self.judged = judged;
        self.read_at = Some(began.elapsed);
        budget.pay(is_first, super::nanoseconds(clock.since(began).cpu));
        Ok(true)
    }

    /// Reads the cpuset, and returns the reason that holds for memory without a policy.
    fn read_threads(&mut self, root: &Path, pid: Pid, rules: &Rules) -> Option<Hold> {
        let (policy, nodes) = self.first_thread;
        let mut hold = rules.hold(policy);
        let mut is_free = nodes.includes(rules.managed);
        let threads = numbers_in(&root.join(format!("proc/{pid}/task"))).unwrap_or_default();
        let count = threads.len();
        let turn = threads.iter().cycle().skip(self.next_thread % count.max(1));
        for &thread in turn.take(count.min(THREADS_MAX)) {
            hold = hold.or_else(|| rules.hold(policy_of_thread(root, pid, thread)));
            is_free = is_free && allowed_nodes(root, pid, thread).includes(rules.managed);
        }
        if count > THREADS_MAX {
            // The result of threads that were read in earlier turns.
            hold = hold.or(self.threads);
            is_free = is_free && self.cpuset.is_none();
        }
        self.next_thread = self.next_thread.wrapping_add(THREADS_MAX);
        self.cpuset = (!is_free).then_some(Hold::Cpuset);
        self.threads = hold;
        hold
    }

    /// Why a mapping is left alone, and how much of it is resident, if known.
    pub fn judge(&self, vma: &Vma) -> Option<(Hold, ByteCount)> {
        let found = self.overlapping(&vma.range);
        let bytes = match found {
            [] => vma.range.len(),
            found => ByteCount(found.iter().map(|judged| judged.resident.0).sum()),
        };
        let hold = match self.cpuset {
            Some(hold) => Some(hold),
            None if self.has_none => None,
            None if !is_of(&vma.range, found) => Some(Hold::Unread),
            None => found.iter().find_map(|judged| judged.hold),
        };
        hold.map(|hold| (hold, bytes))
    }

    fn overlapping(&self, range: &VirtRange) -> &[Judged] {
        let first = self
            .judged
            .partition_point(|judged| judged.range.end() <= range.start());
        let found = &self.judged[first..];
        let count = found.partition_point(|judged| judged.range.start() < range.end());
        &found[..count]
    }
}

/// Whether a mapping is a judged one, a part of it, or has grown from it. The kernel merges mappings of equal policy
/// only.
fn is_of(range: &VirtRange, judged: &[Judged]) -> bool {
    let [first, .., last] = judged else {
        return judged.first().is_some_and(|one| {
            let (start, end) = (one.range.start(), one.range.end());
            let is_part = start <= range.start() && range.end() <= end;
            is_part || start == range.start() || end == range.end()
        });
    };
    let is_whole = judged
        .windows(2)
        .all(|pair| pair[0].range.end() == pair[1].range.start());
    let covers = first.range.start() <= range.start() && range.end() <= last.range.end();
    (is_whole && covers) || first.range.start() == range.start() || last.range.end() == range.end()
}

fn first_thread(root: &Path, pid: Pid) -> (Policy, NodeSet) {
    (
        policy_of_thread(root, pid, pid.0),
        allowed_nodes(root, pid, pid.0),
    )
}

/// Bytes that are left alone, by reason.
pub(super) type LeftAlone = BTreeMap<Hold, ByteCount>;

#[cfg(test)]
mod cost;
#[cfg(test)]
mod live;
#[cfg(test)]
mod tests;
