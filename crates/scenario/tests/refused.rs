//! Tests of rejected scenarios: each error names the key and the fix.

use std::path::Path;

use demeter_scenario::Scenario;

/// Lines appended to `ci.toml`, joined by `&`, with the error.
const GUPS: &str = r#"
nmae = "x" -> nmae is no key of this table; did you mean `name`?
name = "../etc/passwd" -> name: 1 to 64 letters, digits, - or _
name = "" -> name: 1 to 64 letters
duration_s = 0 -> duration_s = 0: must be 1 to 3600
duration_s = "60" -> duration_s is "60"; give a whole number from 0 on
systems = [] -> systems: name at least one, such as "demeter"
systems = ["linux", "linux"] -> systems: "linux" stands twice; remove one
systems = ["tpp"] -> tpp
settings = [{ system = "linux", name = "" }] -> settings: name = "": give 1 to 80 characters
settings = [{ system = "linux", name = "a", scan_size_mib = 0 }] -> settings "a": scan_size_mib = 0: must be 1 to
settings = [{ system = "linux", name = "a", sample_ms = 5 }] -> settings "a": sample_ms: linux has no such knob; remove it
settings = [{ system = "damon", name = "a", scan_size_mib = 5 }] -> settings "a": scan_size_mib: damon has no such knob
settings = [{ system = "damon", name = "a", multi_gen_lru = true }] -> settings "a": multi_gen_lru: damon has no such knob
settings = [{ system = "linux", name = "a", scan_period_min_ms = 9, scan_period_max_ms = 8 }] -> is above scan_period_max_ms: swap them
settings = [{ system = "linux", name = "a" }, { system = "linux", name = "a" }] -> settings: "a" of linux stands twice; rename one
settings = [{ system = "linux", name = "a", thp = "maybe" }] -> = "maybe" is unknown; here are: 
machine.vcpus = 0 -> machine.vcpus = 0: must be 1 to 64
machine.vcpus = 65 -> machine.vcpus = 65: must be 1 to 64
machine.thp = "maybe" -> machine.thp = "maybe" is unknown; here are: always, madvise, never
machine.fast.usable_mib = 0 -> machine.fast.usable_mib = 0: must be 1 to 16777216
machine.fast.latency_ns = 0 -> machine.fast.latency_ns = 0: must be 1 to 1000000
machine.fast.bandwidth_gbps = 0 -> machine.fast.bandwidth_gbps = 0: must be 1 to 10000
machine.fast.mib = 1 -> machine.fast.mib is no key of this table; here are: usable_mib
machine.slow.usable_mib = 1 -> 200 MiB but both tiers hold 61 MiB: raise machine.slow.usable_mib or shrink
machine.slow.latency_ns = 79 -> is below machine.fast.latency_ns = 80: swap the tiers
machine.slow.bandwidth_gbps = 101 -> exceeds machine.fast.bandwidth_gbps = 100: swap the tiers
lab.dilation = 0 -> lab.dilation = 0: must be 1 to 1000
lab.timeout_s = 3601 -> lab.timeout_s = 3601: must be 1 to 3600
lab.dilatoin = 8 -> lab.dilatoin is no key of this table; did you mean `dilation`?
sim.cpu = "zen" -> sim.cpu = "zen" is unknown; did you mean `zen-3`?
sim.vms = 65 & sim.cores = 8 -> sim.vms = 65: at most 64 share cores
sim.vms = 0 -> sim.vms = 0: must be 1 to 1024
sim.cores = 0 -> sim.cores = 0: must be 1 to 1024
sim.operations = 0 -> sim.operations = 0: must be at least 1
sim.scale_bits = 10 -> sim.scale_bits = 10: must be 0 to 9
sim.slow_granule_bytes = 96 -> must be a power of two from 64 to 4096
sim.fast_others_gbps = 10001 -> sim.fast_others_gbps = 10001: must be 0 to 10000
sim.slow_others_gbps = 10001 -> sim.slow_others_gbps = 10001: must be 0 to 10000
sim.slow_write_gbps = 0 -> sim.slow_write_gbps = 0: must be 1 to 10000
agent.epoch_ms = 9 -> agent.epoch_ms = 9 is out of bounds; give 10 to 60000
agent.granularity_mib = 3 -> agent.granularity_mib = 3 is out of bounds; give a power of two
agent.alpha = "2" -> agent.alpha is "2"; give a number
agent.tracker = "perf" -> agent.tracker is no key of this table; here are: sample_period
workload.kind = "bush" -> "bush" is unknown; 
workload.size = 1 -> workload.size is no key of this table; here are: size_mib
workload.size_mib = 0 -> workload.size_mib = 0: must be at least 1
workload.hot_mib = 0 -> workload.hot_mib = 0: must be at least 1
workload.hot_mib = 200 -> workload.hot_mib = 200: must be below workload.size_mib = 200
workload.hot_weight = 1.01 -> workload.hot_weight = 1.01: must be 0 to 1
workload.hot_weight = nan -> workload.hot_weight = NaN: must be 0 to 1
workload.threads = 0 -> workload.threads = 0: must be 1 to 64
workload.in_flight = 0 -> workload.in_flight = 0: must be 1 to 64
workload.shift_at_s = 0 -> shift_at_s = 0: must be at least 1 and below duration_s = 20
workload.shift_at_s = 20 -> shift_at_s = 20: must be at least 1 and below duration_s = 20
workload.shift_at_s = 9 & workload.hot_mib = 101 -> workload.hot_mib = 101: with shift_at_s it must be at most half of size_mib = 200
workload.shift_at_s = 9 & workload.phases = [{ at_s = 1, hot_mib = 1 }] -> workload.shift_at_s and workload.phases exclude each other: remove one
workload.phases = [{ at_s = 20, hot_mib = 1 }] -> workload.phases: at_s = 20: must be above 0
workload.phases = [{ at_s = 5, hot_mib = 1 }, { at_s = 5, hot_mib = 2 }] -> workload.phases: at_s = 5: must be above 5, as phases follow in order of time
workload.phases = [{ at_s = 5, hot_mib = 200 }] -> hot_mib = 200: must be below size_mib = 200
workload = { kind = "btree", size_mib = 15 } -> size_mib = 15: must be at least 16
workload = { kind = "btree", size_mib = 80, hot_mib = 1 } -> workload.hot_mib is no key of this table
workload = { kind = "silo", size_mib = 80 } -> workload.mix is missing; add it
workload = { kind = "silo", size_mib = 80, mix = "ycsb", drift_s = 0 } -> workload.drift_s = 0: must be at least 1
workload = { kind = "silo", size_mib = 80, mix = "tpcc", drift_s = 1 } -> workload.drift_s: only mix = "ycsb" has it
workload = { kind = "silo", size_mib = 80, mix = "ycsb", theta = 2.0 } -> workload.theta = 2: must be 0 to 1.5
workload = { kind = "silo", size_mib = 80, mix = "tpcc", theta = 0.0 } -> workload.theta: only mix = "ycsb" has it
workload = { kind = "memlat", size_mib = 0, cold_mib = 1 } -> workload.size_mib = 0: must be at least 1
workload = { kind = "memlat", size_mib = 2, cold_mib = 9_000_000_000_000_000_000 } -> raise machine.slow.usable_mib or shrink the workload
workload = { kind = "trace", file = "" } -> workload.file: name a trace
[[vary]] & "sim.vms" = 3 -> vary: sim.vms must be a list of values, such as [1, 2]
[[vary]] & "sim.vms" = [1, 0] -> with sim.vms=0: sim.vms = 0: must be 1 to 1024
[[vary]] & "sim.vsm" = [1] -> with sim.vsm=1: sim.vsm is no key of this table; did you mean `vms`?
[[vary]] & "agent.alhpa" = [2] -> with agent.alhpa=2: agent.alhpa is no key of this table; did you mean `alpha`?
[[vary]] & "name.x" = [2] -> name.x: name is a value, not a table
"#;

