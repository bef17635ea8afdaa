//! Tests that VMs which sample on shared cores see only their own samples.

use std::sync::{Arc, Mutex};

use demeter_policy::{ByteCount, GuestVirtAddr, MIB, PAGE_SIZE, VirtRange};
use demeter_scenario::{Scenario, System};
use proptest::prelude::*;

use crate::machine::sampler::{Record, Sampling};
use crate::program::{Access, Batch, Program, Region};
use crate::setup::WorldSetup;
use crate::system::{Manager, build};

/// Memory of each program. All programs use equal addresses.
const BYTES: u64 = 8 * MIB;

/// A program that first touches every page, and then only pages whose number is `own` modulo `all`.
struct Stripe {
    own: u64,
    all: u64,
    base: u64,
    touched: u64,
    next: u64,
}

impl Program for Stripe {
    fn regions(&self) -> Vec<Region> {
        vec![Region {
            name: "stripes".into(),
            bytes: ByteCount(BYTES),
            start: ByteCount(BYTES),
            process: 0,
        }]
    }

    fn place(&mut self, bases: &[GuestVirtAddr]) {
        self.base = bases[0].0;
    }

    fn threads(&self) -> usize {
        2
    }

    fn populate(&mut self, page_bytes: u64, out: &mut Batch) -> bool {
        while out.room() > 0 && self.touched < BYTES {
            out.push(Access::store(GuestVirtAddr(self.base + self.touched)));
            self.touched += page_bytes;
        }
        !out.accesses().is_empty()
    }

    fn next(&mut self, _thread: usize, _now_ns: u64, out: &mut Batch) {
        let stripes = BYTES / PAGE_SIZE / self.all;
        while out.room() > 0 {
            let page = self.next % stripes * self.all + self.own;
            let within = self.next / stripes * 64 % PAGE_SIZE;
            let at = self.base + page * PAGE_SIZE + within;
            out.push(Access::load(GuestVirtAddr(at)));
            out.ops += 1;
            self.next += 1;
        }
    }

    fn hot(&self, _now_ns: u64) -> Vec<VirtRange> {
        vec![]
    }

    fn compute_ps(&self, _thread: usize) -> u64 {
        1000
    }
}

/// A manager that stores its samples.
#[derive(Debug)]
struct Listener {
    period: u64,
    has_worker: bool,
    heard: Arc<Mutex<Vec<GuestVirtAddr>>>,
}

impl Manager for Listener {
    fn sampling(&self, _k: u32) -> Option<Sampling> {
        Some(Sampling {
            period: self.period,
            threshold_ps: 0,
        })
    }

    fn has_worker(&self) -> bool {
        self.has_worker
    }

    fn take_samples(&mut self, records: &[Record]) {
        let heard = records.iter().map(|record| record.gva);
        self.heard.lock().unwrap().extend(heard);
    }
}

fn setup(vms: u64, cores: u32) -> WorldSetup {
    let text = format!(
        r#"
        name = "isolation"
        duration_s = 1
        systems = ["none"]
        [machine]
        vcpus = 2
        fast = {{ usable_mib = 16, latency_ns = 80, bandwidth_gbps = 100 }}
        slow = {{ usable_mib = 16, latency_ns = 250, bandwidth_gbps = 20 }}
        [workload]
        kind = "gups"
        size_mib = 16
        hot_mib = 8
        hot_weight = 0.9
        [sim]
        vms = {vms}
        cores = {cores}
        scale_bits = 0
        "#
    );
    let scenario: Scenario = toml::from_str(&text).unwrap();
    WorldSetup::new(&scenario).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    /// Some VMs sample, each with its own period, and some do not. Cores change hands within periods, with records in
    /// the buffer.
    #[test]
    fn no_record_reaches_another_vm(
        periods in prop::collection::vec(prop::option::of(1u64..3000), 2..5),
        has_worker: bool,
        cores in 1u32..6,
    ) {
        let vms = periods.len() as u64;
        let setup = setup(vms, cores);
        let stripe = |own| Stripe { own, all: vms, base: 0, touched: 0, next: 0 };
        let programs = (0..vms).map(stripe).collect();
        let mut world = setup.world(build(System::None), programs);
        let mut all_heard = vec![];
        for (vm, period) in world.vms.iter_mut().zip(&periods) {
            let heard = Arc::new(Mutex::new(vec![]));
            all_heard.push(heard.clone());
            if let Some(period) = *period {
                vm.manager = Box::new(Listener { period, has_worker, heard });
            }
        }
        world.start(false).unwrap();
        // Context switches drain the buffers ten times a second.
        world.run_until(200_000_000_000).unwrap();
        for (own, (vm, heard)) in world.vms.iter().zip(&all_heard).enumerate() {
            let heard = heard.lock().unwrap();
            prop_assert_eq!(heard.is_empty(), periods[own].is_none());
            for gva in &*heard {
                let page = (gva.0 - vm.program.base) / PAGE_SIZE;
                prop_assert_eq!(page % vms, own as u64);
            }
        }
    }
}
