//! Tests the agent with refused system calls and missing capabilities.
//!
//! It must run without the refused call, or end with a line that names it. Each case is a child process that runs this
//! test, because a seccomp filter cannot be removed.

use std::io::Read;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};
use std::{fs, io, thread};

use super::*;
use crate::tracker::lab::tests::FakeDevice;

const CHILD: &str = "supervisor::refusals::an_agent_with_something_refused";
/// The system call that the child is refused.
const DENIED_CALL: &str = "DEMETER_TEST_DENIED_CALL";
/// The process that the child manages.
const TARGET: &str = "DEMETER_TEST_TARGET";

/// More time than an agent needs for a few epochs.
const PATIENCE: Duration = Duration::from_secs(30);

/// A user without privileges.
const NOBODY: u32 = 65534;

/// System calls of the agent, the C library and the runtime. A few more are not tested, because no program runs without
/// them: the standard library aborts if `close` is refused, and every program needs memory and locks.
const CALLS: [(&str, libc::c_long); 59] = [
    ("accept4", libc::SYS_accept4),
    ("bind", libc::SYS_bind),
    ("clock_nanosleep", libc::SYS_clock_nanosleep),
    ("clone", libc::SYS_clone),
    ("clone3", libc::SYS_clone3),
    ("close_range", libc::SYS_close_range),
    ("connect", libc::SYS_connect),
    ("dup3", libc::SYS_dup3),
    ("epoll_create1", libc::SYS_epoll_create1),
    ("epoll_ctl", libc::SYS_epoll_ctl),
    ("eventfd2", libc::SYS_eventfd2),
    ("fcntl", libc::SYS_fcntl),
    ("flock", libc::SYS_flock),
    ("fstat", libc::SYS_fstat),
    ("fsync", libc::SYS_fsync),
    ("ftruncate", libc::SYS_ftruncate),
    ("getdents64", libc::SYS_getdents64),
    ("getpid", libc::SYS_getpid),
    ("getrandom", libc::SYS_getrandom),
    ("getsockopt", libc::SYS_getsockopt),
    ("gettid", libc::SYS_gettid),
    ("ioctl", libc::SYS_ioctl),
    ("kill", libc::SYS_kill),
    ("listen", libc::SYS_listen),
    ("lseek", libc::SYS_lseek),
    ("madvise", libc::SYS_madvise),
    ("mbind", libc::SYS_mbind),
    ("mkdirat", libc::SYS_mkdirat),
    ("move_pages", libc::SYS_move_pages),
    ("munmap", libc::SYS_munmap),
    ("newfstatat", libc::SYS_newfstatat),
    ("openat", libc::SYS_openat),
    ("perf_event_open", libc::SYS_perf_event_open),
    ("pidfd_open", libc::SYS_pidfd_open),
    ("pipe2", libc::SYS_pipe2),
    ("ppoll", libc::SYS_ppoll),
    ("prctl", libc::SYS_prctl),
    ("pread64", libc::SYS_pread64),
    ("prlimit64", libc::SYS_prlimit64),
    ("process_madvise", libc::SYS_process_madvise),
    ("readlinkat", libc::SYS_readlinkat),
    ("recvfrom", libc::SYS_recvfrom),
    ("rt_sigaction", libc::SYS_rt_sigaction),
    ("rt_sigprocmask", libc::SYS_rt_sigprocmask),
    ("sched_getaffinity", libc::SYS_sched_getaffinity),
    ("sched_setaffinity", libc::SYS_sched_setaffinity),
    ("sched_yield", libc::SYS_sched_yield),
    ("sendto", libc::SYS_sendto),
    ("set_robust_list", libc::SYS_set_robust_list),
    ("setpriority", libc::SYS_setpriority),
    ("setsockopt", libc::SYS_setsockopt),
    ("shutdown", libc::SYS_shutdown),
    ("sigaltstack", libc::SYS_sigaltstack),
    ("socket", libc::SYS_socket),
    ("socketpair", libc::SYS_socketpair),
    ("statx", libc::SYS_statx),
    ("unlinkat", libc::SYS_unlinkat),
    ("wait4", libc::SYS_wait4),
    ("writev", libc::SYS_writev),
];

