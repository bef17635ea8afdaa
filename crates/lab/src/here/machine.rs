//! Checks whether this machine can run a scenario, and selects its nodes and CPUs.

use std::fs;
use std::path::{Path, PathBuf};

use demeter_guest::nodes::{Topology, parse_list};
use demeter_guest::tracker::{Choice, Settings, choose};
use demeter_policy::{NodeId, Pid};
use demeter_scenario::{Place, Scenario, System};

use crate::cpus;
use crate::error::Error;
use crate::inside::zones::node_free_mib;

/// Maximum number of processes searched for another agent.
const PROCESSES_MAX: usize = 1 << 17;

/// The parts of this machine that a scenario uses.
#[derive(Debug, PartialEq, Eq)]
pub struct Machine {
    /// The node of the fast tier.
    pub fast: NodeId,
    /// The node of the slow tier.
    pub slow: NodeId,
    /// The CPUs that the workload runs on.
    pub cpus: Vec<u32>,
}

/// Refuses parts of a scenario that this machine cannot run.
pub fn refuse_what_is_not_for_here(scenario: &Scenario) -> Result<(), Error> {
    let refuse = |what: &str, elsewhere: &str| {
        Err(Error::Unfit {
            what: format!("{what} cannot run on this machine"),
            hint: format!("use --on {elsewhere}"),
        })
    };
    if !scenario.vary.is_empty() {
        return refuse("cases ([[vary]])", "sim");
    }
    if !scenario.machine.node.is_empty() {
        return refuse("a machine of other nodes ([[machine.node]])", "lab");
    }
    if scenario.provision.is_some() {
        return refuse("VMs whose memory is resized ([provision])", "lab");
    }
    if !scenario.machine.place.is_guest() {
        return refuse("a host with a guest (machine.place = \"host\")", "lab");
    }
    if scenario.workload.has_cgroups() {
        return refuse("programs in cgroups (workload.program.cgroup)", "lab");
    }
    if !scenario.workload.is_real() {
        return refuse(scenario.workload.kind(), "sim");
    }
    if let Some(key) = scenario.workload.lab_only() {
        return refuse(key, "lab");
    }
    if let Some(key) = scenario.workload.simulated_only() {
        return refuse(key, "sim");
    }
    match scenario.systems.iter().find(|s| !s.runs_on(Place::Here)) {
        Some(system) => Err(Error::Unfit {
            what: format!("{system} cannot run on this machine"),
            hint: format!(
                "leave it out with --system, or use --on {}",
                match system.runs_on(Place::Lab) {
                    true => "lab",
                    false => "sim",
                }
            ),
        }),
        None => Ok(()),
    }
}

impl Machine {
    /// Selects and checks the nodes and CPUs for a scenario. The kernel's files are below `root`.
    ///
    /// # Errors
    /// [`Error::Unfit`] names the missing part.
    pub fn find(root: &Path, scenario: &Scenario) -> Result<Self, Error> {
        let unfit = |what: String, hint: &str| Error::Unfit {
            what,
            hint: hint.into(),
        };
        if let Some(pid) = agent(root)? {
            return Err(unfit(
                format!(
                    "an agent manages this machine's memory already (demeter guest, process {pid})"
                ),
                "stop it first",
            ));
        }
        let elsewhere = "or use --on lab, which emulates two";
        let topology = Topology::read(root).map_err(|e| unfit(e.to_string(), elsewhere))?;
        let order = topology.order().map(|order| order.pair);
        let order = order.map_err(|e| unfit(e.to_string(), elsewhere))?;
        let nodes = topology.with_memory().count();
        if nodes > 2 {
            return Err(unfit(
                format!(
                    "{nodes} nodes of this machine have memory, and overflow could go to any of them"
                ),
                "offline the memory of all but two (/sys/devices/system/node/nodeN/memoryM/online)",
            ));
        }
        let machine = &scenario.machine;
        for (node, key, wanted_mib) in [
            (
                order.fast,
                "machine.fast.usable_mib",
                machine.fast.usable_mib,
            ),
            (
                order.slow,
                "machine.slow.usable_mib",
                machine.slow.usable_mib,
            ),
        ] {
            let free_mib =
                node_free_mib(root, node.0).map_err(|fault| unfit(fault.to_string(), elsewhere))?;
            if free_mib < wanted_mib {
                return Err(unfit(
                    format!("node {node} has {free_mib} MiB free, but {key} = {wanted_mib}"),
                    "stop other programs, write 1 to /proc/sys/vm/drop_caches, or lower it",
                ));
            }
        }
        Ok(Self {
            fast: order.fast,
            slow: order.slow,
            cpus: cpus_of(root, order.fast, machine.vcpus)?,
        })
    }
}

