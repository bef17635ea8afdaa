//! Counts of TLB invalidations by origin and extent.

/// TLB invalidations, as Linux and KVM count them. A flush of a scaled page counts for all its real pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FlushCounts {
    /// Single addresses that a guest invalidated on the current CPU (`nr_tlb_local_flush_one`).
    pub guest_local_one: u64,
    /// Full flushes of a guest on the current CPU (`nr_tlb_local_flush_all`).
    pub guest_local_all: u64,
    /// Shootdowns that a guest sent to its other CPUs (`nr_tlb_remote_flush`).
    pub guest_remote: u64,
    /// Flushes that the hypervisor made on a virtual CPU's behalf (KVM's `tlb_flush`).
    pub host_vcpu: u64,
    /// Flushes by `invept` that the hypervisor ordered (KVM's `remote_tlb_flush`).
    pub host_invept: u64,
}

impl FlushCounts {
    /// The sum of all counts.
    pub fn total(&self) -> u64 {
        self.guest_local_one
            + self.guest_local_all
            + self.guest_remote
            + self.host_vcpu
            + self.host_invept
    }

    /// Adds another set of counts.
    pub fn add(&mut self, other: &Self) {
        self.guest_local_one += other.guest_local_one;
        self.guest_local_all += other.guest_local_all;
        self.guest_remote += other.guest_remote;
        self.host_vcpu += other.host_vcpu;
        self.host_invept += other.host_invept;
    }

    /// The counts with their names in results.
    pub fn by_name(&self) -> [(&'static str, u64); 5] {
        [
            ("flush_guest_local_one", self.guest_local_one),
            ("flush_guest_local_all", self.guest_local_all),
            ("flush_guest_remote", self.guest_remote),
            ("flush_host_vcpu", self.host_vcpu),
            ("flush_host_invept", self.host_invept),
        ]
    }
}
