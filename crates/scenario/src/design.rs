//! Compares the designs of the systems, for `docs/src/systems.md`.

use crate::System;

/// How a system manages tiers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Design {
    /// Where it runs.
    pub place: &'static str,
    /// How it observes accesses.
    pub tracks: &'static str,
    /// Which memory counts as hot.
    pub classifies: &'static str,
    /// How it moves pages.
    pub moves: &'static str,
}

impl System {
    /// Its design; `None` for yardsticks and for our own variants.
    #[expect(clippy::too_many_lines, reason = "a table with a row for each system")]
    pub fn design(self) -> Option<Design> {
        let [place, tracks, classifies, moves] = match self {
            Self::Linux => [
                "guest kernel",
                "hint faults",
                "fault within 1 s of its mark",
                "in the fault; reclaim demotes by generations",
            ],
            Self::LinuxDamonAuto => [
                "guest kernel",
                "accessed bits of 10 to 1,000 regions a node, each 5 ms to 10 s",
                "any access in an aggregation, the hottest first",
                "at most 200 MiB a second; quotas tuned to 99.7 % used and 0.5 % free",
            ],
            Self::LinuxPghot => [
                "guest kernel",
                "hint faults",
                "2 faults within 3 s; a byte for each frame",
                "a thread, each 100 ms, batches of 512; reclaim demotes",
            ],
            Self::LinuxPghotIbs => [
                "guest kernel",
                "IBS, one sample for 10,000 misses",
                "2 samples within 3 s; a byte for each frame",
                "as linux-pghot",
            ],
            Self::LinuxInterleave => [
                "guest kernel",
                "nothing",
                "nothing",
                "nothing; fresh memory goes to both nodes by weights of 32",
            ],
            Self::GTpp => [
                "guest kernel",
                "hint faults",
                "fault while on the active list",
                "in the fault; reclaim keeps a tenth free",
            ],
            Self::HLinux => [
                "hypervisor",
                "hint faults in the VMM, EPT accessed bits",
                "fault within 1 s of its mark",
                "in the exit; an `invept` for each marked range, and for each set bit that reclaim finds",
            ],
            Self::HTpp => [
                "hypervisor",
                "EPT faults, EPT accessed bits",
                "fault while on the active list",
                "in the exit; `invept` for each bit and move",
            ],
            Self::HTpp613 => [
                "hypervisor",
                "as h-tpp, bits without a flush",
                "as h-tpp",
                "as h-tpp",
            ],
            Self::HTpp615 => [
                "hypervisor",
                "as h-tpp, bits without flush or lock",
                "as h-tpp",
                "as h-tpp",
            ],
            Self::Memtis => [
                "guest kernel",
                "PEBS, period 199 to 19,997",
                "histogram in 16 bins; halved each 2 M samples",
                "a thread, each 500 ms",
            ],
            Self::Nomad => [
                "guest kernel",
                "hint faults",
                "128 candidates: active and accessed again",
                "copies while mapped; shadows make clean demotion a remap",
            ],
            Self::Hemem => [
                "library",
                "PEBS, period 5,003; a core spins",
                "8 samples of 2 MiB; halved above 18",
                "a thread, each 10 ms, 4 copiers",
            ],
            Self::Colloid => [
                "library",
                "as hemem, and the memory controllers' counters",
                "samples of 2 MiB",
                "what shifts the traffic until latencies are equal",
            ],
            Self::ColloidTpp => [
                "guest kernel",
                "as g-tpp, and the memory controllers' counters; a core spins",
                "as g-tpp",
                "as g-tpp; while fast memory is slower what is hot goes down",
            ],
            Self::HybridTier => [
                "library",
                "PEBS, 100,001 a second and CPU; none while nothing is left to move",
                "counting Bloom filters: frequency 5 or momentum 3 (huge pages: 1,000 or 200)",
                "promotes after 100,000 samples; demotes below 1.25 % free until 5 %",
            ],
            Self::Arms => [
                "library",
                "PEBS, period 10,007, after a jump 5,003; a core spins",
                "averages over 1 s and 10 s; the hottest that fit",
                "each 500 ms, where it saves 1.5 times its measured cost",
            ],
            Self::AltoLinux => [
                "guest kernel",
                "as linux, and counters of reads that are outstanding",
                "as linux",
                "as linux; 0 to 16 sixteenths of memory are marked",
            ],
            Self::AltoTpp => [
                "guest kernel",
                "as g-tpp, and counters of reads that are outstanding",
                "as g-tpp",
                "as g-tpp; 0 to 10 of ten candidates go up",
            ],
            Self::Pact => [
                "daemon",
                "PEBS on slow memory, period 400; counters of stalls, each 20 ms",
                "stalls by samples; the top one of 20 adaptive bins",
                "a thread, at most 4,096 pages a call; reclaim demotes",
            ],
            Self::Nimble => [
                "guest kernel",
                "accessed bits, each second",
                "active and inactive lists",
                "as many up as down, 4 copiers, batches of 16",
            ],
            Self::XenHistory => [
                "hypervisor",
                "accessed bits, each 100 ms of run time",
                "22 ones in a history of 32 bits",
                "mirrored tables; 40 MB/s at most",
            ],
            Self::Raminate => [
                "hypervisor",
                "EPT dirty bits, each second",
                "8 levels by log2 of updates; 5 s a level",
                "VM paused each 5 s, at most 1,000 pairs",
            ],
            Self::Vtmm => [
                "hypervisor",
                "accessed bits of the guest's tables that PML logged, each second",
                "accesses in the last 32 scans, sorted in buckets",
                "hottest for coldest; fast memory is a pool for all VMs",
            ],
            Self::HeteroOs => [
                "hypervisor and guest kernel",
                "accessed bits of the guest's tables, 16,384 pages each 500 ms",
                "10 ones in a history of 32 bits",
                "a list of 256,000 that the guest reads and promotes; its reclaim demotes",
            ],
            Self::FlatMode => [
                "memory controller",
                "each access",
                "the line that was accessed last, of two that share a place",
                "lines exchanged on a miss",
            ],
            Self::Memstrata => [
                "memory controller and hypervisor",
                "each access; time lost to misses of each VM, each 10 s",
                "VMs that lose more than 5 %",
                "as flat-mode; dedicated pages of others to these VMs, a tenth in 10 s",
            ],
            Self::DemeterPaper => [
                "guest kernel",
                "PEBS by latency, at context switches",
                "ranges of addresses, halved where hot",
                "pages exchanged in place, each 500 ms",
            ],
            Self::Demeter => [
                "guest, no kernel change",
                "PEBS by latency, at context switches",
                "ranges of addresses",
                "batches of `move_pages`, demotion first",
            ],
            _ => return None,
        };
        Some(Design {
            place,
            tracks,
            classifies,
            moves,
        })
    }
}
