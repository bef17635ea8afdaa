//! Serves a router within limits, to untrusted clients.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::serve::Listener;
use axum::{BoxError, Router};
use hyper::body::{Body, Bytes, Frame, Incoming, SizeHint};
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::sync::Semaphore;
use tokio::task::AbortHandle;
use tokio::time::{Sleep, sleep, timeout};

/// The client of a request, for logs; an extension of each request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer(pub String);

/// A listener that names its clients.
pub trait NamesPeer: Listener {
    /// The client of a connection.
    fn peer(stream: &Self::Io, address: &Self::Addr) -> Peer;
}

impl NamesPeer for UnixListener {
    fn peer(stream: &UnixStream, _: &Self::Addr) -> Peer {
        Peer(match stream.peer_cred() {
            Ok(of) => match of.pid() {
                Some(pid) => format!("uid {}, pid {pid}", of.uid()),
                None => format!("uid {}", of.uid()),
            },
            Err(error) => format!("an unknown user ({error})"),
        })
    }
}

impl NamesPeer for TcpListener {
    fn peer(_: &TcpStream, address: &Self::Addr) -> Peer {
        Peer(address.to_string())
    }
}

/// Resource limits of a server.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Maximum number of open connections, each with a descriptor. Others wait in the system's
    /// queue.
    pub connections: usize,
    /// Time limit for the head of a request, and for its body.
    pub head: Duration,
    /// Time limit of a connection.
    pub connection: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 64,
            head: Duration::from_secs(5),
            connection: Duration::from_secs(60),
        }
    }
}

/// Maximum length of a request's head, and of a connection's buffer.
const HEAD_BYTES_MAX: usize = 16 << 10;

/// The body of a request, with a time limit. A connection that waits for it waits for its client.
struct InTime {
    body: Incoming,
    is_idle: Arc<AtomicBool>,
    late: Pin<Box<Sleep>>,
}

impl Body for InTime {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let polled = Pin::new(&mut self.body).poll_frame(cx);
        self.is_idle.store(polled.is_pending(), Ordering::Relaxed);
        if polled.is_pending() && self.late.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Some(Err("the body did not come in time".into())));
        }
        polled.map_err(Into::into)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Open connections by age, each with whether it waits for its client.
#[derive(Default)]
struct Open {
    connections: VecDeque<(AbortHandle, Arc<AtomicBool>)>,
}

impl Open {
    /// Closes the connection that has waited longest for its client, if any.
    fn cut_off_idle(&mut self) {
        self.connections.retain(|(task, _)| !task.is_finished());
        let waits = |(_, idle): &(AbortHandle, Arc<AtomicBool>)| idle.load(Ordering::Relaxed);
        let longest = self.connections.iter().position(waits);
        if let Some((task, _)) = longest.and_then(|index| self.connections.remove(index)) {
            tracing::debug!("disconnected an idle client, because others wait");
            task.abort();
        }
    }
}

/// Serves `app` until cancelled, on a runtime with time.
///
/// A client that sends nothing or half a head is disconnected in time; to half a body, reading it
/// fails. If all connections are
/// taken and another client arrives, the connection that has waited longest for its client is
/// closed at once. So idle clients delay no other.
pub async fn serve<L: NamesPeer>(mut listener: L, app: Router, limits: Limits) -> Infallible {
    let slots = Arc::new(Semaphore::new(limits.connections));
    let mut open = Open::default();
    loop {
        // Without free descriptors, this waits and retries.
        let (stream, address) = listener.accept().await;
        let peer = L::peer(&stream, &address);
        if slots.available_permits() == 0 {
            open.cut_off_idle();
        }
        // The semaphore is never closed.
        let slot = slots.clone().acquire_owned().await;
        let service = TowerToHyperService::new(app.clone());
        let idle = Arc::new(AtomicBool::new(true));
        let is_idle = idle.clone();
        let service = service_fn(move |mut request: hyper::Request<Incoming>| {
            request.extensions_mut().insert(peer.clone());
            idle.store(false, Ordering::Relaxed);
            let request = request.map(|body| InTime {
                body,
                is_idle: idle.clone(),
                late: Box::pin(sleep(limits.head)),
            });
            let (answering, idle) = (service.call(request), idle.clone());
            async move {
                let answer = answering.await;
                idle.store(true, Ordering::Relaxed);
                answer
            }
        });
        let task = tokio::spawn(async move {
            let _slot = slot;
            let served = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(limits.head)
                .max_buf_size(HEAD_BYTES_MAX)
                .serve_connection(TokioIo::new(stream), service);
            match timeout(limits.connection, served).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => tracing::debug!("disconnected a client: {error}"),
                Err(_) => tracing::debug!("disconnected a client: it took too long"),
            }
        });
        open.connections.retain(|(task, _)| !task.is_finished());
        open.connections.push_back((task.abort_handle(), is_idle));
    }
}

