//! Serves a router to clients that may be anybody.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::serve::Listener;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::sync::Semaphore;
use tokio::time::timeout;

/// What clients may take of a server.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Connections at once; others wait in the system's queue. Each takes a descriptor.
    pub connections: usize,
    /// How long a client may take for the head of a request.
    pub head: Duration,
    /// How long a connection may last.
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

/// The longest head of a request, bytes; also what a connection buffers at most.
const HEAD_BYTES_MAX: usize = 16 << 10;

/// Serves `app` until cancelled. A client that says nothing, or half of something, is cut off, and
/// keeps nobody else from being served for longer than the limits say. Needs a runtime with time.
pub async fn serve(mut listener: impl Listener, app: Router, limits: Limits) -> Infallible {
    let slots = Arc::new(Semaphore::new(limits.connections));
    loop {
        // The semaphore is never closed.
        let slot = slots.clone().acquire_owned().await;
        // Where descriptors have run out, this waits and tries again.
        let (stream, _) = listener.accept().await;
        let service = TowerToHyperService::new(app.clone());
        tokio::spawn(async move {
            let _slot = slot;
            let served = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(limits.head)
                .max_buf_size(HEAD_BYTES_MAX)
                .serve_connection(TokioIo::new(stream), service);
            match timeout(limits.connection, served).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => tracing::debug!("a client was cut off: {error}"),
                Err(_) => tracing::debug!("a client was cut off: it took too long"),
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use axum::routing::get;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream};

    use super::*;

    const SHORT: Limits = Limits {
        connections: 4,
        head: Duration::from_millis(100),
        connection: Duration::from_millis(400),
    };

    async fn answer(mut stream: TcpStream) -> String {
        let mut answer = String::new();
        let read = stream.read_to_string(&mut answer);
        // A client that is cut off may find its connection reset.
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
        // It may be cut off while it writes.
        let _ = long.write_all(head.as_bytes()).await;
        assert!(!answer(long).await.contains("200 OK"));
    }
}