/// Calls of older architectures, replaced by newer ones elsewhere.
#[cfg(target_arch = "x86_64")]
const OLD_CALLS: [(&str, libc::c_long); 10] = [
    ("chmod", libc::SYS_chmod),
    ("epoll_wait", libc::SYS_epoll_wait),
    ("mkdir", libc::SYS_mkdir),
    ("open", libc::SYS_open),
    ("pipe", libc::SYS_pipe),
    ("poll", libc::SYS_poll),
    ("readlink", libc::SYS_readlink),
    ("rmdir", libc::SYS_rmdir),
    ("stat", libc::SYS_stat),
    ("unlink", libc::SYS_unlink),
];
#[cfg(not(target_arch = "x86_64"))]
const OLD_CALLS: [(&str, libc::c_long); 0] = [];

/// An idle process for the agent to manage.
struct Idle(Child);

impl Idle {
    fn start() -> Self {
        Self(Command::new("sleep").arg("600").spawn().unwrap())
    }
}

impl Drop for Idle {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A child's output, and whether it ran to its end.
struct Said {
    text: String,
    has_ended: bool,
}

/// A child that runs an agent on the idle process.
fn child(idle: &Idle) -> Command {
    let mut child = Command::new(std::env::current_exe().unwrap());
    child
        .args(["--ignored", "--exact", CHILD, "--nocapture"])
        .env(TARGET, idle.0.id().to_string())
        .stdin(Stdio::null());
    child
}

/// Runs a child to its end, and removes its files: it may not be allowed to. It may run as any user.
fn said(command: &mut Command) -> Said {
    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o777)).unwrap();
    command.env("TMPDIR", folder.path());
    let (mut out, into) = io::pipe().unwrap();
    command.stdout(into.try_clone().unwrap()).stderr(into);
    let mut child = command.spawn().unwrap();
    // The reader ends only after the parent's end is closed.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let reader = thread::spawn(move || {
        let mut text = String::new();
        let _ = out.read_to_string(&mut text);
        text
    });
    let deadline = Instant::now() + PATIENCE;
    while !reader.is_finished() && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(5));
    }
    let _ = child.kill();
    let status = child.wait().unwrap();
    Said {
        text: reader.join().unwrap(),
        has_ended: status.code() == Some(0),
    }
}

#[test]
fn no_single_call_that_is_refused_makes_the_agent_panic() {
    let idle = Idle::start();
    for (name, number) in CALLS.iter().chain(&OLD_CALLS) {
        let Said { text, has_ended } = said(child(&idle).env(DENIED_CALL, number.to_string()));
        assert!(
            has_ended,
            "without {name} it did not come to its end: {text}"
        );
        let ended: Vec<_> = text.lines().filter(|it| it.starts_with("ended:")).collect();
        assert_eq!(ended.len(), 1, "without {name}: {text}");
        let refused = text.contains(&format!("{name} is refused"));
        match *name {
            // The agent cannot work, and says why.
            "move_pages" | "flock" | "epoll_wait" => {
                assert!(
                    refused && ended[0].contains("seccomp"),
                    "without {name}: {text}"
                );
            }
            // The agent continues, and reports the loss.
            "mbind" | "pidfd_open" | "process_madvise" => {
                assert!(
                    refused && text.contains("ended: Ok"),
                    "without {name}: {text}"
                );
            }
            _ => assert!(!refused, "without {name}: {text}"),
        }
    }
}

/// The capabilities that an agent may need, as docs/src/guest.md lists them, by number (linux/capability.h), and
/// whether this one does. It has the lab's tracker, which needs none, and no balloon.
const CAPABILITIES: [(&str, libc::c_ulong, bool); 7] = [
    ("CAP_SYS_PTRACE", 19, true),
    ("CAP_SYS_NICE", 23, true),
    ("CAP_DAC_READ_SEARCH", 2, false),
    ("CAP_PERFMON", 38, false),
    ("CAP_SYS_ADMIN", 21, false),
    ("CAP_SYS_RESOURCE", 24, false),
    ("CAP_NET_BIND_SERVICE", 10, false),
];

