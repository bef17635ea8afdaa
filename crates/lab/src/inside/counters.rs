//! Kernel counters: CPU time by cause, and page migrations.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use demeter_outcome::{KVM_PREFIX, VMSTAT_PREFIXES};
use demeter_policy::Pid;

use crate::fault::Fault;
use crate::link::Totals;

/// Ticks a second in /proc/stat and /proc/PID/stat: USER_HZ, which x86-64 and arm64 fix at 100.
const TICKS_PER_S: f64 = 100.0;

/// Kernel threads that manage memory: prefix of the thread's name, and its cause in results.
const KERNEL_THREADS: [(&str, &str); 4] = [
    ("kswapd", "kswapd"),
    ("kdamond", "kdamond"),
    ("kcompactd", "kcompactd"),
    ("khugepaged", "khugepaged"),
];

/// The cause of the workload's own time.
const WORKLOAD: &str = "workload";

/// Fields of /proc/PID/stat: user and system time of the process, and of its exited children.
const OWN: [usize; 2] = [14, 15];
const ENDED_CHILDREN: [usize; 2] = [16, 17];

/// KVM's counters, for all VMs together.
const KVM: &str = "sys/kernel/debug/kvm";

/// The KVM counters in results: TLB flushes of one virtual CPU and of all, requests for the latter, exits, and
/// second-level faults that added an entry.
const KVM_COUNTERS: [&str; 6] = [
    "tlb_flush",
    "remote_tlb_flush",
    "remote_tlb_flush_requests",
    "pf_taken",
    "pf_fixed",
    "exits",
];

/// Maximum number of processes searched for kernel threads.
const PROCESSES_MAX: usize = 4096;

/// Reads counters of the whole VM and of selected processes.
#[derive(Debug)]
pub struct Counters {
    root: PathBuf,
    own_pid: Pid,
    followed: Vec<(Pid, &'static str)>,
}

impl Counters {
    /// Reads below `root` (`/` in a VM).
    pub fn new(root: &Path) -> Self {
        Self {
            root: root.into(),
            own_pid: Pid(std::process::id()),
            followed: Vec::new(),
        }
    }

    /// Charges the process's CPU time to `{cause}_user` and `{cause}_system`.
    pub fn follow(&mut self, pid: Pid, cause: &'static str) {
        self.followed.push((pid, cause));
    }

    /// Charges the CPU time of these processes to the workload. All exited children of this process count, too.
    pub fn follow_workload(&mut self, pids: &[Pid]) {
        self.followed.retain(|(_, cause)| *cause != WORKLOAD);
        let pids = pids.iter().map(|pid| (*pid, WORKLOAD));
        self.followed.extend(pids);
    }

    /// Follows the current kernel threads that manage memory. It is called before and after a system is switched on,
    /// and once later. Checking all threads every second would cost more CPU time than some of the systems.
    pub fn follow_kernel_threads(&mut self) -> Result<(), Fault> {
        let proc = self.root.join("proc");
        for entry in fs::read_dir(&proc)
            .map_err(Fault::io("list", &proc))?
            .take(PROCESSES_MAX)
        {
            let name = entry.map_err(Fault::io("list", &proc))?.file_name();
            let Some(pid) = name.to_str().and_then(|n| n.parse().ok()).map(Pid) else {
                continue;
            };
            // Ignores a thread that exited meanwhile.
            let comm = fs::read_to_string(proc.join(&name).join("comm")).unwrap_or_default();
            let cause = KERNEL_THREADS
                .iter()
                .find(|(start, _)| comm.starts_with(start));
            if let Some(&(_, cause)) = cause
                && !self.followed.iter().any(|(known, _)| *known == pid)
            {
                self.followed.push((pid, cause));
            }
        }
        Ok(())
    }

    /// All counts since boot, without bytes moved.
    pub fn read(&self) -> Result<Totals, Fault> {
        let mut totals = Totals {
            system_s: self.system_s()?,
            ..Totals::default()
        };
        let ended = (self.own_pid, WORKLOAD, ENDED_CHILDREN);
        let alive = self.followed.iter().map(|&(pid, cause)| (pid, cause, OWN));
        for (pid, cause, fields) in alive.chain([ended]) {
            let (user_s, system_s) = self.process_s(pid, fields);
            if KERNEL_THREADS.iter().any(|(_, thread)| *thread == cause) {
                *totals.cpu_s.entry(cause.into()).or_default() += user_s + system_s;
            } else {
                *totals.cpu_s.entry(format!("{cause}_user")).or_default() += user_s;
                *totals.cpu_s.entry(format!("{cause}_system")).or_default() += system_s;
            }
        }
        totals.vmstat = self.vmstat()?;
        Ok(totals)
    }