/// The first `count` allowed CPUs of a node; of the whole machine if the node has none.
fn cpus_of(root: &Path, node: NodeId, count: u32) -> Result<Vec<u32>, Error> {
    let path = root.join(format!("sys/devices/system/node/node{node}/cpulist"));
    let list = fs::read_to_string(&path).map_err(Error::io("read", &path))?;
    let own = parse_list(&list);
    let mut cpus = cpus::allowed().map_err(Error::io("read", "this thread's CPUs"))?;
    cpus.retain(|cpu| own.is_empty() || own.contains(cpu));
    if cpus.len() < count as usize {
        return Err(Error::Unfit {
            what: format!(
                "machine.vcpus = {count}, but this command may use {} CPUs of node {node}",
                cpus.len()
            ),
            hint: "lower it".into(),
        });
    }
    cpus.truncate(count as usize);
    Ok(cpus)
}

/// The PID of a running `demeter guest`, if any.
fn agent(root: &Path) -> Result<Option<Pid>, Error> {
    let proc = root.join("proc");
    let entries = fs::read_dir(&proc).map_err(Error::io("list", &proc))?;
    let pids = entries.take(PROCESSES_MAX).filter_map(|entry| {
        let name = entry.ok()?.file_name();
        name.to_str()?.parse().ok().map(Pid)
    });
    let is_agent = |pid: &Pid| {
        // A process that exited meanwhile is not an agent.
        let line = fs::read(proc.join(format!("{pid}/cmdline"))).unwrap_or_default();
        let line = String::from_utf8_lossy(&line).into_owned();
        let mut words = line.split('\0');
        let program = words.next().map(PathBuf::from);
        let is_ours = program.is_some_and(|p| p.file_name().is_some_and(|name| name == "demeter"));
        // A subcommand may be abbreviated.
        let subcommand = words.find(|word| !word.starts_with('-'));
        is_ours && subcommand.is_some_and(|word| !word.is_empty() && "guest".starts_with(word))
    };
    Ok(pids.into_iter().find(is_agent))
}

