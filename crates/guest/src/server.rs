//! HTTP server for status, metrics, pause and resume, on a Unix socket and optionally TCP.
//!
//! - `GET /v1/status`: the [`Status`](crate::status::Status) as JSON.
//! - `GET /metrics`: the same for Prometheus.
//! - `GET /v1/heat`: heat of address ranges ([`Heat`](crate::heat::Heat)) as JSON. Not over TCP, because a process's
//!   addresses are private.
//! - `POST /v1/pause`, `POST /v1/resume`; not over TCP.

use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::mpsc::Sender;
use std::thread::JoinHandle;
use std::time::Duration;

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use demeter_http::{BindError, Limits, SocketFile};
use tokio::sync::oneshot;
use tokio::time::timeout;

use crate::agent::Control;
use crate::status::StatusCell;

/// Time limit for the agent's heat report, which it makes between two moves.
const LOOK_MAX: Duration = Duration::from_secs(3);

/// An error that keeps the server from starting.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The Unix socket cannot be created.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// The server cannot listen.
    #[error("cannot listen on {place}: {source}; give another --socket or --listen")]
    Listen {
        /// Path or address.
        place: String,
        /// The system's error.
        source: io::Error,
    },
}

/// A running server. Dropping it stops the server and removes its socket.
#[derive(Debug)]
pub struct Server {
    _file: SocketFile,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Clone)]
struct App {
    status: StatusCell,
    controls: Sender<Control>,
}

impl Server {
    /// Serves `socket` (created for its owner only) and `listen` in a thread.
    pub fn start(
        socket: &Path,
        listen: Option<SocketAddr>,
        status: StatusCell,
        controls: Sender<Control>,
    ) -> Result<Self, ServerError> {
        let error = |place: String| move |source| ServerError::Listen { place, source };
        let (unix, file) = demeter_http::bind(socket)?;
        let (stop, stopped) = oneshot::channel();
        let tcp = listen
            .map(|addr| std::net::TcpListener::bind(addr).map_err(error(addr.to_string())))
            .transpose()?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            // Timers are needed: a listener without free descriptors waits.
            .enable_all()
            .build()
            .map_err(error(socket.display().to_string()))?;
        let app = App { status, controls };
        let to_look_at = Router::new()
            .route(
                "/v1/status",
                get(|State(app): State<App>| async move { Json(app.status.get()) }),
            )
            .route("/metrics", get(metrics));
        // TCP is not authenticated, so it gets no requests that change anything.
        let over_tcp = to_look_at.clone().with_state(app.clone());
        let app = to_look_at
            .route("/v1/heat", get(heat))
            .route("/v1/pause", post(|state| control(state, Control::Pause)))
            .route("/v1/resume", post(|state| control(state, Control::Resume)))
            .with_state(app);
        let thread = std::thread::Builder::new().name("server".into());
        let thread = thread.spawn(move || {
            runtime.block_on(async move {
                if let Some(tcp) = tcp {
                    let listener = tcp
                        .set_nonblocking(true)
                        .and_then(|()| tokio::net::TcpListener::from_std(tcp));
                    match listener {
                        Ok(listener) => {
                            tokio::spawn(demeter_http::serve(
                                listener,
                                over_tcp,
                                Limits::default(),
                            ));
                        }
                        Err(error) => tracing::error!("TCP is not served: {error}"),
                    }
                }
                match tokio::net::UnixListener::from_std(unix) {
                    Ok(listener) => {
                        let serve = demeter_http::serve(listener, app, Limits::default());
                        tokio::select! { _ = serve => (), _ = stopped => () }
                    }
                    Err(error) => tracing::error!("the socket is not served: {error}"),
                }
            });
        });
        let thread = thread.map_err(error(format!("{}: a thread", socket.display())))?;
        Ok(Self {
            _file: file,
            stop: Some(stop),
            thread: Some(thread),
        })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(stop) = self.stop.take() {
            // The thread may have ended by itself.
            let _ = stop.send(());
        }
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

async fn metrics(State(app): State<App>) -> impl IntoResponse {
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, kind)], app.status.prometheus())
}

