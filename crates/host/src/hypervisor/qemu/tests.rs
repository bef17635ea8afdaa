//! Tests of the client against honest servers and servers that stall, lie, split and flood.

use std::path::PathBuf;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};

use super::decode::LINE_BYTES_MAX;
use super::*;
use crate::hypervisor::{Connection, Event};
use crate::outside::Outside;

const GREETING: &str = "{\"QMP\": {\"version\": {}, \"capabilities\": []}}\r\n";

/// Time limits short enough for tests.
const SHORT: Timeouts = Timeouts {
    greeting: Duration::from_millis(200),
    command: Duration::from_millis(200),
};

/// A socket with a scripted server.
struct Fake {
    _folder: tempfile::TempDir,
    path: PathBuf,
}

impl Fake {
    /// `script` gets the first connection.
    fn new<F>(script: impl FnOnce(BufReader<UnixStream>) -> F + Send + 'static) -> Self
    where
        F: Future<Output = ()> + Send,
    {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("qmp");
        let listener = UnixListener::bind(&path).unwrap();
        tokio::spawn(async move {
            let (stream, _) = listener.accept().await.unwrap();
            script(BufReader::new(stream)).await;
        });
        Self {
            _folder: folder,
            path,
        }
    }

    async fn open(&self, limits: Timeouts) -> Result<Connection<Qemu>, QmpError> {
        Qemu::connect(&self.path, &Outside::default(), None, limits).await
    }
}

/// The next command; `None` ends the script when the client has gone.
async fn heard(stream: &mut BufReader<UnixStream>) -> Option<Value> {
    let mut line = String::new();
    match stream.read_line(&mut line).await {
        Ok(0) | Err(_) => None,
        Ok(_) => Some(serde_json::from_str(&line).unwrap()),
    }
}

async fn say(stream: &mut BufReader<UnixStream>, text: &str) {
    // The client may have gone already; the test checks its result.
    let _ = stream.write_all(text.as_bytes()).await;
}

async fn answer(stream: &mut BufReader<UnixStream>, command: &Value, value: Value) {
    let line = json!({"return": value, "id": command["id"]});
    say(stream, &format!("{line}\r\n")).await;
}

/// Greets and negotiates, as QEMU does.
async fn greet(stream: &mut BufReader<UnixStream>) {
    say(stream, GREETING).await;
    let negotiation = heard(stream).await.unwrap();
    assert_eq!(negotiation["execute"], "qmp_capabilities");
    answer(stream, &negotiation, json!({})).await;
    let events = heard(stream).await.unwrap();
    assert_eq!(events["execute"], "migrate-set-capabilities");
    answer(stream, &events, json!({})).await;
}

/// Waits until the client hangs up.
async fn linger(mut stream: BufReader<UnixStream>) {
    let mut rest = vec![];
    let _ = stream.read_to_end(&mut rest).await;
}

#[tokio::test]
async fn commands_are_answered_and_events_kept_in_order() {
    let fake = Fake::new(|mut stream| async move {
        greet(&mut stream).await;
        let balloon = heard(&mut stream).await.unwrap();
        assert_eq!(balloon["arguments"], json!({"value": 4096}));
        say(
            &mut stream,
            "{\"event\": \"RTC_CHANGE\"}\n{\"event\": \"RESET\"}\n",
        )
        .await;
        answer(&mut stream, &balloon, json!({})).await;
        let refused = heard(&mut stream).await.unwrap();
        let line = json!({"error": {"class": "DeviceNotActive", "desc": "No balloon"}, "id": refused["id"]});
        say(&mut stream, &format!("{line}\n{{\"event\": \"STOP\"}}\n")).await;
    });
    let mut connection = fake.open(Timeouts::default()).await.unwrap();
    assert_eq!(connection.process.pid.0, std::process::id());
    let _: Value = connection
        .hypervisor
        .execute("balloon", json!({"value": 4096}))
        .await
        .unwrap();
    let refused = connection
        .hypervisor
        .execute::<Value>("query-balloon", json!({}));
    let said = refused.await.unwrap_err().to_string();
    assert!(said.contains("refuses query-balloon: No balloon"), "{said}");
    assert_eq!(connection.events.next().await, Some(Event::Reset));
    assert_eq!(connection.events.next().await, Some(Event::Changed));
    assert_eq!(connection.events.next().await, None, "the server has gone");
    let late = connection
        .hypervisor
        .execute::<Value>("query-status", json!({}));
    assert!(matches!(late.await, Err(QmpError::Gone { .. })));
}

#[tokio::test]
async fn an_answer_in_single_bytes_is_an_answer() {
    let fake = Fake::new(|mut stream| async move {
        greet(&mut stream).await;
        let command = heard(&mut stream).await.unwrap();
        let line = json!({"return": [1, 2, 3], "id": command["id"]}).to_string() + "\r\n";
        for byte in line.bytes() {
            stream.write_all(&[byte]).await.unwrap();
            tokio::task::yield_now().await;
        }
        linger(stream).await;
    });
    let connection = fake.open(Timeouts::default()).await.unwrap();
    let list: Vec<u64> = connection.hypervisor.execute("x", json!({})).await.unwrap();
    assert_eq!(list, [1, 2, 3]);
    let other = fake.open(SHORT).await;
    assert!(
        matches!(other, Err(QmpError::Silent { .. })),
        "one client at a time, as QEMU does: {other:?}"
    );
}

#[tokio::test]
async fn a_late_answer_goes_to_nobody() {
    let fake = Fake::new(|mut stream| async move {
        greet(&mut stream).await;
        let first = heard(&mut stream).await.unwrap();
        let second = heard(&mut stream).await.unwrap();
        answer(&mut stream, &first, json!("first")).await;
        answer(&mut stream, &second, json!("second")).await;
        linger(stream).await;
    });
    let connection = fake.open(SHORT).await.unwrap();
    let stalled = connection
        .hypervisor
        .execute::<String>("first", json!({}))
        .await;
    assert!(matches!(stalled, Err(QmpError::Timeout { .. })));
    let text: String = connection
        .hypervisor
        .execute("second", json!({}))
        .await
        .unwrap();
    assert_eq!(text, "second");
}

#[tokio::test]
async fn commands_do_not_pile_up() {
    let fake = Fake::new(|mut stream| async move {
        greet(&mut stream).await;
        linger(stream).await;
    });
    let connection = fake.open(SHORT).await.unwrap();
    let calls: Vec<_> = (0..100)
        .map(|_| {
            let qemu = connection.hypervisor.clone();
            tokio::spawn(async move { qemu.execute::<Value>("stop", json!({})).await })
        })
        .collect();
    let mut refused = 0;
    for call in calls {
        match call.await.unwrap() {
            Err(QmpError::Timeout { .. }) => {}
            Err(QmpError::Gone { why, .. }) => {
                assert!(why.contains("too many"), "{why}");
                refused += 1;
            }
            other => panic!("{other:?}"),
        }
    }
    assert!(refused >= 50, "{refused}");
}

/// The error of a negotiated connection whose server continues with `text`.
async fn fault(text: String) -> String {
    let fake = Fake::new(|mut stream| async move {
        greet(&mut stream).await;
        let _ = heard(&mut stream).await;
        say(&mut stream, &text).await;
        linger(stream).await;
    });
    let connection = fake.open(Timeouts::default()).await.unwrap();
    let failed = connection
        .hypervisor
        .execute::<u64>("query-x", json!({}))
        .await;
    failed.unwrap_err().to_string()
}

#[tokio::test]
async fn lies_and_floods_end_the_connection_with_a_reason() {
    for (text, want) in [
        (GREETING.to_owned(), "greets twice"),
        ("{\"return\": 1, \"id\": 99}\n".into(), "what was not asked"),
        ("nonsense\n".into(), "no JSON object"),
        ("x".repeat(LINE_BYTES_MAX + 2), "longer than"),
        ("{\"event\": \"RESET\"}\n".repeat(1000), "faster than"),
        ("[".repeat(100_000) + "\n", "no JSON object"),
        (
            String::from("{\"return\": \"text\", \"id\": 3}\n"),
            "unknown",
        ),
    ] {
        let said = fault(text).await;
        assert!(said.contains(want), "{want}: {said}");
    }
}

#[tokio::test]
async fn a_server_that_says_the_wrong_thing_first_is_refused() {
    for (first, want) in [
        ("", "does not greet within"),
        ("{\"event\": \"RESET\"}\n", "does not greet first"),
        ("SSH-2.0-OpenSSH_9.2\r\n", "no JSON object"),
    ] {
        let fake = Fake::new(move |mut stream| async move {
            say(&mut stream, first).await;
            linger(stream).await;
        });
        let said = fake.open(SHORT).await.unwrap_err().to_string();
        assert!(said.contains(want), "{first}: {said}");
    }
    let missing = Qemu::connect(
        "/nonexistent/qmp".as_ref(),
        &Outside::default(),
        None,
        SHORT,
    )
    .await;
    let said = missing.unwrap_err().to_string();
    assert!(said.contains("-qmp unix:/nonexistent/qmp"), "{said}");
}

#[tokio::test]
async fn the_connection_ends_with_its_last_handle() {
    let (hung_up, wait) = tokio::sync::oneshot::channel();
    let fake = Fake::new(|mut stream| async move {
        greet(&mut stream).await;
        linger(stream).await;
        hung_up.send(()).unwrap();
    });
    drop(fake.open(Timeouts::default()).await.unwrap());
    wait.await.unwrap();
}