    /// System, interrupt and soft interrupt time of all CPUs: columns 3, 6 and 7 of the line
    /// `cpu` of /proc/stat (proc(5)).
    fn system_s(&self) -> Result<f64, Fault> {
        let path = self.root.join("proc/stat");
        let text = fs::read_to_string(&path).map_err(Fault::io("read", &path))?;
        let columns: Vec<u64> = text
            .lines()
            .find_map(|line| line.strip_prefix("cpu "))
            .unwrap_or_default()
            .split_whitespace()
            .map_while(|column| column.parse().ok())
            .collect();
        match columns[..] {
            [_, _, system, _, _, irq, softirq, ..] => {
                Ok((system + irq + softirq) as f64 / TICKS_PER_S)
            }
            _ => Err(Fault::io("decode", &path)(
                std::io::ErrorKind::InvalidData.into(),
            )),
        }
    }

    /// User and system time of a process with all its threads, or of its exited children, from /proc/PID/stat
    /// (proc(5)). Fields are counted after the name, which may contain spaces. Zero for a process that has exited.
    fn process_s(&self, pid: Pid, fields_at: [usize; 2]) -> (f64, f64) {
        let path = self.root.join(format!("proc/{pid}/stat"));
        let text = fs::read_to_string(path).unwrap_or_default();
        let behind_name = text.rsplit(") ").next().unwrap_or_default();
        let fields: Vec<&str> = behind_name.split_whitespace().collect();
        let seconds = |field: usize| {
            let ticks = fields
                .get(field - 3)
                .and_then(|ticks| ticks.parse::<u64>().ok());
            ticks.unwrap_or(0) as f64 / TICKS_PER_S
        };
        (seconds(fields_at[0]), seconds(fields_at[1]))
    }

    /// KVM's counters for the running VMs (Documentation/virt/kvm/api.rst names some); empty without KVM.
    pub fn kvm(&self) -> BTreeMap<String, u64> {
        let read = |name: &&str| {
            let text = fs::read_to_string(self.root.join(KVM).join(name)).ok()?;
            Some((format!("{KVM_PREFIX}{name}"), text.trim().parse().ok()?))
        };
        KVM_COUNTERS.iter().filter_map(read).collect()
    }

    fn vmstat(&self) -> Result<BTreeMap<String, u64>, Fault> {
        let path = self.root.join("proc/vmstat");
        let text = fs::read_to_string(&path).map_err(Fault::io("read", &path))?;
        Ok(text
            .lines()
            .filter_map(|line| line.split_once(' '))
            .filter(|(name, _)| VMSTAT_PREFIXES.iter().any(|start| name.starts_with(start)))
            .filter_map(|(name, value)| Some((name.to_owned(), value.parse().ok()?)))
            .collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine() -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let put = |path: &str, text: &str| {
            let path = root.path().join("proc").join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        put(
            "stat",
            "cpu  1000 20 300 4000 5 60 7 0 0 0\ncpu0 1 2 3 4 5 6 7 0 0 0\n",
        );
        put(
            "vmstat",
            "nr_free_pages 5\npgpromote_success 12\npgdemote_kswapd 7\nnuma_pte_updates 3\n",
        );
        let stat = |pid: u32, comm: &str, user: u32, system: u32| {
            put(&format!("{pid}/comm"), &format!("{comm}\n"));
            put(
                &format!("{pid}/stat"),
                &format!("{pid} ({comm}) S 1 2 3 4 5 6 7 8 9 10 {user} {system} 100 10 20 0"),
            );
        };
        stat(30, "kswapd0", 0, 40);
        stat(31, "kswapd1", 0, 2);
        stat(100, "a (b) c", 150, 50);
        root
    }

    #[test]
    fn time_is_charged_to_its_cause() {
        let root = machine();
        let mut counters = Counters::new(root.path());
        counters.own_pid = Pid(30);
        counters.follow_workload(&[Pid(31)]);
        counters.follow_workload(&[Pid(100), Pid(102)]);
        counters.follow(Pid(101), "agent");
        counters.follow_kernel_threads().unwrap();
        counters.follow_kernel_threads().unwrap();
        let totals = counters.read().unwrap();
        assert_eq!(totals.system_s, 3.67);
        // Includes a second of an exited child.
        assert_eq!(totals.cpu_s["workload_user"], 2.5);
        assert_eq!(totals.cpu_s["workload_system"], 0.6);
        assert_eq!(totals.cpu_s["agent_user"], 0.0);
        assert!((totals.cpu_s["kswapd"] - 0.42).abs() < 1e-9);
    }

    #[test]
    fn only_page_movement_is_kept_of_vmstat() {
        let totals = Counters::new(machine().path()).read().unwrap();
        let names: Vec<&str> = totals.vmstat.keys().map(String::as_str).collect();
        assert_eq!(
            names,
            ["numa_pte_updates", "pgdemote_kswapd", "pgpromote_success"]
        );
        assert_eq!(totals.vmstat["pgpromote_success"], 12);
    }

    #[test]
    fn a_torn_stat_is_an_error_and_not_a_zero() {
        let root = machine();
        fs::write(root.path().join("proc/stat"), "cpu 1 2\n").unwrap();
        assert!(Counters::new(root.path()).read().is_err());
    }
}
