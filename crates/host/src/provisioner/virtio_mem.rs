//! Sizing by virtio-mem: each node of the guest has devices that plug and unplug memory.
//!
//! It works on stock guests (Linux 5.8 on x86-64), in steps of a device's blocks. QEMU discards a
//! block before it reports a smaller size, so a size decrease is memory that has returned to the
//! host.

use std::time::Duration;

use demeter_policy::{ByteCount, NodeId, PerTier, Tier, TierBytes};
use tokio::time::{Instant, timeout_at};

use super::{Progress, ProvisionError, Provisioner};
use crate::hypervisor::{Answer, Hypervisor, HypervisorError, MemoryDevice};

/// Poll interval of sizes, because QEMU limits its size events to one a second.
pub(super) const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Time reserved before the deadline for the last answer, even on a slow machine.
pub(super) const LAST_LOOK: Duration = Duration::from_millis(500);

/// The virtio-mem devices of one VM.
#[derive(Debug)]
pub struct VirtioMem<H> {
    hypervisor: H,
    nodes: PerTier<NodeId>,
    /// Memory of each node outside its devices.
    base: TierBytes,
}

impl<H: Hypervisor> VirtioMem<H> {
    /// Finds the devices of a VM. `memdev` names the backends of its boot memory, for nodes that
    /// have some.
    pub async fn find(
        hypervisor: H,
        nodes: PerTier<NodeId>,
        memdev: &PerTier<Option<String>>,
        deadline: Instant,
    ) -> Result<Self, ProvisionError> {
        let backends = within(&hypervisor, deadline, hypervisor.backends()).await?;
        let mut base = TierBytes::default();
        for tier in Tier::ALL {
            let Some(memdev) = memdev.get(tier) else {
                continue;
            };
            let backend = backends.iter().find(|b| b.id.as_ref() == Some(memdev));
            *base.get_mut(tier) = backend
                .ok_or_else(|| {
                    ProvisionError::Refused(format!(
                        "QEMU has no memory backend {memdev:?}, which the configuration names for {tier} memory"
                    ))
                })?
                .size;
        }
        let found = Self {
            hypervisor,
            nodes,
            base,
        };
        for tier in Tier::ALL {
            found.devices(tier, deadline).await?;
        }
        Ok(found)
    }

    /// The named devices of a tier.
    async fn devices(&self, tier: Tier, deadline: Instant) -> Result<Vec<Device>, ProvisionError> {
        let node = *self.nodes.get(tier);
        let all = within(&self.hypervisor, deadline, self.hypervisor.memory_devices()).await?;
        let mut devices = vec![];
        for info in all.into_iter().filter(|device| device.node == node) {
            let id = info.id.clone().ok_or_else(|| {
                ProvisionError::Refused(format!(
                    "a virtio-mem device of node {node} has no name; give its -device an id="
                ))
            })?;
            devices.push(Device { id, info });
        }
        if devices.is_empty() {
            return Err(ProvisionError::Refused(format!(
                "QEMU has no virtio-mem device for the guest's node {node} ({tier} memory); add -device virtio-mem-pci,node={node},.."
            )));
        }
        devices.sort_by(|a, b| a.id.cmp(&b.id));
        Ok(devices)
    }

    fn owned(&self, tier: Tier, devices: &[Device]) -> ByteCount {
        let plugged = devices.iter().map(|device| device.info.size);
        ByteCount(plugged.fold(self.base.get(tier).0, |sum, size| {
            sum.saturating_add(size.0)
        }))
    }

    /// Waits until the guest has fulfilled the last request, or until the deadline.
    async fn settle(&self, tier: Tier, deadline: Instant) -> Result<Settled, ProvisionError> {
        loop {
            let change = self.hypervisor.size_change();
            let devices = self.devices(tier, deadline).await?;
            let done = devices.iter().all(|d| d.info.size == d.info.requested);
            let now = Instant::now();
            if done || now + LAST_LOOK >= deadline {
                return Ok(Settled { devices, done });
            }
            let _ = timeout_at(now + LOOK_EVERY, change).await;
        }
    }
}

struct Device {
    id: String,
    info: MemoryDevice,
}

struct Settled {
    devices: Vec<Device>,
    done: bool,
}

impl<H: Hypervisor> Provisioner for VirtioMem<H> {
    fn name(&self) -> &'static str {
        "virtio-mem"
    }

    async fn actual(&mut self, deadline: Instant) -> Result<TierBytes, ProvisionError> {
        let fast = self.devices(Tier::Fast, deadline).await?;
        let slow = self.devices(Tier::Slow, deadline).await?;
        Ok(TierBytes {
            fast: self.owned(Tier::Fast, &fast),
            slow: self.owned(Tier::Slow, &slow),
        })
    }

    async fn set(
        &mut self,
        tier: Tier,
        target: ByteCount,
        deadline: Instant,
    ) -> Result<Progress, ProvisionError> {
        let before = self.devices(tier, deadline).await?;
        let owned_before = self.owned(tier, &before);
        let mut left = target.0.saturating_sub(self.base.get(tier).0);
        for device in &before {
            let share = left.min(device.info.max.0);
            let share = share - share % device.info.block.0.max(1);
            left -= share;
            if device.info.requested.0 != share {
                let request = self.hypervisor.request_size(&device.id, ByteCount(share));
                within(&self.hypervisor, deadline, request).await?;
            }
        }
        let Settled { devices, done } = self.settle(tier, deadline).await?;
        let owned = self.owned(tier, &devices);
        let base = *self.base.get(tier);
        let reason = if !done && owned > target {
            Some("the guest does not leave more of it: it is in use".into())
        } else if !done {
            Some("the guest does not take more of it".into())
        } else if target < base {
            Some(format!("{base} of it belongs to no virtio-mem device"))
        } else if devices.iter().all(|d| d.info.size == d.info.max) && owned < target {
            Some("its virtio-mem devices are not larger".into())
        } else {
            // The target lies within a block, so it cannot be reached exactly.
            None
        };
        Ok(Progress {
            owned,
            returned_to_host: ByteCount(owned_before.0.saturating_sub(owned.0)),
            reason,
        })
    }
}

/// An answer of the hypervisor, which must come by `deadline`.
pub(super) async fn within<T>(
    hypervisor: &impl Hypervisor,
    deadline: Instant,
    answer: impl Answer<T>,
) -> Result<T, ProvisionError> {
    match timeout_at(deadline, answer).await {
        Ok(Err(HypervisorError::Timeout(_))) | Err(_) => {
            Err(ProvisionError::Timeout(hypervisor.name()))
        }
        Ok(answer) => Ok(answer?),
    }
}
