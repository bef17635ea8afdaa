//! The sampling unit (PEBS) of a virtual CPU: one record for every `period` loads above a latency threshold.
//!
//! # Isolation
//! A record never leaves the VM of its load. The buffer is the guest's own memory. The CPU writes to the guest-virtual
//! address in the guest's debug store (`IA32_DS_AREA`), through the guest's and the hypervisor's tables. That address
//! and the counters' controls are switched on VM entry and exit (KVM's list of switched registers, since Linux 6.0).
//! Loads of other VMs and the host are therefore never sampled. In the simulator a unit belongs to a virtual CPU, not
//! to a core; `vm/isolation.rs` tests this with VMs that share cores.

use demeter_policy::GuestVirtAddr;

/// Number of records in the hardware's buffer of 64 KiB.
pub(crate) const BUFFER_RECORDS: usize = 1000;

/// A sampled load.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) gva: GuestVirtAddr,
}

/// Settings of a sampling unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sampling {
    /// Qualifying loads per record; at least 1.
    pub period: u64,
    /// Minimum latency of a qualifying load. Hits of the first cache level and TLB never qualify.
    pub threshold_ps: u64,
}

/// The sampling unit of one virtual CPU. It is off until [`Self::start`].
#[derive(Debug, Clone)]
pub(crate) struct Sampler {
    threshold_ps: u64,
    period: u64,
    /// Number of real loads per simulated load.
    weight: u64,
    left: u64,
    buffer: Vec<Record>,
}

impl Sampler {
    /// A unit that is off; each simulated load stands for `2^k` real ones.
    pub(crate) fn new(k: u32) -> Self {
        Self {
            threshold_ps: u64::MAX,
            period: u64::MAX,
            weight: 1 << k,
            left: u64::MAX,
            buffer: Vec::with_capacity(BUFFER_RECORDS),
        }
    }

    /// Starts sampling. The first record comes after `phase` loads of a period (0 to `period - 1`), so that cores do
    /// not sample in step.
    pub(crate) fn start(&mut self, sampling: Sampling, phase: u64) {
        self.period = sampling.period.max(1);
        self.threshold_ps = sampling.threshold_ps;
        self.left = 1 + phase % self.period;
    }

    /// Stops sampling. Records in the buffer stay.
    pub(crate) fn stop(&mut self) {
        self.threshold_ps = u64::MAX;
    }

    /// Counts a load; returns true if it wrote a record.
    #[inline(always)]
    pub(crate) fn load(&mut self, gva: GuestVirtAddr, latency_ps: u64) -> bool {
        if latency_ps < self.threshold_ps {
            return false;
        }
        if self.left > self.weight {
            self.left -= self.weight;
            return false;
        }
        self.left = (self.left + self.period).saturating_sub(self.weight).max(1);
        if self.buffer.len() < BUFFER_RECORDS {
            self.buffer.push(Record { gva });
        }
        true
    }

    /// Whether the buffer is full, which makes the hardware interrupt.
    #[inline]
    pub(crate) fn is_full(&self) -> bool {
        self.buffer.len() >= BUFFER_RECORDS
    }

    /// Number of records in the buffer.
    pub(crate) fn waiting(&self) -> usize {
        self.buffer.len()
    }

    /// Takes all records out.
    pub(crate) fn drain(&mut self) -> std::vec::Drain<'_, Record> {
        self.buffer.drain(..)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn records(k: u32, period: u64, loads: u64) -> u64 {
        let mut sampler = Sampler::new(k);
        sampler.start(
            Sampling {
                period,
                threshold_ps: 100,
            },
            0,
        );
        let mut n = 0;
        for _ in 0..loads >> k {
            n += u64::from(sampler.load(GuestVirtAddr(1), 100));
            sampler.drain().for_each(drop);
        }
        n
    }

    proptest! {
        /// The unit writes one record per period, for any weight of a load.
        #[test]
        fn one_record_per_period(k in 0u32..6, period in 64u64..10_000) {
            let loads = 1 << 17;
            prop_assert!(records(k, period, loads).abs_diff(loads / period) <= 2 + loads / period / 32);
        }
    }

    #[test]
    fn fast_loads_do_not_count_and_a_full_buffer_loses() {
        let mut sampler = Sampler::new(0);
        assert!(!sampler.load(GuestVirtAddr(1), u64::MAX - 1));
        sampler.start(
            Sampling {
                period: 1,
                threshold_ps: 100,
            },
            0,
        );
        assert!(!sampler.load(GuestVirtAddr(1), 99));
        for _ in 0..BUFFER_RECORDS + 5 {
            sampler.load(GuestVirtAddr(1), 100);
        }
        assert!(sampler.is_full());
        assert_eq!(sampler.drain().count(), BUFFER_RECORDS);
        assert_eq!(sampler.waiting(), 0);
    }
}
