use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;

use super::*;

/// Modules that may open files: the controller's own files, files that the kernel answers at once,
/// or files on threads that may block.
const OWN: [&str; 10] = [
    "outside.rs",
    "outside/sizes.rs",
    "store.rs",
    "api/listen.rs",
    "process.rs",
    "probe/mod.rs",
    "probe/kvm.rs",
    "hard_limit.rs",
    // They use open descriptors and take a `MayWait`.
    "memory/file.rs",
    "memory/process.rs",
];

/// All sources below a folder, except for tests and test doubles.
fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let is_test = [
            "tests",
            "testing",
            "tests.rs",
            "conformance.rs",
            "world.rs",
            "live.rs",
        ];
        if path.ends_with("memory/live.rs") || !is_test.contains(&name.as_str()) {
            match path.is_dir() {
                true => sources(&path, found),
                false => found.push(path),
            }
        }
    }
}

#[test]
fn nobody_else_waits_for_files() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut all = vec![];
    sources(&root, &mut all);
    assert!(all.len() > 40, "{all:?}");
    for path in all {
        let own = path.strip_prefix(&root).unwrap().to_str().unwrap();
        if OWN.contains(&own) {
            continue;
        }
        let text = fs::read_to_string(&path).unwrap();
        let code = text.split("#[cfg(test)]\nmod tests").next().unwrap();
        for (number, line) in code.lines().enumerate() {
            let line = line.split("//").next().unwrap();
            for waits in [
                "fs::read",
                "fs::metadata",
                "fs::symlink_metadata",
                "fs::write",
                "File::open",
                "OpenOptions",
                ".metadata()",
                ".read_link()",
                "UnixStream::connect",
                "spawn_blocking",
                "block_in_place",
            ] {
                // Its own questions have a time limit.
                let is_answer =
                    own == "hypervisor/cloud_hypervisor/connection.rs" && waits == "spawn_blocking";
                assert!(
                    is_answer || !line.contains(waits),
                    "{own}:{}: {waits} may wait for others; go by way of crate::outside",
                    number + 1
                );
            }
        }
    }
}

#[tokio::test]
async fn who_hangs_takes_one_thread_and_is_left_after_a_while() {
    let outside = Outside::default();
    let (go, wait) = std::sync::mpsc::channel::<()>();
    let limit = Duration::from_millis(50);
    let hangs = outside.ask_within(limit, "a hung disk", move |_| wait.recv());
    let said = hangs.await.unwrap_err().to_string();
    assert!(
        said.contains("a hung disk") && said.contains("50ms"),
        "{said}"
    );
    for _ in 0..20 {
        let begun = Arc::new(Semaphore::new(1));
        let inner = begun.clone();
        let limit = Duration::from_millis(5);
        let asked = outside.ask_within(limit, "again", move |_| inner.close());
        assert!(asked.await.is_err());
        assert!(!begun.is_closed(), "no second thread waits");
    }
    let other = Outside::default().ask("another VM", |_| 7).await;
    assert_eq!(other, Ok(7));
    go.send(()).unwrap();
    assert_eq!(outside.ask("its disk is back", |_| 8).await, Ok(8));
}

#[tokio::test]
async fn sockets_are_reached_by_no_link_of_others() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("qmp");
    let _listener = UnixListener::bind(&socket).unwrap();
    let outside = Outside::default();
    outside.connect(&socket).await.unwrap();
    // Our own links are followed, in place of a folder and of a file.
    let link = folder.path().join("link");
    symlink("qmp", &link).unwrap();
    outside.connect(&link).await.unwrap();
    let moved = folder.path().join("moved");
    symlink(folder.path(), &moved).unwrap();
    outside.connect(&moved.join("../qmp")).await.unwrap_err();
    outside.connect(&moved.join("qmp")).await.unwrap();
    let itself = folder.path().join("itself");
    symlink("itself", &itself).unwrap();
    assert!(outside.connect(&itself).await.is_err());
    assert!(outside.connect(&folder.path().join("none")).await.is_err());
    if !geteuid().is_root() {
        eprintln!("skipped: only root makes links of others");
        return;
    }
    for link in [&link, &moved] {
        std::os::unix::fs::lchown(link, Some(4711), None).unwrap();
    }
    for path in [link, moved.join("qmp")] {
        let said = outside.connect(&path).await.unwrap_err().to_string();
        assert!(said.contains("symbolic link of user 4711"), "{said}");
    }
}