/// The agent's sample source under `system`. For `demeter` it must be the CPU's sampling unit or its substitute, so
/// that results of another tracker never carry its name.
pub fn tracker(root: &Path, system: System) -> Result<Choice, Error> {
    if system == System::DemeterDamon {
        return Ok(Choice::Damon);
    }
    let settings = Settings {
        root: root.into(),
        ..Settings::default()
    };
    match choose(Choice::Perf, &settings) {
        Ok(_) => Ok(Choice::Perf),
        // Inside a lab VM.
        Err(_) if choose(Choice::Lab, &settings).is_ok() => Ok(Choice::Lab),
        Err(why) => Err(Error::Unfit {
            what: format!("{system} needs samples of the CPU: {why}"),
            hint: "or run demeter-damon in its place (--system)".into(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine of two nodes with `free_mib` MiB free; the second has no CPUs.
    fn machine(free_mib: [u64; 2]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let put = |path: String, text: String| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let mut zones = String::new();
        for (node, free_mib) in free_mib.iter().enumerate() {
            let dir = format!("sys/devices/system/node/node{node}");
            let size = format!(
                "Node {node} MemTotal: 8388608 kB\nNode {node} MemFree: {} kB\n",
                free_mib * 1024
            );
            put(format!("{dir}/meminfo"), size);
            put(format!("{dir}/distance"), "10 20\n".into());
            let cpus = ["0-1023\n", "\n"][node.min(1)];
            put(format!("{dir}/cpulist"), cpus.into());
            zones += &format!(
                "Node {node}, zone Normal\n  pages free {}\n        low 0\n        spanned 9\n",
                free_mib * 256
            );
        }
        put("proc/zoneinfo".into(), zones);
        put("proc/1/cmdline".into(), "/sbin/init\0".into());
        put("proc/2/cmdline".into(), String::new());
        put("proc/3/cmdline".into(), "/bin/demeter\0-v\0host\0".into());
        root
    }

    fn scenario() -> Scenario {
        let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scenarios/ci.toml");
        Scenario::load(&shipped).unwrap()
    }

    fn refused(root: &Path, scenario: &Scenario) -> String {
        Machine::find(root, scenario).unwrap_err().to_string()
    }

    #[test]
    fn the_node_without_cpus_is_slow_and_the_workload_runs_beside_the_fast_one() {
        let root = machine([60, 220]);
        let found = Machine::find(root.path(), &scenario()).unwrap();
        assert_eq!((found.fast, found.slow), (NodeId(0), NodeId(1)));
        assert_eq!(found.cpus.len(), 1);
        assert!(cpus::allowed().unwrap().contains(&found.cpus[0]));
    }

    #[test]
    fn a_machine_without_two_tiers_or_enough_memory_is_told_what_it_lacks() {
        let said = refused(machine([59, 220]).path(), &scenario());
        assert!(
            said.contains("node 0 has 59 MiB free") && said.contains("= 60"),
            "{said}"
        );
        let said = refused(machine([60, 219]).path(), &scenario());
        assert!(said.contains("node 1 has 219 MiB free"), "{said}");

        let one = machine([60, 220]);
        fs::remove_dir_all(one.path().join("sys/devices/system/node/node1")).unwrap();
        let said = refused(one.path(), &scenario());
        assert!(
            said.contains("1 NUMA node") && said.contains("--on lab"),
            "{said}"
        );

        let alike = machine([60, 220]);
        let cpus = alike.path().join("sys/devices/system/node/node1/cpulist");
        fs::write(cpus, "1\n").unwrap();
        let said = refused(alike.path(), &scenario());
        assert!(said.contains("no node is slower"), "{said}");

        let mut wide = scenario();
        wide.machine.vcpus = 1024;
        let said = refused(machine([60, 220]).path(), &wide);
        assert!(said.contains("machine.vcpus = 1024"), "{said}");
    }

    #[test]
    fn more_than_two_nodes_are_refused() {
        let root = machine([60, 220]);
        let node = root.path().join("sys/devices/system/node/node2");
        fs::create_dir_all(&node).unwrap();
        let meminfo = "Node 2 MemTotal: 9 kB\nNode 2 MemFree: 9 kB\n";
        fs::write(node.join("meminfo"), meminfo).unwrap();
        fs::write(node.join("distance"), "20 20 10\n").unwrap();
        fs::write(node.join("cpulist"), "\n").unwrap();
        let said = refused(root.path(), &scenario());
        assert!(said.starts_with("3 nodes"), "{said}");
    }

    #[test]
    fn another_agent_is_named() {
        let root = machine([60, 220]);
        for line in [
            "/usr/bin/demeter\0-v\0guest\0--all\0",
            "./demeter\0gu\0--pid\x009\0",
        ] {
            let process = root.path().join("proc/77");
            fs::create_dir_all(&process).unwrap();
            fs::write(process.join("cmdline"), line).unwrap();
            let said = refused(root.path(), &scenario());
            assert!(said.contains("process 77"), "{said}");
        }
    }

    #[test]
    fn what_needs_the_lab_or_the_simulator_is_refused() {
        let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scenarios");
        for (file, named, place) in [
            ("gups.toml", "damon ", "--on lab"),
            ("balloon.toml", "[provision]", "--on lab"),
            ("tenants.toml", "cgroup", "--on lab"),
            ("seed-flush.toml", "", "--on sim"),
        ] {
            let scenario = Scenario::load(&shipped.join(file)).unwrap();
            let said = refuse_what_is_not_for_here(&scenario)
                .unwrap_err()
                .to_string();
            assert!(
                said.contains(named) && said.contains(place),
                "{file}: {said}"
            );
        }
        refuse_what_is_not_for_here(&scenario()).unwrap();
    }
}