#[test]
fn a_missing_capability_is_said_at_the_start() {
    if !crate::probe::missing(Path::new("/")).is_empty() {
        eprintln!("skipped: this process has not all that an agent needs");
        return;
    }
    let idle = Idle::start();
    let without = |capability: libc::c_ulong| {
        let mut child = child(&idle);
        // SAFETY: the call takes numbers only, and is safe after a fork.
        unsafe {
            child.pre_exec(
                move || match libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) {
                    0 => Ok(()),
                    _ => Err(io::Error::last_os_error()),
                },
            );
        }
        said(&mut child)
    };
    for (name, capability, is_needed) in CAPABILITIES {
        let Said { text, has_ended } = without(capability);
        assert!(has_ended && text.contains("ended: Ok"), "{name}: {text}");
        assert_eq!(
            text.matches("warning:").count(),
            usize::from(is_needed),
            "{name}: {text}"
        );
        assert_eq!(text.contains(&format!("grant {name}")), is_needed, "{text}");
    }
    let mut nobody = child(&idle);
    nobody.uid(NOBODY).gid(NOBODY);
    let text = said(&mut nobody).text;
    assert!(
        text.contains("ended: cannot look at the memory of"),
        "{text}"
    );
    assert!(text.contains("CAP_SYS_PTRACE"), "{text}");
}

#[test]
#[ignore = "the child of those above"]
fn an_agent_with_something_refused() {
    let number = |name: &str| std::env::var(name).ok()?.parse().ok();
    let target: u32 = number(TARGET).expect("a parent names the process to look after");
    let folder = machine(target);
    let root = folder.path();
    let _device = FakeDevice::new(root, 1);
    let socket = root.join("guest.sock");
    let mut config = Config {
        pids: vec![target],
        socket: socket.clone(),
        balloon: BalloonMode::Off,
        ..Config::default()
    };
    config.tuning.epoch_ms = 50;
    let (controls, received) = mpsc::channel();
    let stop = controls.clone();
    // Started before the filter, so that the thread runs whatever is refused.
    thread::spawn(move || {
        let _ = wait_for(&socket);
        thread::sleep(Duration::from_millis(200));
        let _ = demeter_http::ask(&socket, "GET /v1/status", "", Duration::from_millis(500));
        let _ = stop.send(Control::Stop);
    });
    if let Some(call) = number(DENIED_CALL) {
        refuse(call).unwrap();
    }
    let ended = run(root, &config, controls, &received, &|line| {
        println!("{line}")
    });
    match ended {
        Ok(()) => println!("ended: Ok"),
        Err(error) => println!("ended: {error}"),
    }
    // The test's own exit must not reach the filter.
    std::process::exit(0);
}

/// A machine with two tiers that runs this process and another one.
fn machine(target: u32) -> tempfile::TempDir {
    let zones = "Node 0, zone   Normal\n  pages free     5000\n        low      10\n        high     20\n        managed  99999\n\
                 Node 1, zone   Normal\n  pages free     5000\n        low      10\n        high     20\n        managed  99999\n";
    let folder = probe::tests::machine(&[
        ("proc/zoneinfo", zones),
        (
            "sys/kernel/mm/transparent_hugepage/enabled",
            "[always] madvise never",
        ),
    ]);
    // The processes are real.
    fs::remove_dir_all(folder.path().join("proc/self")).unwrap();
    let own = std::process::id();
    for process in [
        own.to_string(),
        target.to_string(),
        "self".into(),
        "1".into(),
    ] {
        symlink(
            format!("/proc/{process}"),
            folder.path().join("proc").join(process),
        )
        .unwrap();
    }
    folder
}

/// Waits a limited time for a listener on the socket.
fn wait_for(socket: &Path) -> io::Result<()> {
    let deadline = Instant::now() + Duration::from_secs(5);
    while !socket.exists() {
        if Instant::now() > deadline {
            return Err(io::ErrorKind::TimedOut.into());
        }
        thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// Makes a system call fail with EPERM for this thread and its children.
fn refuse(call: u32) -> io::Result<()> {
    let step = |code: u32, k: u32, jump: u8| libc::sock_filter {
        code: code as u16,
        jt: 0,
        jf: jump,
        k,
    };
    // The first word of the filter's input is the number of the call.
    let steps = [
        step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0),
        step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, call, 1),
        step(
            libc::BPF_RET | libc::BPF_K,
            libc::SECCOMP_RET_ERRNO | libc::EPERM as u32,
            0,
        ),
        step(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW, 0),
    ];
    let program = libc::sock_fprog {
        len: steps.len() as u16,
        filter: steps.as_ptr().cast_mut(),
    };
    // SAFETY: the program and its steps outlive the calls, which only read them.
    unsafe {
        if libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0
            || libc::prctl(
                libc::PR_SET_SECCOMP,
                libc::SECCOMP_MODE_FILTER,
                &raw const program,
            ) != 0
        {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}