/// Lines appended to `rebalance.toml`, with the error.
const REBALANCE: &str = r#"
provision.swing = 1 -> provision.swing is no key of this table; here are: provisioners
provision.provisioners = [] -> provision.provisioners: name at least one, such as "demeter
provision.provisioners = ["balloon"] -> no provisioner "balloon": use static, demeter-balloon, virtio-mem, virtio-balloon
provision.provisioners = ["static"] -> "static" cannot follow the policy "shares": use virtio-mem or demeter-balloon
provision.provisioners = ["virtio-balloon"] -> "virtio-balloon" cannot follow the policy "shares"
provision.provisioners = ["virtio-balloon"] & provision.policies = ["static"] -> provision.provisioners: virtio-balloon is compared in a single VM
provision.through = [] -> provision.through: name at least one, such as "qmp"
provision.through = ["qmp", "qmp"] -> provision.through: "qmp" stands twice; remove one
provision.through = ["xen"] -> provision.through = "xen" is unknown; 
provision.through = ["libvirt"] & provision.provisioners = ["static"] -> provision.through: "libvirt" does not go with "static": use what changes
provision.policies = [] -> provision.policies: name at least one, such as "static"
provision.policies = ["magic"] -> provision.policies = "magic" is unknown; 
provision.policies = ["wss", "wss"] -> provision.policies: "wss" stands twice; remove one
systems = ["linux", "demeter"] -> systems: with provision exactly one, unless
systems = ["linux"] -> "wss" needs the agent's estimate of the working set
provision.vms = [{ name = "a", hot_mib = 1 }] -> list two or more in provision.vms
provision.vms = [{ name = "a", hot_mib = 1 }, { name = "a", hot_mib = 1 }] -> provision.vms: two are named "a"; rename one
provision.vms = [{ name = "a/b", hot_mib = 1 }, { name = "a", hot_mib = 1 }] -> provision.vms: name: 1 to 64 letters
provision.vms = [{ name = "a", hot_mib = 1, share = 0 }, { name = "b", hot_mib = 1 }] -> provision.vms: a: share must be at least 1
provision.vms = [{ name = "a", hot_mib = 1 }, { name = "b", hot_mib = 360 }] -> provision.vms: b: workload.hot_mib = 360: must be below workload.size_mib = 360
workload = { kind = "memlat", size_mib = 9, cold_mib = 9 } -> only the scenario's gups has a hot set to vary: remove
provision.vms = [{ name = "a", hot_mib = 1, workload = { kind = "btree", size_mib = 16 } }, { name = "b" }] -> provision.vms: a: only the scenario's gups has a hot set
provision.vms = [{ name = "a", workload = { kind = "btree", size_mib = 1 } }, { name = "b" }] -> provision.vms: a: workload.size_mib = 1: must be at least 16
provision.vms = [{ name = "a", workload = { kind = "btree", size_mib = 90000 } }, { name = "b" }] -> provision.vms: a: the workload touches 90000 MiB
provision.vms = [{ name = "a", workload = { kind = "memlat", size_mib = 9, cold_mib = 9 } }, { name = "b" }] -> provision.vms: a: memlat has latencies
provision.vms = [{ name = "a", workload = { kind = "bush" } }, { name = "b" }] -> "bush" is unknown; 
provision.crashes = { cycles = 0, recovery_s = 60 } -> provision.crashes.cycles = 0: must be 1 to 100000
provision.crashes = { cycles = 1, recovery_s = 60 } -> provision.crashes: needs provisioners = ["demeter-balloon"], no resize_cycle, no vms
provision.soak = { round_s = 0, resize_s = 1 } -> provision.soak.round_s = 0: must be at least 1
provision.soak = { round_s = 1, resize_s = 1 } -> provision.soak: needs provisioners = ["demeter-balloon"], policies = ["static"], no resize_cycle, no crashes
provision.resize_cycle = { fast_mib = 10, from_s = 200, every_s = 100 } -> grows at 200 s and shrinks back at 300 s, which must be below duration_s = 300
provision.resize_cycle = { fast_mib = 0, from_s = 1, every_s = 1 } -> provision.resize_cycle.fast_mib = 0: must be at least 1
"#;

