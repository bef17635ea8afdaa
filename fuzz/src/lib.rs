//! Code that fuzz targets share: arbitrary messages of a guest, and a runtime whose clock advances
//! when idle.

use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::path::PathBuf;

use arbitrary::Arbitrary;
use demeter_policy::{ByteCount, GuestPhysAddr, NodeId, PAGE_SIZE};
use demeter_proto::{
    BootId, Done, GpaRange, Hello, Message, NodeTotal, Outcome, Permille, Ranges, RequestId,
    SessionId, Stats, encode,
};
use tokio::runtime::{Builder, Runtime};

/// An arbitrary message of a guest.
#[derive(Debug, Clone, Arbitrary)]
pub enum Said {
    /// Boot, session, nodes.
    Hello(u8, u8, Vec<u8>),
    /// Pages that the driver gave back by itself.
    Stats(u16),
    Inflated(Named),
    Held(Named),
    /// Request, node, page.
    Proof(u8, u8, u16),
    /// Request, node, outcome.
    Done(u8, u8, u8),
    Ping(u64),
    Pong(u8),
    /// A message that only a host sends.
    Welcome(u8),
    /// Raw bytes, which may or may not be a frame.
    Raw(Vec<u8>),
}

/// Memory that a guest names.
#[derive(Debug, Clone, Arbitrary)]
pub struct Named {
    request: u8,
    node: u8,
    more: bool,
    /// First page, number of pages, and a distortion.
    ranges: Vec<(u16, u16, u8)>,
}

impl Said {
    /// The bytes in the pipe. Request ids are counted back from `last`, the latest one.
    pub fn bytes(self, last: u64) -> Vec<u8> {
        let message = match self.message(last) {
            Ok(message) => message,
            Err(raw) => return raw,
        };
        let mut bytes = vec![];
        encode(&message, &mut bytes).expect("within the protocol's bounds");
        bytes
    }

    /// The message, or raw bytes.
    pub fn message(self, last: u64) -> Result<Message, Vec<u8>> {
        // Mostly the latest request.
        let request = |back: u8| match back % 4 {
            3 => RequestId(last.wrapping_sub(u64::from(back / 4))),
            _ => RequestId(last),
        };
        let node = |node: u8| NodeId(u32::from(node) % 3);
        Ok(match self {
            Self::Hello(boot, session, nodes) => Message::Hello(Hello {
                boot_id: BootId([boot; 16]),
                session: SessionId(session.into()),
                driver: true,
                nodes: nodes
                    .into_iter()
                    .take(8)
                    .map(|n| NodeTotal {
                        node: node(n),
                        total: ByteCount(PAGE_SIZE << (n % 64)),
                    })
                    .collect(),
            }),
            Self::Stats(pages) => Message::Stats(Stats {
                psi_some: Permille::new(pages),
                psi_full: Permille::new(0),
                fast_hit: None,
                relocation: None,
                benefit: None,
                oom_returned: ByteCount(u64::from(pages) * PAGE_SIZE),
                nodes: vec![],
            }),
            Self::Inflated(named) => Message::Inflated(named.ranges(request, node)),
            Self::Held(named) => Message::Held(named.ranges(request, node)),
            Self::Proof(back, of, page) => Message::Proof {
                request: request(back),
                node: node(of),
                page: GuestPhysAddr(u64::from(page) * PAGE_SIZE),
            },
            Self::Done(back, of, outcome) => Message::Done(Done {
                request: request(back),
                node: node(of),
                moved: ByteCount(u64::from(outcome) * PAGE_SIZE),
                held: ByteCount(0),
                outcome: match outcome % 8 {
                    0 => Outcome::NoDriver,
                    1 => Outcome::Refused,
                    2 | 3 => Outcome::Partial,
                    _ => Outcome::Ok,
                },
                reason: "so".into(),
            }),
            Self::Ping(nonce) => Message::Ping { nonce },
            Self::Pong(back) => Message::Pong {
                nonce: request(back).0,
            },
            Self::Welcome(session) => Message::Welcome {
                session: SessionId(session.into()),
            },
            Self::Raw(bytes) => return Err(bytes),
        })
    }
}

impl Named {
    fn ranges(self, request: impl Fn(u8) -> RequestId, node: impl Fn(u8) -> NodeId) -> Ranges {
        let range = |(page, pages, bend): (u16, u16, u8)| {
            let (start, bytes) = (u64::from(page) * PAGE_SIZE, u64::from(pages) * PAGE_SIZE);
            let (start, bytes) = match bend {
                255 => (start + 1, bytes),
                254 => (start, bytes + 512),
                253 => (start, u64::MAX - bytes),
                252 => (u64::MAX - start, bytes),
                _ => (start, bytes),
            };
            GpaRange {
                start: GuestPhysAddr(start),
                bytes: ByteCount(bytes),
            }
        };
        Ranges {
            request: request(self.request),
            node: node(self.node),
            more: self.more,
            ranges: self.ranges.into_iter().take(4095).map(range).collect(),
        }
    }
}

thread_local! {
    static RUNTIME: Runtime = Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .max_blocking_threads(1)
        .build()
        .expect("a runtime");
}

/// Runs a case to its end. The clock is paused and advances only when all tasks are idle.
pub fn run(case: impl Future<Output = ()>) {
    RUNTIME.with(|runtime| runtime.block_on(case));
}

/// Shared memory in place of a kernel's or device's.
///
/// Also returns a path to open it again. The file has no name, so nothing stays behind.
pub fn shared_memory(name: &str, bytes: u64) -> (PathBuf, File) {
    let path = PathBuf::from(format!(
        "/dev/shm/demeter-fuzz-{name}-{}",
        std::process::id()
    ));
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .open(&path)
        .and_then(|file| file.set_len(bytes).map(|()| file));
    let file = file.expect("a file in /dev/shm");
    std::fs::remove_file(path).expect("it was made just now");
    let again = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
    (again, file)
}
