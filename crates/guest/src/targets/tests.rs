use std::cell::RefCell;
use std::fs;

use super::*;

/// A root with processes, and the parents of those added later.
struct FakeProc(tempfile::TempDir, RefCell<BTreeMap<u32, u32>>);

impl FakeProc {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("proc/self")).unwrap();
        Self(dir, RefCell::default())
    }

    fn add(&self, pid: u32, comm: impl AsRef<[u8]>, resident_pages: u64, children: &str) {
        let dir = self.0.path().join(format!("proc/{pid}"));
        fs::create_dir_all(dir.join(format!("task/{pid}"))).unwrap();
        self.start(pid, comm, pid * 10, 0);
        let mut parents = self.1.borrow_mut();
        for child in pids_in(children.as_bytes()) {
            parents.entry(child).or_insert(pid);
        }
        fs::write(
            dir.join("statm"),
            format!("9999 {resident_pages} 0 0 0 0 0"),
        )
        .unwrap();
        fs::write(dir.join(format!("task/{pid}/children")), children).unwrap();
    }

    /// The stat file of a process that starts now.
    fn start(&self, pid: u32, comm: impl AsRef<[u8]>, ticks: u32, flags: u64) {
        let parent = self.1.borrow().get(&pid).copied().unwrap_or(0);
        let mut stat = format!("{pid} (").into_bytes();
        stat.extend(comm.as_ref());
        let zeros = "0 ".repeat(12);
        stat.extend(format!(") S {parent} 0 0 0 -1 {flags} {zeros}{ticks} 0").bytes());
        fs::write(self.0.path().join(format!("proc/{pid}/stat")), stat).unwrap();
    }

    fn finder(&self, spec: TargetSpec) -> TargetFinder {
        TargetFinder::new(self.0.path(), spec)
    }

    fn find(&self, spec: TargetSpec) -> Vec<u32> {
        pids_of(&mut self.finder(spec))
    }
}

fn pids_of(finder: &mut TargetFinder) -> Vec<u32> {
    finder.find().unwrap().iter().map(|t| t.pid.0).collect()
}

#[test]
fn a_stranger_with_the_pid_of_a_process_that_was_named_is_none() {
    let p = FakeProc::new();
    p.add(10, "named", 5, "12");
    p.add(11, "named, too", 5, "");
    p.add(12, "child", 5, "");
    let mut finder = p.finder(TargetSpec::Pids(vec![Pid(10), Pid(11)]));
    let [child, ..] = &finder.find().unwrap()[2..] else {
        panic!("there are three");
    };
    assert!(child.is_there(p.0.path()));
    p.start(11, "stranger", 777, 0);
    p.start(12, "stranger", 777, 0);
    assert!(!child.is_there(p.0.path()));
    assert_eq!(pids_of(&mut finder), [10, 12], "12 is a new child of 10");
    p.start(10, "stranger", 777, 0);
    let error = finder.find().unwrap_err();
    assert!(matches!(error, TargetsError::NoProcess(Pid(10))), "{error}");
}

#[test]
fn who_has_another_parent_is_no_child() {
    let p = FakeProc::new();
    p.add(12, "stranger, whose pid was the child's", 5, "");
    p.add(10, "named", 5, "12 13");
    p.add(13, "child", 5, "");
    assert_eq!(p.find(TargetSpec::Pids(vec![Pid(10)])), [10, 13]);
}

#[test]
fn kernel_threads_are_no_targets() {
    let p = FakeProc::new();
    p.add(2, "kthreadd", 0, "3");
    p.add(3, "with a program's memory", 5, "");
    for pid in [2, 3] {
        p.start(pid, "kthread", 1, 0x0020_8040);
    }
    p.add(9, "program", 5, "");
    let all = TargetSpec::All {
        resident_min: ByteCount(0),
    };
    assert_eq!(p.find(all), [9]);
    let error = p.finder(TargetSpec::Pids(vec![Pid(2)])).check();
    assert!(matches!(error, Err(TargetsError::KernelThread(Pid(2)))));
}

