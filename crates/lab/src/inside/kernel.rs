//! Kernel settings that all jobs need.

use std::fs;
use std::path::Path;

use demeter_policy::Pid;
use demeter_scenario::Thp;

use crate::fault::Fault;

/// `kernel.numa_balancing`: 0 = off, 2 = promote between memory tiers.
const NUMA_BALANCING: &str = "proc/sys/kernel/numa_balancing";
/// Whether reclaim demotes pages to a slower tier instead of dropping them.
const DEMOTION: &str = "sys/kernel/mm/numa/demotion_enabled";
/// Free memory at which kswapd wakes and stops, in ten-thousandths of a node.
pub const WATERMARK_SCALE_FACTOR: &str = "proc/sys/vm/watermark_scale_factor";
/// Whether reclaim uses multi-generational LRU (Documentation/admin-guide/mm/multigen_lru.rst).
pub const LRU_GEN: &str = "sys/kernel/mm/lru_gen/enabled";
/// Mode of transparent huge pages.
const THP: &str = "sys/kernel/mm/transparent_hugepage/enabled";

/// All settings that are ever changed, and restored after a run on this machine.
pub const SETTINGS: [&str; 3] = [NUMA_BALANCING, DEMOTION, THP];

/// Sets the mode of transparent huge pages. Switches NUMA balancing off, which the kernel enables at boot and only
/// `linux` needs.
pub fn prepare(root: &Path, thp: Thp) -> Result<(), Fault> {
    write(root, THP, thp.into())?;
    set_tiering(root, false)
}

/// Clears the accessed bits of a process's pages. Populating memory has set them all. Without this, DAMON and reclaim
/// would see all memory as hot until they have checked every page once.
pub fn forget_accesses(root: &Path, pid: Pid) -> Result<(), Fault> {
    write(root, &format!("proc/{pid}/clear_refs"), "1")
}

/// Switches the kernel's tiering on or off.
pub fn set_tiering(root: &Path, on: bool) -> Result<(), Fault> {
    set_balancing(root, on)?;
    // Kernels before 5.18 never demote, so there is nothing to switch off.
    if !on && !root.join(DEMOTION).exists() {
        return Ok(());
    }
    write(root, DEMOTION, if on { "1" } else { "0" })
}

/// Switches only promotion on or off.
pub fn set_balancing(root: &Path, on: bool) -> Result<(), Fault> {
    write(root, NUMA_BALANCING, if on { "2" } else { "0" })
}

/// Writes a kernel setting below `root`.
pub fn write(root: &Path, path: &str, value: &str) -> Result<(), Fault> {
    let path = root.join(path);
    fs::write(&path, value).map_err(Fault::io("write", &path))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A kernel with unknown settings.
    pub fn machine() -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for file in [NUMA_BALANCING, DEMOTION, THP, WATERMARK_SCALE_FACTOR] {
            let path = root.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "?").unwrap();
        }
        root
    }

    /// The current settings of its tiering.
    pub fn tiering(root: &Path) -> (String, String) {
        let read = |file| fs::read_to_string(root.join(file)).unwrap();
        (read(NUMA_BALANCING), read(DEMOTION))
    }

    #[test]
    fn memory_is_filled_without_balancing_and_then_forgotten() {
        let root = machine();
        prepare(root.path(), Thp::Never).unwrap();
        assert_eq!(tiering(root.path()), ("0".into(), "0".into()));
        assert_eq!(fs::read_to_string(root.path().join(THP)).unwrap(), "never");
        let process = root.path().join("proc/7");
        fs::create_dir_all(&process).unwrap();
        forget_accesses(root.path(), Pid(7)).unwrap();
        assert_eq!(fs::read_to_string(process.join("clear_refs")).unwrap(), "1");
    }
}
