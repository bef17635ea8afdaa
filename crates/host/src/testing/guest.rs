//! A test double of a guest's agent, with a driver that holds whole blocks.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use demeter_policy::benefit::Benefit;
use demeter_policy::{BLOCK_SIZE, ByteCount, GuestPhysAddr, NodeId, TierBytes};
use demeter_proto::{
    Done, GpaRange, Message, NodeStats, Nonce, Outcome, Permille, Ranges, RequestId, Resize, Stats,
    VERSION,
};
use tokio::net::UnixListener;
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::{Duration, sleep};

use super::FakeVm;
use crate::agent::tests::{Pipe, hello};

/// Blocks of a node by address, and whether the driver holds them.
type Node = BTreeMap<u64, bool>;

/// Interval between reports of an agent.
const REPORT_EVERY: Duration = Duration::from_secs(1);

#[derive(Debug, Default)]
struct State {
    nodes: BTreeMap<NodeId, Node>,
    /// Blocks that the guest does not give up.
    in_use: BTreeMap<NodeId, usize>,
    silent: bool,
    benefit: Option<Benefit>,
    boot: u8,
    session: u64,
}

/// The guest; its agent answers until this is dropped.
pub(crate) struct FakeGuest {
    state: Arc<Mutex<State>>,
    rebooted: Arc<Notify>,
    agent: JoinHandle<()>,
}

impl FakeGuest {
    /// A guest of this VM whose nodes have these ranges. It serves the host's end of its port, like
    /// QEMU.
    pub fn new(vm: &FakeVm, ranges: &[(NodeId, GpaRange)]) -> Self {
        Self::proving(vm, vm, ranges)
    }

    /// A guest that held memory before this host knew it, as after a live migration.
    pub fn holding(vm: &FakeVm, ranges: &[(NodeId, GpaRange)], held: TierBytes) -> Self {
        let guest = Self::new(vm, ranges);
        // The agent answers on this thread, so nobody has asked yet.
        let mut state = guest.state.lock().unwrap();
        for (node, bytes) in [(NodeId(0), held.fast), (NodeId(1), held.slow)] {
            state.turn(node, (bytes.0 / BLOCK_SIZE) as usize, true);
        }
        drop(state);
        guest
    }

    /// A guest that is connected to the port of `port` but runs in `vm`.
    pub fn proving(port: &FakeVm, vm: &FakeVm, ranges: &[(NodeId, GpaRange)]) -> Self {
        Self::speaking(VERSION, port, vm, ranges)
    }

    /// Like `proving`, with an agent of another protocol version.
    pub fn speaking(
        version: u16,
        port: &FakeVm,
        vm: &FakeVm,
        ranges: &[(NodeId, GpaRange)],
    ) -> Self {
        let mut state = State::default();
        for (node, range) in ranges {
            let blocks =
                (range.start.0..range.start.0 + range.bytes.0).step_by(BLOCK_SIZE as usize);
            let node = state.nodes.entry(*node).or_default();
            node.extend(blocks.map(|block| (block, false)));
        }
        let state = Arc::new(Mutex::new(state));
        let rebooted = Arc::new(Notify::new());
        let agent = start(version, port, vm, state.clone(), rebooted.clone());
        Self {
            state,
            rebooted,
            agent,
        }
    }

    /// Ends the agent and starts one of another version. The driver keeps what it holds.
    pub fn restart_agent(&mut self, vm: &FakeVm, version: u16) {
        self.agent.abort();
        std::fs::remove_file(vm.folder().join("agent")).unwrap();
        self.agent = start(version, vm, vm, self.state.clone(), self.rebooted.clone());
    }

    /// Reboots, and holds nothing afterwards.
    pub fn reboot(&self) {
        self.forget();
        self.state.lock().unwrap().boot += 1;
        self.rebooted.notify_one();
    }

    /// Drops all held memory without a report.
    pub fn forget(&self) {
        let mut state = self.state.lock().unwrap();
        for blocks in state.nodes.values_mut() {
            blocks.values_mut().for_each(|held| *held = false);
        }
    }

    /// Number of blocks that it holds.
    pub fn held_blocks(&self) -> usize {
        let state = self.state.lock().unwrap();
        state.nodes.keys().map(|node| state.held(*node).len()).sum()
    }

    /// Makes the guest keep this much of a node, whatever the host asks.
    pub fn use_memory(&self, node: NodeId, bytes: ByteCount) {
        let blocks = (bytes.0 / BLOCK_SIZE) as usize;
        self.state.lock().unwrap().in_use.insert(node, blocks);
    }

    /// Reports this benefit of fast memory from now on.
    pub fn report_benefit(&self, benefit: Benefit) {
        self.state.lock().unwrap().benefit = Some(benefit);
    }

    /// Stops all messages.
    pub fn fall_silent(&self) {
        self.state.lock().unwrap().silent = true;
    }
}

impl Drop for FakeGuest {
    fn drop(&mut self) {
        self.agent.abort();
    }
}