#[test]
fn hidden_is_not_gone() {
    let p = FakeProc::new();
    let mounts = p.0.path().join("proc/mounts");
    let missing = || p.finder(TargetSpec::Pids(vec![Pid(77)])).check();
    for (options, hides) in [
        ("rw,relatime", None),
        ("rw,hidepid=off", None),
        ("rw,gid=4,hidepid=invisible", Some("hidepid=invisible")),
        ("rw,hidepid=2,gid=4", Some("hidepid=2")),
    ] {
        let text = format!("none /proc/fs proc hidepid=4 0 0\nproc /proc proc {options} 0 0\n");
        fs::write(&mounts, text).unwrap();
        let error = missing().unwrap_err();
        match hides {
            Some(hides) => assert!(
                matches!(&error, TargetsError::NotVisible { option, .. } if option == hides)
            ),
            None => assert!(matches!(error, TargetsError::NoProcess(_)), "{error}"),
        }
    }
    // If process 1 is visible, all are.
    p.add(1, "init", 5, "");
    assert!(matches!(missing(), Err(TargetsError::NoProcess(_))));
}

#[test]
fn processes_of_nearly_the_same_size_do_not_change_places() {
    let p = FakeProc::new();
    let count = TARGETS_MAX as u32 + 8;
    for pid in 1..=count {
        p.add(pid, "x", 1000 + u64::from(pid), "");
    }
    let resident_min = ByteCount(1000 * PAGE_SIZE);
    let mut finder = p.finder(TargetSpec::All { resident_min });
    let first = pids_of(&mut finder);
    for pid in 1..=count {
        p.add(pid, "x", 1000 + u64::from(count - pid), "");
    }
    assert_eq!(pids_of(&mut finder), first);
    p.add(70, "x", 970, "");
    assert_eq!(pids_of(&mut finder), first, "a little below the least");
    p.add(1, "x", 1300, "");
    p.add(71, "x", 800, "");
    let now = pids_of(&mut finder);
    assert!(now.contains(&1) && !now.contains(&71), "{now:?}");
}

#[test]
fn pids_with_their_descendants() {
    let p = FakeProc::new();
    p.add(10, "parent", 5, "11 12 ");
    p.add(11, "a (b) c", 5, "13");
    p.add(12, "kernel thread", 0, "");
    p.add(13, "grandchild", 5, "10");
    p.add(14, "stranger", 5, "");
    assert_eq!(p.find(TargetSpec::Pids(vec![Pid(10)])), [10, 11, 13]);
    let found = p.finder(TargetSpec::Pids(vec![Pid(10)])).find().unwrap();
    assert_eq!(
        (found[0].comm.as_str(), found[0].start_ticks),
        ("parent", 100)
    );
    assert_eq!(
        (found[1].comm.as_str(), found[1].start_ticks),
        ("a (b) c", 110)
    );
}

#[test]
fn the_agent_and_its_own_processes_are_nobodys_targets() {
    let p = FakeProc::new();
    let own = std::process::id();
    let [shell, program, helper] = [1, 2, 3].map(|n| own + n);
    p.add(shell, "shell", 5, &format!("{own} {program}"));
    p.add(program, "program", 5, "");
    p.add(own, "demeter", 5, &helper.to_string());
    p.add(helper, "demeter-flush", 5, "");
    let resident_min = ByteCount(PAGE_SIZE);
    for spec in [
        TargetSpec::All { resident_min },
        TargetSpec::Pids(vec![Pid(shell)]),
    ] {
        assert_eq!(p.find(spec), [shell, program]);
    }
}

#[test]
fn a_pid_that_is_gone_and_a_cgroup_that_is_not_there_are_errors() {
    let p = FakeProc::new();
    let find = |spec| {
        TargetFinder::new(p.0.path(), spec)
            .check()
            .unwrap_err()
            .to_string()
    };
    assert!(find(TargetSpec::Pids(vec![Pid(77)])).contains("process 77 is not there"));
    let text = find(TargetSpec::Cgroups(vec!["/sys/fs/cgroup/none".into()]));
    assert!(
        text.starts_with("/sys/fs/cgroup/none is no cgroup"),
        "{text}"
    );
}

#[test]
fn a_cgroup_with_those_below_it() {
    let p = FakeProc::new();
    p.add(1, "one", 5, "");
    p.add(2, "two", 5, "");
    p.add(3, "elsewhere", 5, "");
    let below = p.0.path().join("sys/fs/cgroup/a/b/c");
    fs::create_dir_all(&below).unwrap();
    fs::write(p.0.path().join("sys/fs/cgroup/a/cgroup.procs"), "1\n").unwrap();
    fs::write(below.join("cgroup.procs"), "2\n4\n").unwrap();
    assert_eq!(
        p.find(TargetSpec::Cgroups(vec!["/sys/fs/cgroup/a".into()])),
        [1, 2]
    );
}