/// The same over `topo-two-sockets.toml`.
const NODES: &str = r#"
machine.vcpus = 3 -> machine.vcpus = 3: must be a multiple of the 2 sockets of machine.node
machine.fast = { usable_mib = 1, latency_ns = 1, bandwidth_gbps = 1 } -> machine.fast: the nodes ([[machine.node]]) say what memory there is
machine.node = [] -> machine.fast is missing: give both tiers, or the nodes
machine.place = "host" -> machine.node: a host has a fast and a slow tier
provision = { provisioners = ["virtio-mem"], policies = ["static"] } -> machine.node: memory of such a machine is not provisioned
workload.size_mib = 400 -> the workload touches 800 MiB but the lasting nodes hold 640 MiB: raise machine.node.usable_mib
workload.copies = 17 -> workload.copies = 17: must be 1 to 16
workload.bind = [4] -> workload.bind: the machine has no node 4 with memory: name one of its 4 nodes from 0 on
workload.bind = [0] & workload.interleave = [0, 2] -> workload.bind and workload.interleave exclude each other
workload.cpuset = [9] -> workload.cpuset: the machine has no node 9
workload.shared_by = 0 -> workload.shared_by = 0: must be 1 to 64
workload.reserve_mib = 300_000 -> workload.reserve_mib = 300000: must be 0 to 262144
"#;

#[test]
fn each_refusal_names_the_key_and_the_hint() {
    let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scenarios");
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("bad.toml");
    for (below, rows) in [
        ("ci.toml", GUPS),
        ("rebalance.toml", REBALANCE),
        ("topo-two-sockets.toml", NODES),
    ] {
        let below = shipped.join(below);
        for (text, says) in rows
            .trim()
            .lines()
            .map(|row| row.split_once(" -> ").unwrap())
        {
            let text = text.replace(" & ", "\n");
            std::fs::write(&path, format!("extends = {below:?}\n{text}\n")).unwrap();
            let said = Scenario::load(&path).expect_err(&text).to_string();
            assert!(
                said.contains(says),
                "{text}: {said:?} does not say {says:?}"
            );
        }
    }
}