/// Starts the agent of a guest that runs in `vm` at the port of `port`.
fn start(
    version: u16,
    port: &FakeVm,
    vm: &FakeVm,
    state: Arc<Mutex<State>>,
    rebooted: Arc<Notify>,
) -> JoinHandle<()> {
    let listener = UnixListener::bind(port.folder().join("agent")).unwrap();
    let memory = vm.state.clone();
    let prover = move |node, nonce| memory.lock().unwrap().show(node, nonce);
    tokio::spawn(serve(version, listener, state, rebooted, prover))
}

async fn serve(
    version: u16,
    listener: UnixListener,
    state: Arc<Mutex<State>>,
    rebooted: Arc<Notify>,
    prover: impl Fn(NodeId, Nonce) -> Option<GuestPhysAddr> + Clone + Send + 'static,
) {
    loop {
        let mut pipe = Pipe::accept(&listener).await;
        pipe.version = version;
        pipe.prove_by(Box::new(prover.clone()));
        let mut said = state.lock().unwrap().introduction();
        loop {
            for message in said {
                pipe.say(&message).await;
            }
            said = tokio::select! {
                // Keep the session alive.
                () = sleep(REPORT_EVERY) => {
                    let state = state.lock().unwrap();
                    if state.silent { vec![] } else { vec![stats(&state)] }
                }
                () = rebooted.notified() => state.lock().unwrap().introduction(),
                heard = pipe.hear() => {
                    let Some(message) = heard else { break };
                    let mut state = state.lock().unwrap();
                    if state.silent { vec![] } else { state.answer(message) }
                }
            };
        }
    }
}

fn stats(state: &State) -> Message {
    let node = |(node, blocks): (&NodeId, &Node)| NodeStats {
        node: *node,
        total: ByteCount(blocks.len() as u64 * BLOCK_SIZE),
        free: ByteCount(0),
        held: ByteCount(0),
        working_set: ByteCount(BLOCK_SIZE),
    };
    Message::Stats(Stats {
        psi_some: Permille::new(0),
        psi_full: Permille::new(0),
        fast_hit: Some(Permille::new(900)),
        relocation: None,
        benefit: state.benefit.clone(),
        oom_returned: ByteCount(0),
        nodes: state.nodes.iter().map(node).collect(),
    })
}

impl State {
    /// The first messages of a starting agent.
    fn introduction(&mut self) -> Vec<Message> {
        self.session += 1;
        let hello = hello(self.boot, self.session);
        vec![Message::Hello(hello), stats(self)]
    }

    fn answer(&mut self, message: Message) -> Vec<Message> {
        match message {
            Message::Ping { nonce } => vec![Message::Pong { nonce }],
            Message::List { request, node, .. } => {
                let held = self.held(node);
                let part = Message::Held(ranges(request, node, &held));
                vec![part, self.done(request, node, 0, true)]
            }
            Message::Inflate(Resize {
                request,
                node,
                bytes,
            }) => {
                let wanted = (bytes.0 / BLOCK_SIZE) as usize;
                let free = self.nodes[&node].len() - self.held(node).len();
                let give =
                    wanted.min(free.saturating_sub(self.in_use.get(&node).copied().unwrap_or(0)));
                let taken = self.turn(node, give, true);
                let part = Message::Inflated(ranges(request, node, &taken));
                vec![part, self.done(request, node, taken.len(), give == wanted)]
            }
            Message::Deflate(Resize {
                request,
                node,
                bytes,
            }) => {
                let wanted = (bytes.0 / BLOCK_SIZE) as usize;
                let given = self.turn(node, wanted, false);
                vec![self.done(request, node, given.len(), given.len() == wanted)]
            }
            _ => vec![],
        }
    }

    fn held(&self, node: NodeId) -> Vec<u64> {
        let blocks = self.nodes[&node].iter();
        blocks
            .filter(|(_, held)| **held)
            .map(|(block, _)| *block)
            .collect()
    }

    /// Makes `count` blocks held or free, and returns them.
    fn turn(&mut self, node: NodeId, count: usize, held: bool) -> Vec<u64> {
        let blocks = self.nodes.entry(node).or_default().iter_mut();
        let others = blocks.filter(|(_, now)| **now != held).take(count);
        others
            .map(|(block, now)| {
                *now = held;
                *block
            })
            .collect()
    }

    fn done(&self, request: RequestId, node: NodeId, moved: usize, all: bool) -> Message {
        Message::Done(Done {
            request,
            node,
            moved: ByteCount(moved as u64 * BLOCK_SIZE),
            held: ByteCount(self.held(node).len() as u64 * BLOCK_SIZE),
            outcome: if all { Outcome::Ok } else { Outcome::Partial },
            reason: if all { "" } else { "the rest is in use" }.into(),
        })
    }
}

fn ranges(request: RequestId, node: NodeId, blocks: &[u64]) -> Ranges {
    let range = |&block| GpaRange {
        start: GuestPhysAddr(block),
        bytes: ByteCount(BLOCK_SIZE),
    };
    Ranges {
        request,
        node,
        more: false,
        ranges: blocks.iter().map(range).collect(),
    }
}
