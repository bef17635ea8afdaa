//! Carries the protocol over the port.
//!
//! One thread. It wakes once a second while idle, and at once when the host sends something.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc::Sender;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use demeter_policy::NodeId;
use demeter_proto::{Decoder, Hello, Message, SessionId, VERSION, encode_as};

use super::port::{PORT_NAME, Port, Transfer};
use super::relay::{Opener, Relay, RoomMaker};
use super::{Balloon, LiveBalloon, readings, watermarks};
use crate::agent::Control;
use crate::nodes::{NodesError, Topology};
use crate::status::StatusCell;

/// Time between two reports, and between two checks whether the host has gone.
const TICK: Duration = Duration::from_secs(1);

/// Timer slack: the thread may wake this late, together with others.
const TIMER_SLACK_NS: libc::c_ulong = 50_000_000;

/// Nothing more is done while this much is unsent, so that a host that does not read cannot make the agent's memory
/// grow.
const UNSENT_BYTES_MAX: usize = 256 * 1024;

/// An error that keeps the relay from starting.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// The VM has no port.
    #[error(
        "no virtio-serial port named {PORT_NAME}, and no vsock: add one to the VM (QEMU: -device \
         virtio-serial-pci -device virtserialport,chardev=..,name={PORT_NAME}; Cloud Hypervisor: \
         --vsock cid=3,socket=..), and load virtio_console or vmw_vsock_virtio_transport in the guest"
    )]
    NoPort,
    /// The port cannot be opened.
    #[error("cannot open the port {PORT_NAME}: {0}; run as root, and one agent at a time")]
    Port(io::Error),
    /// A kernel file cannot be read.
    #[error("cannot read {what}: {source}")]
    Kernel {
        /// The file or value that was read.
        what: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// The NUMA nodes cannot be read.
    #[error(transparent)]
    Nodes(#[from] NodesError),
}

/// The relay's connection to an agent in the same process.
#[derive(Debug)]
pub struct BesideAgent {
    /// The agent's status.
    pub status: StatusCell,
    /// Where to send requests for room.
    pub controls: Sender<Control>,
}

impl BesideAgent {
    fn room_maker(&self) -> RoomMaker {
        let tiers = self.status.get().tiers;
        let fast = tiers.first().and_then(|tier| tier.nodes.first());
        RoomMaker {
            agent: self.controls.clone(),
            fast: NodeId(fast.copied().unwrap_or(0)),
        }
    }
}

/// A running relay. Dropping it stops the thread; the driver keeps its memory.
#[derive(Debug)]
pub struct RunningRelay {
    /// Dropping it stops the thread.
    stop: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
}

impl RunningRelay {
    /// Starts a relay between port and driver below `root`, in a thread of its own.
    pub fn start(root: &Path, agent: Option<BesideAgent>) -> Result<Self, LinkError> {
        let port = Port::open(root, PORT_NAME).map_err(LinkError::Port)?;
        let port = port.ok_or(LinkError::NoPort)?;
        let driver_root = root.to_owned();
        let open: Opener = Box::new(move || {
            let balloon = LiveBalloon::open(&driver_root)?;
            Ok(Box::new(balloon) as Box<dyn Balloon>)
        });
        Self::over(port, root, open, agent)
    }

    /// Starts a relay over an open port and any driver.
    pub fn over(
        port: Port,
        root: &Path,
        mut open: Opener,
        agent: Option<BesideAgent>,
    ) -> Result<Self, LinkError> {
        let topology = Topology::read(root)?;
        let mut balloon = open().ok();
        let kernel = |what| move |source| LinkError::Kernel { what, source };
        let hello = Hello {
            boot_id: readings::boot_id(root).map_err(kernel("the boot's id"))?,
            session: session().map_err(kernel("random numbers"))?,
            driver: false,
            nodes: readings::totals(&topology, balloon.as_deref_mut()),
        };
        let oom_node = oom_node(&topology);
        let room = agent.as_ref().map(BesideAgent::room_maker);
        let worker = Worker {
            root: root.to_owned(),
            port: Some(port),
            status: agent.map(|a| a.status),
            relay: Relay::new(hello.clone(), open, room, oom_node),
            hello,
            decoder: Decoder::default(),
            unsent: vec![],
            connected: false,
            version: VERSION,
        };
        let (stop, stopped) = UnixStream::pair().map_err(kernel("a socket"))?;
        let thread = std::thread::Builder::new().name("relay".into());
        let thread = thread.spawn(move || worker.run(stopped.into()));
        Ok(Self {
            stop: Some(stop),
            thread: Some(thread.map_err(kernel("a thread"))?),
        })
    }
}

impl Drop for RunningRelay {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The node that deflates when memory runs out: the slow node, or the last one.
fn oom_node(topology: &Topology) -> NodeId {
    let last = topology.with_memory().last().map_or(NodeId(0), |n| n.id);
    topology.order().map_or(last, |order| order.pair.slow)
}

fn session() -> io::Result<SessionId> {
    let mut bytes = [0; 8];
    // SAFETY: the buffer is ours, and the length is the buffer's.
    let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    if got != bytes.len() as isize {
        return Err(io::Error::last_os_error());
    }
    Ok(SessionId(u64::from_ne_bytes(bytes)))
}

/// Whether a message reports memory that changed hands.
fn has_moved(message: &Message) -> bool {
    matches!(message, Message::Done(done) if done.moved.0 > 0)
}

struct Worker {
    root: PathBuf,
    /// `None` after the port failed, until it can be opened again.
    port: Option<Port>,
    status: Option<StatusCell>,
    relay: Relay,
    hello: Hello,
    decoder: Decoder,
    unsent: Vec<u8>,
    connected: bool,
    /// Version of our messages: the host's once it welcomed us, before that the newest and the one before in turn.
    version: u16,
}

/// Events that ended a wait.
struct Ready {
    stop: bool,
    readable: bool,
    hung_up: bool,
    event: bool,
}

impl Worker {
    fn run(mut self, stop: OwnedFd) {
        // SAFETY: takes a number only; affects this thread alone.
        unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, TIMER_SLACK_NS) };
        let mut tick = Instant::now();
        let mut out = vec![];
        loop {
            let now = Instant::now();
            let busy = self.relay.wake_at(now).filter(|_| self.has_room());
            let wait = busy.map_or(tick, |wake| wake.min(tick));
            let ready = match self.wait(stop.as_fd(), wait.saturating_duration_since(now)) {
                Ok(ready) => ready,
                Err(error) => {
                    tracing::error!("the link to the host ends: {error}");
                    return;
                }
            };
            if ready.stop {
                return;
            }
            let now = Instant::now();
            let is_due = now >= tick;
            if is_due {
                tick = now + TICK;
            }
            let is_news = ready.event && self.took_event();
            let was_connected = self.connected;
            self.follow(&ready, &mut out);
            // A host that has just connected was greeted already.
            if was_connected && (is_due || is_news) {
                self.report(&mut out);
            }
            if self.connected && self.has_room() {
                self.relay.step(now, &mut out);
            }
            if out.iter().any(has_moved)
                && let Err(error) = watermarks::deal_out(&self.root)
            {
                tracing::debug!("the kernel's watermarks stay as they are: {error}");
            }
            self.send(&mut out);
        }
    }

    fn has_room(&self) -> bool {
        self.unsent.len() < UNSENT_BYTES_MAX
    }

    /// Waits for the host, the driver or the stop signal.
    ///
    /// A closed port is not polled: it would always be ready and yield nothing.
    fn wait(&self, stop: BorrowedFd<'_>, timeout: Duration) -> io::Result<Ready> {
        let port = self.port.as_ref().map(|p| p.as_fd().as_raw_fd());
        let event = self.relay.event_fd();
        let mut wanted = 0;
        if self.has_room() {
            wanted |= libc::POLLIN;
        }
        if !self.unsent.is_empty() {
            wanted |= libc::POLLOUT;
        }
        let poll_fd = |fd: Option<RawFd>, events| libc::pollfd {
            // poll(2) ignores a negative descriptor.
            fd: fd.unwrap_or(-1),
            events,
            revents: 0,
        };
        let waited_for = port.filter(|_| self.connected);
        let mut fds = [
            poll_fd(Some(stop.as_raw_fd()), libc::POLLIN),
            poll_fd(waited_for, wanted),
            poll_fd(event, libc::POLLIN),
        ];
        // Rounded up: a wait that is slightly short would be followed by a turn without work.
        let timeout_ms = timeout.as_nanos().div_ceil(1_000_000);
        poll(&mut fds, i32::try_from(timeout_ms).unwrap_or(i32::MAX))?;
        if !self.connected {
            fds[1] = poll_fd(port, libc::POLLIN);
            poll(&mut fds[1..2], 0)?;
        }
        Ok(Ready {
            stop: fds[0].revents != 0,
            readable: fds[1].revents & libc::POLLIN != 0,
            hung_up: fds[1].revents & (libc::POLLHUP | libc::POLLERR | libc::POLLNVAL) != 0,
            event: fds[2].revents != 0,
        })
    }

    /// Tracks the port's state and handles messages of the host.
    fn follow(&mut self, ready: &Ready, out: &mut Vec<Message>) {
        if self.port.is_none() {
            self.reopen();
            return;
        }
        if ready.hung_up {
            self.disconnect();
            return;
        }
        if !self.connected {
            match self.port.as_mut().map(Port::is_connected) {
                Some(Ok(true)) => {}
                Some(Ok(false)) | None => return,
                Some(Err(error)) => return self.lose(&error),
            }
            self.connected = true;
            self.version = VERSION;
            self.relay.connected(out);
        }
        if ready.readable {
            self.read(out);
        }
    }

    fn reopen(&mut self) {
        match Port::open(&self.root, PORT_NAME) {
            Ok(port) => self.port = port,
            Err(error) => tracing::debug!("the port {PORT_NAME}: {error}"),
        }
    }

    fn disconnect(&mut self) {
        if self.connected {
            tracing::info!("the host closed the link");
            self.connected = false;
            if let Some(port) = &mut self.port {
                port.hang_up();
            }
            self.unsent.clear();
            self.relay.disconnected();
        }
    }

    fn read(&mut self, out: &mut Vec<Message>) {
        let mut buffer = [0; 4096];
        let port = self.port.as_mut().map(|port| port.read(&mut buffer));
        match port {
            Some(Ok(Transfer::Bytes(count))) => {
                self.decoder.push(&buffer[..count]);
                loop {
                    match self.decoder.next() {
                        Ok(Some(message)) => {
                            self.relay.receive(message, out);
                            if self.relay.is_welcomed() {
                                self.version = self.decoder.version().unwrap_or(VERSION);
                            }
                        }
                        Ok(None) => break,
                        Err(error) => tracing::debug!("from the host: {error}"),
                    }
                }
            }
            Some(Ok(Transfer::HungUp)) => self.disconnect(),
            Some(Ok(Transfer::Later)) | None => {}
            Some(Err(error)) => self.lose(&error),
        }
    }

    /// Closes a failed port: it may have been unplugged, and may come back.
    fn lose(&mut self, error: &io::Error) {
        tracing::warn!("the port {PORT_NAME}: {error}");
        self.disconnect();
        self.port = None;
    }

    fn took_event(&mut self) -> bool {
        let event = self.relay.opened().map(|balloon| balloon.take_event());
        match event {
            Some(Ok(taken)) => taken,
            Some(Err(error)) => {
                tracing::warn!("{error}");
                self.relay.close();
                false
            }
            None => false,
        }
    }

    /// Greets a host that has not answered yet, or sends it the memory statistics.
    fn report(&mut self, out: &mut Vec<Message>) {
        if !self.connected || !self.has_room() {
            return;
        }
        if !self.relay.is_welcomed() {
            self.version = match self.version {
                VERSION => VERSION - 1,
                _ => VERSION,
            };
            self.relay.greet(out);
            return;
        }
        let status = self.status.as_ref().map(StatusCell::get);
        let balloon = self.relay.opened();
        match readings::stats(&self.root, &self.hello.nodes, balloon, status.as_ref()) {
            Ok(stats) => out.push(Message::Stats(stats)),
            Err(error) => tracing::warn!("{error}"),
        }
    }

    fn send(&mut self, out: &mut Vec<Message>) {
        for message in out.drain(..).filter(|_| self.connected) {
            if let Err(error) = encode_as(self.version, &message, &mut self.unsent) {
                tracing::error!("{error}");
            }
        }
        while !self.unsent.is_empty() {
            let Some(port) = &mut self.port else { return };
            match port.write(&self.unsent) {
                Ok(Transfer::Bytes(count)) => {
                    self.unsent.drain(..count);
                }
                Ok(Transfer::Later) => return,
                Ok(Transfer::HungUp) => return self.disconnect(),
                Err(error) => return self.lose(&error),
            }
        }
    }
}

/// poll(2), retried after a signal.
fn poll(fds: &mut [libc::pollfd], timeout_ms: i32) -> io::Result<()> {
    loop {
        // SAFETY: the array is ours, and the length is the array's.
        let ready = unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, timeout_ms) };
        let error = io::Error::last_os_error();
        match ready {
            0.. => return Ok(()),
            _ if error.kind() == io::ErrorKind::Interrupted => {}
            _ => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests;
