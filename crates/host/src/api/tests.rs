//! Tests of the API over real sockets, with a scripted controller.

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};

use super::*;
use crate::view::VmView;

/// An API whose controller knows one VM, `db`, and has 100 MiB of fast memory.
fn handle() -> Handle {
    let (changes, mut received) = mpsc::channel::<(Peer, Change)>(1);
    let view = HostView {
        policy: Policy::Static,
        vms: vec![VmView {
            name: "db".into(),
            ..VmView::default()
        }],
        ..HostView::default()
    };
    let (publish, view) = watch::channel(Arc::new(view));
    let log = EventLog::default();
    log.push(1, None, "started".into());
    log.push(2, Some("db".into()), "up".into());
    tokio::spawn(async move {
        while let Some((peer, change)) = received.recv().await {
            assert!(!peer.0.is_empty());
            match change {
                Change::SetTiers { vm, tiers, answer } => {
                    let fast = tiers.fast.unwrap_or_default().0;
                    let result = match vm.as_str() {
                        "db" if fast > 100 * MIB => {
                            Err(ChangeError::Conflict("beyond the pool".into()))
                        }
                        "db" => Ok(()),
                        _ => Err(ChangeError::NoVm(vm)),
                    };
                    answer.send(result).unwrap();
                }
                Change::Forgive { vm, answer } => {
                    let result = match vm.as_str() {
                        "db" => Ok(()),
                        _ => Err(ChangeError::Conflict("it is not marked".into())),
                    };
                    answer.send(result).unwrap();
                }
                Change::Setting {
                    vm, asked, answer, ..
                } => {
                    let result = match (vm.as_str(), asked) {
                        ("db", Asked::Add(_)) => {
                            Err(ChangeError::Conflict("it is managed already".into()))
                        }
                        ("new", Asked::Add(vm)) if vm.share == 7 => Ok(()),
                        ("db", _) => Ok(()),
                        _ => Err(ChangeError::NoVm(vm)),
                    };
                    answer.send(result).unwrap();
                }
                Change::Evacuate { answer } => answer.send(Ok(())).unwrap(),
                Change::Reload { answer } => answer.send(Ok(vec![])).unwrap(),
                Change::SetPolicy { policy, answer } => {
                    publish.send_modify(|view| {
                        Arc::make_mut(view).policy = policy.unwrap_or_default();
                    });
                    answer.send(Ok(())).unwrap();
                }
            }
        }
    });
    let config = "pool = { fast_mib = 100, slow_mib = 9 }\n";
    let (_, config) = watch::channel(Arc::new(toml::from_str(config).unwrap()));
    Handle {
        view,
        config,
        log,
        changes,
    }
}

/// A VM's section.
const NEW: &str =
    "{\"libvirt\": \"n\", \"share\": 7, \"fast\": {\"size_mib\": 1}, \"slow\": {\"size_mib\": 16}}";