#[test]
fn a_cgroup_that_goes_and_comes_again_is_empty_meanwhile() {
    let p = FakeProc::new();
    p.add(1, "one", 5, "");
    let dir = p.0.path().join("sys/fs/cgroup/a");
    let spec = TargetSpec::Cgroups(vec!["/sys/fs/cgroup/a".into()]);
    let start = || {
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join(CGROUP_PROCS), "1\n").unwrap();
    };
    start();
    assert_eq!(p.find(spec.clone()), [1]);
    fs::remove_dir_all(&dir).unwrap();
    assert_eq!(p.find(spec.clone()), [] as [u32; 0]);
    start();
    assert_eq!(p.find(spec), [1]);
}

#[test]
fn a_process_cannot_hide_behind_its_name() {
    let p = FakeProc::new();
    let names: [&[u8]; 4] = [b"\xff\xfe", b") R 1 (", b"a\nb 1 2", b"\x1b[2J"];
    for (i, name) in names.iter().enumerate() {
        p.add(10 + i as u32, name, 5, "");
    }
    let spec = TargetSpec::All {
        resident_min: ByteCount(0),
    };
    let found = p.finder(spec).find().unwrap();
    let starts: Vec<_> = found.iter().map(|t| t.start_ticks).collect();
    assert_eq!(starts, [100, 110, 120, 130]);
    for target in found {
        assert!(!target.comm.contains(char::is_control), "{target:?}");
    }
}

#[test]
fn a_fork_bomb_displaces_nobody_who_was_named() {
    let p = FakeProc::new();
    let bombs = 20 * TARGETS_MAX as u32;
    let children: String = (1000..1000 + bombs).map(|pid| format!("{pid} ")).collect();
    p.add(10, "named", 500, "12");
    p.add(11, "bomb", 5, &children);
    p.add(12, "its child", 400, "13");
    p.add(13, "its grandchild", 300, "");
    for pid in 1000..1000 + bombs {
        p.add(pid, "x", 1, "");
    }
    let found = p.find(TargetSpec::Pids(vec![Pid(10), Pid(11)]));
    assert_eq!(found.len(), TARGETS_MAX);
    assert_eq!(found[..4], [10, 11, 12, 13]);
}

#[test]
fn that_nothing_can_be_read_is_not_that_nobody_is_there() {
    for errno in [libc::EMFILE, libc::ENFILE, libc::ENOMEM, libc::EIO] {
        let failed = io::Error::from_raw_os_error(errno);
        let found = unless_gone::<()>(Path::new("/proc/1/stat"), Err(failed));
        assert!(matches!(found, Err(TargetsError::Read { .. })), "{found:?}");
    }
    for errno in [libc::ENOENT, libc::ESRCH, libc::ENODEV, libc::EACCES] {
        let gone = io::Error::from_raw_os_error(errno);
        let found = unless_gone::<()>(Path::new("/proc/1/stat"), Err(gone));
        assert!(matches!(found, Ok(None)), "{found:?}");
    }
    // A real error: a directory where a file should be.
    let p = FakeProc::new();
    p.add(5, "x", 5, "");
    fs::remove_file(p.0.path().join("proc/5/statm")).unwrap();
    fs::create_dir(p.0.path().join("proc/5/statm")).unwrap();
    let mut finder = p.finder(TargetSpec::Pids(vec![Pid(5)]));
    let error = finder.find().unwrap_err();
    assert!(matches!(error, TargetsError::Read { .. }), "{error}");
}

#[test]
fn all_above_a_size_and_the_largest_when_too_many() {
    let p = FakeProc::new();
    for i in 1..=TARGETS_MAX as u32 + 5 {
        p.add(i, "x", u64::from(i), "");
    }
    let all = |pages| TargetSpec::All {
        resident_min: ByteCount(pages * PAGE_SIZE),
    };
    assert_eq!(p.find(all(67)), [67, 68, 69]);
    let found = p.find(all(1));
    assert_eq!((found.len(), found[0]), (TARGETS_MAX, 6));
}