#[cfg(test)]
mod tests {
    use axum::routing::{get, put};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    const SHORT: Limits = Limits {
        connections: 4,
        head: Duration::from_millis(100),
        connection: Duration::from_millis(400),
    };

    async fn answer(mut stream: TcpStream) -> String {
        let mut answer = String::new();
        let read = stream.read_to_string(&mut answer);
        // The server may reset the connection.
        let _ = timeout(Duration::from_secs(10), read)
            .await
            .expect("in time");
        answer
    }

    #[tokio::test]
    async fn clients_that_stall_keep_nobody_from_being_served() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let slow = || std::future::pending::<&str>();
        let app = Router::new()
            .route("/", get(|| async { "served" }))
            .route("/slow", get(slow));
        tokio::spawn(serve(listener, app, SHORT));
        let mut stalled = vec![];
        for said in [
            "",
            "G",
            "GET / HTTP/1.1\r\nHost:",
            "GET /slow HTTP/1.1\r\n\r\n",
        ]
        .repeat(4)
        {
            let mut stream = TcpStream::connect(address).await.unwrap();
            stream.write_all(said.as_bytes()).await.unwrap();
            stalled.push(stream);
        }
        let mut honest = TcpStream::connect(address).await.unwrap();
        let question = b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n";
        honest.write_all(question).await.unwrap();
        assert!(answer(honest).await.ends_with("served"));
        for stream in stalled {
            assert!(!answer(stream).await.contains("200 OK"));
        }
        let mut long = TcpStream::connect(address).await.unwrap();
        let head = format!("GET / HTTP/1.1\r\nX: {}", "x".repeat(2 * HEAD_BYTES_MAX));
        // The connection may be closed during the write.
        let _ = long.write_all(head.as_bytes()).await;
        assert!(!answer(long).await.contains("200 OK"));
    }

    #[tokio::test]
    async fn a_request_knows_its_client() {
        use axum::Extension;
        let whoami = |Extension(Peer(name)): Extension<Peer>| async move { name };
        let app = Router::new().route("/", get(whoami));
        let tcp = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut client = TcpStream::connect(tcp.local_addr().unwrap()).await.unwrap();
        let address = client.local_addr().unwrap().to_string();
        tokio::spawn(serve(tcp, app.clone(), SHORT));
        let question = b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n";
        client.write_all(question).await.unwrap();
        assert!(answer(client).await.ends_with(&address));

        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sock");
        let unix = UnixListener::bind(&path).unwrap();
        tokio::spawn(serve(unix, app, SHORT));
        let mut client = UnixStream::connect(&path).await.unwrap();
        client.write_all(question).await.unwrap();
        let mut said = String::new();
        client.read_to_string(&mut said).await.unwrap();
        assert!(
            said.ends_with(&format!(", pid {}", std::process::id())),
            "{said}"
        );
    }

    #[tokio::test]
    async fn half_requests_make_nobody_wait() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let app = Router::new()
            .route("/", get(|| async { "served" }))
            .route("/", put(async |body: String| body));
        // Longer than this test may take.
        let limits = Limits {
            connections: 4,
            head: Duration::from_secs(60),
            connection: Duration::from_secs(60),
        };
        tokio::spawn(serve(listener, app, limits));
        let mut stalled = vec![];
        let halves = [
            "GET / HTTP/1.1\r\nHost:",
            "PUT / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nhalf",
        ];
        for half in halves.iter().cycle().take(6) {
            for _ in 0..16 {
                let mut stream = TcpStream::connect(address).await.unwrap();
                // The connection may be closed already.
                let _ = stream.write_all(half.as_bytes()).await;
                stalled.push(stream);
            }
            let mut honest = TcpStream::connect(address).await.unwrap();
            let question = b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n";
            honest.write_all(question).await.unwrap();
            assert!(answer(honest).await.ends_with("served"));
        }
    }

    #[tokio::test]
    async fn half_a_body_is_answered_in_time() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let app = Router::new().route("/", put(async |body: String| body));
        tokio::spawn(serve(listener, app, SHORT));
        let put = |body: &str| {
            let head = "PUT / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 5";
            format!("{head}\r\n\r\n{body}")
        };
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(put("whole").as_bytes()).await.unwrap();
        assert!(answer(stream).await.ends_with("whole"));
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(put("half").as_bytes()).await.unwrap();
        let said = answer(stream).await;
        let is_refused = said.starts_with("HTTP/1.1 400");
        assert!(
            is_refused && said.contains("did not come in time"),
            "{said}"
        );
    }
}