pub(crate) async fn ask(stream: impl AsyncRead + AsyncWrite, request: &str, body: &str) -> String {
    let mut stream = Box::pin(stream);
    let (first, headers) = request.split_once('\n').unwrap_or((request, ""));
    let text = format!(
        "{first} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n\
         {headers}Content-Length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(text.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    let (_, answer) = answer.split_once("HTTP/1.1 ").unwrap();
    answer.into()
}

#[tokio::test]
#[expect(clippy::too_many_lines, reason = "a table of requests")]
async fn what_is_asked_is_answered_or_refused_with_a_reason() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("sock");
    let (listener, _socket) = unix(&path).unwrap();
    tokio::spawn(serve_unix(listener, handle()));
    let long = format!("{{\"fast_mib\": {}1}}", " ".repeat(BODY_BYTES_MAX));
    for (request, body, want, why) in [
        ("GET /v1/vms", "", "200", "\"name\":\"db\""),
        ("GET /metrics", "", "200", "demeter_host_vm_up{vm=\"db\"}"),
        ("GET /v1/events", "", "200", "\"text\":\"started\""),
        ("GET /v1/events?after=1", "", "200", "[{\"number\":2,"),
        ("GET /v1/events?after=9", "", "200", "\r\n\r\n[]"),
        ("GET /v1/events?after=x", "", "400", ""),
        ("PUT /v1/vms/db/tiers", "{\"fast_mib\": 64}", "204", ""),
        (
            "PUT /v1/vms/db/tiers",
            "{\"fast_mib\": 101}",
            "409",
            "{\"error\":\"beyond the pool\"}",
        ),
        (
            "PUT /v1/vms/db/tiers",
            "{\"fast_mib\": 18446744073709551615}",
            "409",
            "pool",
        ),
        (
            "PUT /v1/vms/db/tiers",
            "{\"fast_mib\": -1}",
            "422",
            "fast_mib",
        ),
        (
            "PUT /v1/vms/db/tiers",
            "{\"fast\": 1}",
            "422",
            "unknown field",
        ),
        ("PUT /v1/vms/db/tiers", "{}", "400", "name fast_mib"),
        ("PUT /v1/vms/db/tiers", "nonsense", "400", "error"),
        ("PUT /v1/vms/db/tiers", &long, "413", "error"),
        (
            "PUT /v1/vms/web/tiers",
            "{\"slow_mib\": 1}",
            "404",
            "no VM web",
        ),
        (
            "PUT /v1/vms/a%20b/tiers",
            "{\"slow_mib\": 1}",
            "400",
            "'a b' is no name",
        ),
        (
            "PUT /v1/policy",
            "{\"policy\": \"magic\"}",
            "422",
            "`static`, `shares`, `wss`",
        ),
        ("POST /v1/vms/db/forgive", "", "204", ""),
        ("POST /v1/vms/web/forgive", "", "409", "not marked"),
        ("GET /v1/vms/db/forgive", "", "405", ""),
        ("PUT /v1/policy", "{\"policy\": \"wss\"}", "204", ""),
        ("GET /v1/vms", "", "200", "\"policy\":\"wss\""),
        ("DELETE /v1/policy", "", "204", ""),
        ("GET /v1/vms", "", "200", "\"policy\":\"static\""),
        ("PUT /v1/vms/new", NEW, "204", ""),
        ("PUT /v1/vms/db", NEW, "409", "managed already"),
        (
            "PUT /v1/vms/new",
            "{\"libvirt\": \"n\"}",
            "422",
            "missing field",
        ),
        ("PUT /v1/vms/new", "7", "422", "VM new: invalid type"),
        ("PUT /v1/vms/db/settings", "{\"share\": 3}", "204", ""),
        ("PUT /v1/vms/db/settings", "{}", "400", "set share"),
        (
            "PUT /v1/vms/db/settings",
            "{\"shares\": 3}",
            "422",
            "unknown field",
        ),
        (
            "PUT /v1/vms/web/settings",
            "{\"share\": 3}",
            "404",
            "no VM web",
        ),
        ("DELETE /v1/vms/db/settings", "", "204", ""),
        ("DELETE /v1/vms/db?running=true", "", "204", ""),
        ("DELETE /v1/vms/db?running=yes", "", "400", ""),
        ("POST /v1/vms", "", "405", ""),
        ("GET /etc/passwd", "", "404", ""),
    ] {
        let stream = UnixStream::connect(&path).await.unwrap();
        let answer = ask(stream, request, body).await;
        assert!(answer.starts_with(want), "{request} {body}: {answer}");
        assert!(answer.contains(why), "{request} {body}: {answer}");
    }
}

#[tokio::test]
async fn over_tcp_only_the_token_opens() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("token");
    std::fs::write(&path, "correct horse battery\n").unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
    let listener = tcp("127.0.0.1:0".parse().unwrap()).await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(serve_tcp(listener, handle(), Token::load(&path).unwrap()));
    for (header, want) in [
        ("", "401"),
        ("Authorization: Bearer correct horse\r\n", "401"),
        ("Authorization: Basic correct horse battery\r\n", "401"),
        ("Authorization: Bearer correct horse battery\r\n", "200"),
    ] {
        for route in ["/v1/vms", "/metrics"] {
            let stream = TcpStream::connect(address).await.unwrap();
            let answer = ask(stream, &format!("GET {route}\n{header}"), "").await;
            assert!(answer.starts_with(want), "{header} {route}: {answer}");
        }
        // A section names sockets of this machine.
        let stream = TcpStream::connect(address).await.unwrap();
        let answer = ask(stream, &format!("PUT /v1/vms/new\n{header}"), NEW).await;
        let want = if want == "200" { "405" } else { want };
        assert!(answer.starts_with(want), "{header}: {answer}");
    }
}
