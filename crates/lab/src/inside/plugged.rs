//! Memory of a node that comes online and goes offline, as an administrator would have it.

use std::fs;
use std::path::Path;

use demeter_policy::NodeId;
use demeter_scenario::Machine;

use crate::fault::Fault;

/// Where the kernel lists nodes with their blocks of memory.
const NODES: &str = "sys/devices/system/node";

/// A change of a node's memory in the timed phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Plug {
    /// Second of the phase.
    pub at_s: u64,
    /// The node.
    pub node: NodeId,
    /// Whether its memory comes, or goes.
    pub comes: bool,
}

impl Plug {
    /// All changes of a machine, in the order of time.
    pub fn all_of(machine: &Machine) -> Vec<Self> {
        let mut all = vec![];
        for (node, listed) in (0..).map(NodeId).zip(&machine.node) {
            for (at_s, comes) in [(listed.comes_at_s, true), (listed.goes_at_s, false)] {
                all.extend(at_s.map(|at_s| Self { at_s, node, comes }));
            }
        }
        all.sort_by_key(|plug| plug.at_s);
        all
    }

    /// Has it happen.
    pub fn apply(&self, root: &Path) -> Result<(), Fault> {
        set_online(root, self.node, self.comes)
    }
}

/// Takes the memory offline that comes later.
pub fn hold_back(root: &Path, plugs: &[Plug]) -> Result<(), Fault> {
    let mut late = plugs.iter().filter(|plug| plug.comes);
    late.try_for_each(|plug| set_online(root, plug.node, false))
}

/// Brings all blocks of a node's memory online, or offline. Online they are movable, so that they can go again.
fn set_online(root: &Path, node: NodeId, online: bool) -> Result<(), Fault> {
    let dir = root.join(NODES).join(format!("node{node}"));
    let wanted = if online { "online_movable" } else { "offline" };
    let entries = fs::read_dir(&dir).map_err(Fault::io("list", &dir))?;
    for entry in entries {
        let path = entry.map_err(Fault::io("list", &dir))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let is_block = name
            .strip_prefix("memory")
            .is_some_and(|n| n.parse::<u32>().is_ok());
        if is_block {
            let state = path.join("state");
            fs::write(&state, wanted).map_err(Fault::io("write to", &state))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_held_back_until_it_comes_and_goes_again() {
        let node = |plug: &str| {
            format!("{{ tier = 1, usable_mib = 1, latency_ns = [9], bandwidth_gbps = [9]{plug} }}")
        };
        let nodes = [node(""), node(", comes_at_s = 5, goes_at_s = 8")].join(", ");
        let machine: Machine = toml::from_str(&format!("vcpus = 1\nnode = [{nodes}]")).unwrap();
        let root = tempfile::tempdir().unwrap();
        let state = |node: u32, file: &str| {
            let dir = root
                .path()
                .join(NODES)
                .join(format!("node{node}/memory{file}"));
            fs::create_dir_all(&dir).unwrap();
            dir.join("state")
        };
        let (first, late, other) = (state(0, "3"), state(1, "32"), state(1, "_failure"));
        for file in [&first, &late, &other] {
            fs::write(file, "online").unwrap();
        }
        let read = || [&first, &late, &other].map(|file| fs::read_to_string(file).unwrap());
        let plugs = Plug::all_of(&machine);
        assert_eq!(
            plugs.iter().map(|plug| plug.at_s).collect::<Vec<_>>(),
            [5, 8]
        );
        hold_back(root.path(), &plugs).unwrap();
        assert_eq!(read(), ["online", "offline", "online"]);
        plugs[0].apply(root.path()).unwrap();
        assert_eq!(read(), ["online", "online_movable", "online"]);
        plugs[1].apply(root.path()).unwrap();
        assert_eq!(read(), ["online", "offline", "online"]);
    }

    #[test]
    fn a_node_that_is_not_there_is_named() {
        let root = tempfile::tempdir().unwrap();
        let said = set_online(root.path(), NodeId(7), true).unwrap_err();
        assert!(said.to_string().contains("node7"), "{said}");
    }
}
