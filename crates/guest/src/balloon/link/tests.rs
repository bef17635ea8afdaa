use std::io::{Read, Write};
use std::os::unix::net::UnixListener;

use demeter_policy::{ByteCount, PAGE_SIZE};
use demeter_proto::{Outcome, RequestId, Resize, encode};

use super::super::simulated::Shared;
use super::*;

/// A pipe with a relay at one end and the test as the host at the other.
struct Host {
    pipe: UnixStream,
    decoder: Decoder,
    balloon: Shared,
    _root: tempfile::TempDir,
}

impl Host {
    fn new() -> (Self, RunningRelay) {
        let root = readings::tests::root();
        let balloon = Shared::new(5000);
        let (pipe, theirs) = UnixStream::pair().unwrap();
        pipe.set_read_timeout(Some(Duration::from_secs(20)))
            .unwrap();
        theirs.set_nonblocking(true).unwrap();
        let port = Port::from(OwnedFd::from(theirs));
        let link = RunningRelay::over(port, root.path(), balloon.opener(), None).unwrap();
        let host = Self {
            pipe,
            decoder: Decoder::default(),
            balloon,
            _root: root,
        };
        (host, link)
    }

    fn say(&mut self, message: &Message) {
        let mut bytes = vec![];
        encode(message, &mut bytes).unwrap();
        self.pipe.write_all(&bytes).unwrap();
    }

    fn hear(&mut self) -> Message {
        loop {
            if let Some(message) = self.decoder.next().unwrap() {
                return message;
            }
            let mut buffer = [0; 1000];
            let count = self.pipe.read(&mut buffer).unwrap();
            assert!(count > 0, "the relay has gone");
            self.decoder.push(&buffer[..count]);
        }
    }

    fn welcome(&mut self) -> Hello {
        let Message::Hello(hello) = self.hear() else {
            panic!("it greets first");
        };
        let session = hello.session;
        self.say(&Message::Welcome { session });
        hello
    }

    fn hear_until<T>(&mut self, mut wanted: impl FnMut(Message) -> Option<T>) -> T {
        for _ in 0..1000 {
            if let Some(found) = wanted(self.hear()) {
                return found;
            }
        }
        panic!("it talks of other things");
    }
}

#[test]
fn a_host_learns_how_memory_is_used_and_resizes_it() {
    let (mut host, _link) = Host::new();
    let hello = host.welcome();
    assert!(hello.driver);
    assert_eq!(hello.nodes.len(), 2);
    let pages = 2000;
    host.say(&Message::Inflate(Resize {
        request: RequestId(1),
        node: NodeId(1),
        bytes: ByteCount(pages * PAGE_SIZE),
    }));
    let done = host.hear_until(|message| match message {
        Message::Done(done) => Some(done),
        _ => None,
    });
    assert_eq!(done.outcome, Outcome::Ok);
    let stats = host.hear_until(|message| match message {
        Message::Stats(stats) if stats.nodes[1].held.0 > 0 => Some(stats),
        _ => None,
    });
    assert_eq!(stats.nodes[1].held, ByteCount(pages * PAGE_SIZE));
    assert_eq!(stats.nodes[0].held, ByteCount(0));
}

#[test]
fn the_oom_allowance_is_of_the_slow_node() {
    let (mut host, _link) = Host::new();
    host.welcome();
    for node in 0..2 {
        host.say(&Message::Inflate(Resize {
            request: RequestId(node),
            node: NodeId(node as u32),
            bytes: ByteCount(100 * PAGE_SIZE),
        }));
        host.hear_until(|message| matches!(message, Message::Done(_)).then_some(()));
    }
    let oom = ByteCount(1 << 40);
    host.say(&Message::Allow { oom });
    host.say(&Message::Ping { nonce: 3 });
    host.hear_until(|message| (message == Message::Pong { nonce: 3 }).then_some(()));
    assert_eq!(host.balloon.lock().run_out_of_memory().len(), 100);
    let mut balloon = host.balloon.clone();
    assert_eq!(balloon.stats(NodeId(1)).unwrap().held, ByteCount(0));
}

