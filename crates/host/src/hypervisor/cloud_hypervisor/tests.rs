//! Tests of the client against an honest server and against invalid ones.

use std::io::{Read, Write};
use std::os::unix::net::UnixListener;
use std::thread::JoinHandle;

use demeter_policy::{ByteCount, MIB, Tier, TierBytes};
use tokio::time::timeout;

use super::*;
use crate::backing::Backing;
use crate::hypervisor::{Channel, Connection, Event, Hypervisor};
use crate::memory::{HostFiles, LiveBacking};
use crate::outside::{MayWait, Outside};
use crate::testing::{FakeVm, Told};

const SIZE: TierBytes = TierBytes {
    fast: ByteCount(4 * MIB),
    slow: ByteCount(8 * MIB),
};

const SHORT: Timeouts = Timeouts {
    answer: Duration::from_millis(300),
    look_every: Duration::from_millis(10),
};

/// A server that gives one answer to each connection and leaves it open.
fn serve(path: &Path, answers: Vec<String>) -> JoinHandle<()> {
    let listener = UnixListener::bind(path).unwrap();
    std::thread::spawn(move || {
        let mut open = vec![];
        for answer in answers {
            let (mut stream, _) = listener.accept().unwrap();
            let mut question = vec![0; 4096];
            let _ = stream.read(&mut question);
            // The client may have hung up.
            let _ = stream.write_all(answer.as_bytes());
            open.push(stream);
        }
        for mut stream in open {
            let _ = stream.read_to_end(&mut vec![]);
        }
    })
}

fn ok(body: &str) -> String {
    format!(
        "HTTP/1.1 200 \r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )
}

async fn refusal(answers: Vec<String>) -> String {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("api.sock");
    serve(&path, answers);
    let connected =
        CloudHypervisor::connect(&path, &Outside::default(), None, "/".as_ref(), SHORT).await;
    let said = connected.unwrap_err().to_string();
    assert_eq!(said.lines().count(), 1, "{said}");
    said
}

#[tokio::test]
async fn a_server_that_is_none_is_refused_in_one_line() {
    let outside = Outside::default();
    let missing = CloudHypervisor::connect(
        "/nonexistent/x".as_ref(),
        &outside,
        None,
        "/".as_ref(),
        SHORT,
    );
    let said = missing.await.unwrap_err().to_string();
    assert!(said.contains("--api-socket path=/nonexistent/x"), "{said}");

    let pid = std::process::id();
    let ping = ok(&format!("{{\"version\": \"v48.0\", \"pid\": {pid}}}"));
    let info = |state: &str, more: &str| {
        let text =
            format!("{{\"state\": {state:?}, \"config\": {{\"memory\": {{\"size\": 0}}{more}}}}}");
        ok(&text)
    };
    let flood = format!("HTTP/1.1 200 \r\n\r\n{}", "[".repeat(2 << 20));
    let long = format!("HTTP/1.1 200 \r\nContent-Length: {}\r\n\r\n", 1_u64 << 40);
    for (answers, want) in [
        (vec![String::new()], "does not answer GET /api/v1/vmm.ping"),
        (
            vec!["SSH-2.0-OpenSSH_9.2\r\n\r\n".into()],
            "does not answer",
        ),
        (vec![flood], "longer than"),
        (vec![long], "longer than"),
        (vec![ok("[[[[")], "something unknown"),
        (vec![ok("{\"pid\": 1}")], "opened by process"),
        (
            vec![
                ping.clone(),
                "HTTP/1.1 404 \r\nContent-Length: 5\r\n\r\nno VM".into(),
            ],
            "refuses GET /api/v1/vm.info: no VM",
        ),
        (
            vec![ping.clone(), ok("{}")],
            "something unknown: missing field",
        ),
        (vec![ping.clone(), info("Created", "")], "does not run"),
        (
            vec![
                ping,
                info("Running", ", \"vsock\": {\"cid\": 3, \"socket\": \"v\"}"),
            ],
            "give --vsock",
        ),
    ] {
        let said = refusal(answers).await;
        assert!(said.contains(want), "{want}: {said}");
    }
}

#[tokio::test]
async fn a_version_without_zones_is_told_so() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("api.sock");
    let info = ok("{\"state\": \"Running\", \"config\": {\"memory\": {\"size\": 1073741824}}}");
    let answers = [vec![ok("{\"version\": \"v0.5\"}")], vec![info; 100]].concat();
    serve(&path, answers);
    let outside = Outside::default();
    let connection = CloudHypervisor::connect(&path, &outside, None, "/".as_ref(), SHORT);
    let connection = connection.await.unwrap();
    assert!(connection.agent.is_none());
    let said = connection.hypervisor.backends().await.unwrap_err();
    assert!(said.to_string().contains("--memory-zone"), "{said}");
}

async fn backing(connection: &Connection<CloudHypervisor>) -> LiveBacking<CloudHypervisor> {
    let (host, outside) = (HostFiles::default(), Outside::default());
    let memdevs = FakeVm::memdev();
    let found = LiveBacking::find(&host, &outside, "a", connection, &memdevs);
    found.await.unwrap()
}

#[tokio::test]
#[cfg_attr(
    not(target_arch = "x86_64"),
    ignore = "where Cloud Hypervisor puts memory is known for x86-64 only"
)]
async fn memory_of_an_old_map_is_nobodys_after_a_reset() {
    let vm = FakeVm::new(SIZE);
    let mut connection = vm.connect_cloud_hypervisor().await;
    let agent = connection.agent.clone().unwrap();
    assert_eq!(agent.channel, Channel::Vsock);
    assert_eq!(agent.path, vm.folder().join("vsock"));
    let wait = MayWait::in_a_test();
    let old = backing(&connection).await;
    assert_eq!(old.backed(Tier::Fast, &wait).unwrap(), SIZE.fast);

    vm.tell(Told::Event(Event::Reset));
    let next = timeout(Duration::from_secs(10), connection.events.next());
    assert_eq!(next.await.unwrap(), Some(Event::Reset));
    assert_eq!(connection.events.next().await, Some(Event::Changed));

    // The new guest's memory must survive a punch by the old map.
    let range = demeter_policy::PhysRange::new(demeter_policy::GuestPhysAddr(0), SIZE.fast);
    let extent = old.resolve(Tier::Fast, range.unwrap()).unwrap();
    old.punch(extent, &wait).unwrap();
    assert_eq!(old.backed(Tier::Fast, &wait).unwrap(), ByteCount(0));
    let new = backing(&connection).await;
    assert_eq!(new.backed(Tier::Fast, &wait).unwrap(), SIZE.fast);
}
