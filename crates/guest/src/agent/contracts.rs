//! Memory that the agent leaves alone, because its owner has said where it belongs.
//!
//! # Problem
//! A program that binds memory to a node has a reason, and Linux' own balancing leaves such memory alone, too. Policies
//! of other processes stand in numa_maps only. For that file the kernel walks all page tables of the process: 2 us a
//! mapping, 0.1 us a small page (Linux 6.18 on a busy Zen). Meanwhile the process cannot map or unmap.
//!
//! # Approach
//! Each mapping is judged once, and memory that was not judged yet is left alone. All mappings of a process are judged
//! again when one of them is new, when the policy or cpuset of its first thread changes, and after [`AGAIN`]. A
//! [`Budget`] bounds the cost of all readings, so that large processes are read less often. The engine never knows of a
//! range that is left alone.
//!
//! # Properties
//! - Memory is left alone if its policy excludes a managed node or interleaves it, and so are the blocks at its borders.
//! - That holds within 10 s after the policy was set, while the budget lasts.
//! - A first reading happens within a few refreshes; all others take [`Budget::PART`] of one CPU's time.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use demeter_linux::policies::{NodeSet, Policy, allowed_nodes, policy_of_thread, read_policies};
use demeter_policy::{ByteCount, Pid, VirtRange};

use crate::maps::{MapsError, Vma};
use crate::targets::numbers_in;

/// Time after which mappings are judged again that look as they did.
const AGAIN: Duration = Duration::from_secs(6);

/// Age of judgements from which they are made again before pages move by them.
pub(super) const STALE: Duration = Duration::from_secs(8);

/// The longest reading. Mappings that it does not reach are left alone.
const PATIENCE: Duration = Duration::from_secs(5);

/// The most threads whose policies are read at once; of more, others have their turn next time.
const THREADS_MAX: usize = 1024;

/// The most mappings that are judged: what Linux allows a process by default. More are left alone.
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
    /// Its pages alternate between nodes.
    Interleaved,
    /// A policy that this agent does not know.
    UnknownPolicy,
    /// It takes pages from a pool that belongs to its node.
    HugeTlb,
    /// The process may not use one of the managed nodes.
    Cpuset,
}

impl Hold {
    /// Whether it is over with the next reading, probably.
    pub fn is_passing(self) -> bool {
        self == Self::Unread
    }

    /// The reason, for people: what follows "left alone: 80 MiB".
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

/// The configured rules.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rules {
    /// All nodes between which memory moves.
    pub managed: NodeSet,
    /// Whether policies of mappings and threads count. Cpusets always do: the kernel refuses anything else.
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

/// The time that readings of all processes may take.
#[derive(Debug, Default)]
pub(super) struct Budget {
    /// The rest; below zero after a reading that took more.
    left_ns: i64,
    earned_at: Duration,
    /// Time of this refresh's first readings.
    first_ns: u64,
}

impl Budget {
    /// Readings after a process's first take the time divided by this.
    pub const PART: i64 = 1000;

    /// The most that is saved up.
    const SAVED_MAX_NS: i64 = 50_000_000;

    /// The most that first readings take in a refresh, but for the last one.
    const FIRST_MAX_NS: u64 = 100_000_000;

    /// A refresh begins.
    pub fn begin(&mut self, now: Duration) {
        let passed = now.saturating_sub(self.earned_at).as_nanos();
        let earned = i64::try_from(passed).unwrap_or(i64::MAX) / Self::PART;
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

/// A mapping as it was when it was judged.
#[derive(Debug, Clone, Copy)]
struct Judged {
    range: VirtRange,
    hold: Option<Hold>,
    resident: ByteCount,
}

/// The contracts of one process.
#[derive(Debug, Default)]
pub(super) struct Contracts {
    /// By address.
    judged: Vec<Judged>,
    /// The kernel tells no policies: it has no NUMA.
    has_none: bool,
    /// Of the whole process.
    cpuset: Option<Hold>,
    /// Of memory without a policy of its own.
    threads: Option<Hold>,
    /// The first thread's, when mappings were judged last.
    first_thread: (Policy, NodeSet),
    /// Which threads have their turn.
    next_thread: usize,
    read_at: Option<Duration>,
}

impl Contracts {
    /// Whether it is time to judge mappings. `seen` are those that there are now, by address.
    pub fn are_due(&self, root: &Path, pid: Pid, seen: &[VirtRange], now: Duration) -> bool {
        let Some(read_at) = self.read_at else {
            return true;
        };
        now.saturating_sub(read_at) >= AGAIN
            || (!self.has_none && seen.len() <= JUDGED_MAX && self.has_news(seen))
            || first_thread(root, pid) != self.first_thread
    }

    /// Whether they are so old that no page may move by them, where reading them anew is affordable.
    pub fn are_stale(&self, budget: &Budget, now: Duration) -> bool {
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

    /// Judges all mappings, `seen` by address, as far as the budget allows; `took_ns` measures. Whether it did.
    ///
    /// # Errors
    /// The process has gone, or may not be looked at.
    pub fn read(
        &mut self,
        root: &Path,
        pid: Pid,
        seen: &[VirtRange],
        rules: &Rules,
        budget: &mut Budget,
        clock: &super::Clock,
    ) -> Result<bool, MapsError> {
        let is_first = self.read_at.is_none();
        if !budget.allows(is_first) {
            return Ok(false);
        }
        let began = clock.now();
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
            // A policy that is the first thread's, too, may be the mapping's own or not. If not, its pages lie where the
            // thread wanted them that touched them first.
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
        self.read_at = Some(began);
        budget.pay(is_first, clock.took_ns(began));
        Ok(true)
    }

    /// Reads what holds for all memory of a process, or for all that has no policy of its own: which is returned.
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
            // Of those that had their turn before something was found.
            hold = hold.or(self.threads);
            is_free = is_free && self.cpuset.is_none();
        }
        self.next_thread = self.next_thread.wrapping_add(THREADS_MAX);
        self.cpuset = (!is_free).then_some(Hold::Cpuset);
        self.threads = hold;
        hold
    }

    /// Why a mapping is left alone, and what of it is in memory, as far as known.
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

/// Whether a mapping is what was judged, or a part of it, or what it has grown to. The kernel joins only what has the same
/// policy.
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
mod live;
#[cfg(test)]
mod tests;