#[test]
fn noise_in_the_pipe_is_passed_over() {
    let (mut host, _link) = Host::new();
    let hello = host.welcome();
    host.pipe.write_all(&[0, 7, 7, 7, 0, 255, 1]).unwrap();
    host.say(&Message::Ping { nonce: 9 });
    host.hear_until(|message| (message == Message::Pong { nonce: 9 }).then_some(()));
    // A guest's message to a host is ignored.
    host.say(&Message::Hello(hello));
    host.say(&Message::Ping { nonce: 10 });
    host.hear_until(|message| (message == Message::Pong { nonce: 10 }).then_some(()));
}

#[test]
fn a_host_that_asks_without_reading_is_let_wait() {
    let (mut host, link) = Host::new();
    host.welcome();
    let patience = Duration::from_millis(500);
    host.pipe.set_write_timeout(Some(patience)).unwrap();
    let mut pings = vec![];
    for nonce in 0..1000 {
        encode(&Message::Ping { nonce }, &mut pings).unwrap();
    }
    // Far more than buffers hold: the relay has to stop reading.
    let mut sent = 0;
    while sent < 64 << 20 {
        match host.pipe.write(&pings) {
            Ok(count) => sent += count,
            Err(_) => break,
        }
    }
    assert!(sent < 64 << 20, "{sent} bytes were taken in");
    drop(link);
}

#[test]
fn a_host_that_goes_away_leaves_the_rest_in_place() {
    let (mut host, link) = Host::new();
    host.welcome();
    host.say(&Message::Inflate(Resize {
        request: RequestId(1),
        node: NodeId(0),
        bytes: ByteCount(100 * PAGE_SIZE),
    }));
    host.hear_until(|message| matches!(message, Message::Done(_)).then_some(()));
    let Host {
        pipe, mut balloon, ..
    } = host;
    drop(pipe);
    // Stops at once, whatever the pipe contains.
    drop(link);
    let held = balloon.stats(NodeId(0)).unwrap().held;
    assert_eq!(held, ByteCount(100 * PAGE_SIZE));
}

#[test]
fn a_host_that_calls_again_is_greeted_again() {
    let root = readings::tests::root();
    let balloon = Shared::new(5000);
    let socket = root.path().join("vsock");
    let listener = UnixListener::bind(&socket).unwrap();
    listener.set_nonblocking(true).unwrap();
    let port = Port::listening(OwnedFd::from(listener));
    let _link = RunningRelay::over(port, root.path(), balloon.opener(), None).unwrap();
    let mut sessions = vec![];
    for nonce in 0..2 {
        let pipe = UnixStream::connect(&socket).unwrap();
        pipe.set_read_timeout(Some(Duration::from_secs(20)))
            .unwrap();
        let mut host = Host {
            pipe,
            decoder: Decoder::default(),
            balloon: balloon.clone(),
            _root: tempfile::tempdir().unwrap(),
        };
        sessions.push(host.welcome().session);
        host.say(&Message::Ping { nonce });
        host.hear_until(|message| (message == Message::Pong { nonce }).then_some(()));
    }
    assert_eq!(sessions[0], sessions[1], "it is one relay");
}

#[test]
fn a_host_of_the_version_before_is_greeted_and_told_in_it() {
    let (mut host, _link) = Host::new();
    // The host ignores greetings in a version that it does not know.
    let hello = host.hear_until(|message| match message {
        Message::Hello(hello) => Some(hello),
        _ => None,
    });
    assert_eq!(host.decoder.version(), Some(VERSION));
    host.hear_until(|message| matches!(message, Message::Hello(_)).then_some(()));
    assert_eq!(host.decoder.version(), Some(VERSION - 1));
    let session = hello.session;
    let mut welcome = vec![];
    encode_as(VERSION - 1, &Message::Welcome { session }, &mut welcome).unwrap();
    host.pipe.write_all(&welcome).unwrap();
    host.hear_until(|message| matches!(message, Message::Stats(_)).then_some(()));
    assert_eq!(host.decoder.version(), Some(VERSION - 1));
}

#[test]
fn a_vm_without_a_port_is_told_what_to_add() {
    let root = readings::tests::root();
    let error = RunningRelay::start(root.path(), None)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("virtserialport") && error.contains(PORT_NAME),
        "{error}"
    );
}
