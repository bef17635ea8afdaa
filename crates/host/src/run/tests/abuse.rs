//! Wrong requests to the API, by mistake or on purpose.
//!
//! Each request is answered or cut off in bounded time and memory. Meanwhile the API serves others,
//! and VMs are managed.

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::*;

/// Time in which an honest client is answered, whatever others do.
const HONEST_MAX: Duration = Duration::from_secs(2);

/// Time in which a connection is answered or closed.
const ANSWER_MAX: Duration = Duration::from_secs(15);

/// Sends bytes as they are. Returns all that comes back until the connection ends.
async fn send(socket: &std::path::Path, bytes: &[u8]) -> String {
    let mut stream = UnixStream::connect(socket).await.unwrap();
    // The controller may close the connection before it has read everything.
    let _ = stream.write_all(bytes).await;
    let mut answer = vec![];
    let read = stream.read_to_end(&mut answer);
    let read = timeout(ANSWER_MAX, read).await.expect("it ends in time");
    // A reset is an end, too.
    let _ = read;
    String::from_utf8_lossy(&answer).into_owned()
}

fn put(path: &str, headers: &str, body: &str) -> Vec<u8> {
    format!(
        "PUT {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n\
         {headers}\r\n{body}"
    )
    .into_bytes()
}

fn sized(path: &str, body: &str) -> Vec<u8> {
    put(path, &format!("Content-Length: {}\r\n", body.len()), body)
}

fn get(path: &str, headers: &str) -> Vec<u8> {
    format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{headers}\r\n").into_bytes()
}

/// Requests and the status that each gets. Without a status the connection may also just be closed.
#[expect(clippy::too_many_lines, reason = "a table of cases")]
fn wrong_requests() -> Vec<(&'static str, Vec<u8>, Option<u16>)> {
    let many = "X-A: b\r\n".repeat(1000);
    let chunks = format!("{:x}\r\n{}\r\n", 8192, "7".repeat(8192)).repeat(64);
    vec![
        ("no HTTP", b"hello\r\n\r\n".to_vec(), Some(400)),
        ("bytes", vec![0, 255, 13, 10, 13, 10], Some(400)),
        ("HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(), None),
        (
            "TLS",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03".to_vec(),
            None,
        ),
        ("a long path", get(&"/x".repeat(40_000), ""), None),
        ("many headers", get("/v1/vms", &many), None),
        ("an unknown path", get("/v2/vms", ""), Some(404)),
        ("no such query", get("/v1/events?after=-1", ""), Some(400)),
        (
            "a path that climbs",
            get("/v1/vms/../../etc/passwd", ""),
            Some(404),
        ),
        ("a wrong method", sized("/v1/vms", "{}"), Some(405)),
        (
            "no method",
            b"BREW /v1/vms HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".to_vec(),
            Some(405),
        ),
        ("a body that is none", sized("/v1/policy", ""), Some(400)),
        (
            "deep JSON",
            sized("/v1/policy", &"[".repeat(4000)),
            Some(400),
        ),
        (
            "deep JSON of a section",
            sized("/v1/vms/new", &"{\"a\":".repeat(800)),
            Some(400),
        ),
        (
            "a wrong type",
            sized("/v1/policy", "{\"policy\": 7}"),
            Some(400),
        ),
        (
            "a key twice",
            sized("/v1/policy", "{\"policy\":\"wss\",\"policy\":\"wss\"}"),
            Some(422),
        ),
        (
            "a huge number",
            sized("/v1/vms/db/tiers", "{\"fast_mib\": 1e300}"),
            Some(422),
        ),
        (
            "no UTF-8",
            put("/v1/policy", "Content-Length: 2\r\n", "\u{fffd}"),
            Some(400),
        ),
        (
            "the beginning of a huge body",
            put("/v1/policy", "Content-Length: 1000000000000\r\n", "{"),
            Some(400),
        ),
        (
            "a long body",
            sized("/v1/policy", &" ".repeat(8192)),
            Some(413),
        ),
        (
            "chunks without end",
            put("/v1/policy", "Transfer-Encoding: chunked\r\n", &chunks),
            Some(413),
        ),
        (
            "two lengths",
            put(
                "/v1/policy",
                "Content-Length: 2\r\nContent-Length: 3\r\n",
                "{}",
            ),
            Some(400),
        ),
        (
            "no length",
            put("/v1/policy", "Content-Length: x\r\n", "{}"),
            Some(400),
        ),
        (
            "half a body",
            put("/v1/policy", "Content-Length: 20\r\n", "{\"pol"),
            Some(400),
        ),
    ]
}

#[tokio::test]
async fn wrong_requests_are_answered_with_a_line_or_cut_off() {
    let vm = FakeVm::new(SIZE);
    let _guest = guest(&vm);
    let host = Host::start(folder(), &section("db", &vm, "")).await;
    host.until_owns("db", 32, 96).await;
    for (what, bytes, status) in wrong_requests() {
        let answer = send(&host.socket(), &bytes).await;
        let Some(status) = status else {
            let is_refused = answer.is_empty() || answer.starts_with("HTTP/1.1 4");
            assert!(
                is_refused || answer.starts_with("HTTP/1.1 505"),
                "{what}: {answer}"
            );
            continue;
        };
        let begins = format!("HTTP/1.1 {status} ");
        assert!(answer.starts_with(&begins), "{what}: {answer}");
        // The HTTP library itself answers what is no HTTP, without a body.
        let (_, body) = answer.split_once("\r\n\r\n").unwrap();
        let says = body.starts_with("{\"error\":\"") && !body.contains('\n');
        assert!(says || body.is_empty() && status == 400, "{what}: {answer}");
    }
    let answer = host.ask("PUT /v1/vms/db/tiers", "{\"fast_mib\": 48}").await;
    assert!(answer.starts_with("204"), "{answer}");
    host.until_owns("db", 48, 96).await;
}

#[tokio::test]
async fn clients_that_stall_take_no_place_from_honest_ones() {
    let vm = FakeVm::new(SIZE);
    let _guest = guest(&vm);
    let host = Host::start(folder(), &section("db", &vm, "")).await;
    host.until_owns("db", 32, 96).await;
    let halves = [
        vec![],
        b"GET /v1/vms HTTP/1.1\r\nHost:".to_vec(),
        put("/v1/policy", "Content-Length: 20\r\n", "{\"pol"),
        put(
            "/v1/vms/db/tiers",
            "Transfer-Encoding: chunked\r\n",
            "5\r\n{\"fa",
        ),
    ];
    let mut stalled = vec![];
    for fast_mib in [40, 48, 56, 64] {
        // More than the API has places.
        for half in halves.iter().cycle().take(100) {
            // The queue may be full.
            if let Ok(mut stream) = UnixStream::connect(host.socket()).await {
                let _ = stream.write_all(half).await;
                stalled.push(stream);
            }
        }
        let body = format!("{{\"fast_mib\": {fast_mib}}}");
        let asked = timeout(HONEST_MAX, host.ask("PUT /v1/vms/db/tiers", &body));
        let answer = asked.await.expect("the API answers meanwhile");
        assert!(answer.starts_with("204"), "{answer}");
        host.until_owns("db", fast_mib, 96).await;
    }
    assert!(stalled.len() > 100, "{} connected", stalled.len());
}