async fn heat(State(app): State<App>) -> Response {
    let mut told = app.status.heat.listen();
    let asked = app.controls.send(Control::Look);
    let is_told = timeout(LOOK_MAX, told.changed()).await;
    match (asked, is_told) {
        (Ok(()), Ok(Ok(()))) => Json(told.borrow().clone()).into_response(),
        _ => {
            let why = "no agent looks after anything now\n";
            (StatusCode::SERVICE_UNAVAILABLE, why).into_response()
        }
    }
}

async fn control(State(app): State<App>, control: Control) -> StatusCode {
    match app.controls.send(control) {
        Ok(()) => StatusCode::ACCEPTED,
        Err(_) => StatusCode::SERVICE_UNAVAILABLE,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use demeter_http::AskError;

    use super::*;
    use crate::heat::Heat;

    fn ask(socket: &Path, question: &str) -> Result<String, AskError> {
        demeter_http::ask(socket, question, "", Duration::from_secs(5))
    }

    fn refused(socket: &Path, question: &str) -> u16 {
        match ask(socket, question) {
            Err(AskError::Status { status, .. }) => status,
            other => panic!("{question}: {other:?}"),
        }
    }

    #[test]
    fn serves_controls_and_leaves_no_socket() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("run/guest.sock");
        let (controls, received) = mpsc::channel();
        let status = StatusCell::default();
        status.update(|s| s.promoted_bytes = 42);
        let server = Server::start(&socket, None, status.clone(), controls.clone()).unwrap();
        assert!(
            ask(&socket, "GET /v1/status")
                .unwrap()
                .contains("\"promoted_bytes\":42")
        );
        let metrics = ask(&socket, "GET /metrics").unwrap();
        assert!(metrics.contains("demeter_guest_promoted_bytes_total 42"));
        ask(&socket, "POST /v1/pause").unwrap();
        ask(&socket, "POST /v1/resume").unwrap();
        assert_eq!(refused(&socket, "GET /v1/pause"), 405);
        assert_eq!(refused(&socket, "GET /etc/passwd"), 404);
        assert_eq!(
            received.try_iter().collect::<Vec<_>>(),
            [Control::Pause, Control::Resume]
        );

        let second = Server::start(&socket, None, status, controls);
        assert!(
            matches!(second, Err(ServerError::Bind(BindError::Taken(_)))),
            "{second:?}"
        );
        drop(server);
        assert!(!socket.exists());
    }

    #[test]
    fn heat_is_told_by_an_agent_only() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("guest.sock");
        let (controls, received) = mpsc::channel();
        let status = StatusCell::default();
        let _server = Server::start(&socket, None, status.clone(), controls).unwrap();
        let agent = std::thread::spawn(move || {
            assert_eq!(received.recv(), Ok(Control::Look));
            let heat = Heat {
                epoch: 7,
                ..Heat::default()
            };
            status.heat.tell(heat);
            // From here on no agent answers.
            received
        });
        let told = ask(&socket, "GET /v1/heat").unwrap();
        assert_eq!(serde_json::from_str::<Heat>(&told).unwrap().epoch, 7);
        let _received = agent.join().unwrap();
        assert_eq!(refused(&socket, "GET /v1/heat"), 503);
    }

    #[test]
    fn over_tcp_nothing_is_changed() {
        use std::io::{Read, Write};
        let dir = tempfile::tempdir().unwrap();
        let (controls, received) = mpsc::channel();
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = free.local_addr().unwrap();
        drop(free);
        let socket = dir.path().join("guest.sock");
        let _server = Server::start(&socket, Some(address), StatusCell::default(), controls);
        for (question, status) in [
            ("POST /v1/pause", "404"),
            ("GET /v1/heat", "404"),
            ("GET /v1/status", "200"),
        ] {
            let mut stream = std::net::TcpStream::connect(address).unwrap();
            write!(stream, "{question} HTTP/1.0\r\n\r\n").unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).unwrap();
            assert!(answer.contains(status), "{question}: {answer}");
        }
        assert_eq!(received.try_iter().count(), 0);
    }
}
