//! HTTP for status, metrics, pause and resume, on a Unix socket and, when asked for, on TCP.
//!
//! - `GET /v1/status`: the [`Status`](crate::status::Status) as JSON.
//! - `GET /metrics`: the same for Prometheus.
//! - `POST /v1/pause`, `POST /v1/resume`.

use std::fs;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::mpsc::Sender;
use std::thread::JoinHandle;

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::{get, post};
use axum::{Json, Router};
use tokio::sync::oneshot;

use crate::agent::Command;
use crate::status::StatusCell;

/// Why the server does not start.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// Another agent answers on the socket.
    #[error("another agent answers on {0}; stop it, or give this one another --socket")]
    Taken(PathBuf),
    /// Something that is not a socket has its path.
    #[error("{0} exists and is not a socket; remove it, or give another --socket")]
    NotASocket(PathBuf),
    /// The socket cannot be made.
    #[error("cannot listen on {place}: {source}; give another --socket or --listen")]
    Listen {
        /// Path or address.
        place: String,
        /// What the system said.
        source: io::Error,
    },
}

/// A running server. Dropped, it stops and removes its socket.
#[derive(Debug)]
pub struct Server {
    socket: PathBuf,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Clone)]
struct App {
    status: StatusCell,
    commands: Sender<Command>,
}

impl Server {
    /// Listens on `socket` (made for its owner only) and on `listen`, in a thread of its own.
    pub fn start(
        socket: &Path,
        listen: Option<SocketAddr>,
        status: StatusCell,
        commands: Sender<Command>,
    ) -> Result<Self, ServerError> {
        let error = |place: String| move |source| ServerError::Listen { place, source };
        let unix = bind(socket)?;
        let (stop, stopped) = oneshot::channel();
        // From here on, dropping the server removes the socket.
        let mut server = Self {
            socket: socket.into(),
            stop: Some(stop),
            thread: None,
        };
        let tcp = listen
            .map(|addr| std::net::TcpListener::bind(addr).map_err(error(addr.to_string())))
            .transpose()?;
        unix.set_nonblocking(true)
            .map_err(error(socket.display().to_string()))?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .build()
            .map_err(error(socket.display().to_string()))?;
        let app = Router::new()
            .route(
                "/v1/status",
                get(|State(app): State<App>| async move { Json(app.status.get()) }),
            )
            .route("/metrics", get(metrics))
            .route("/v1/pause", post(|state| command(state, Command::Pause)))
            .route("/v1/resume", post(|state| command(state, Command::Resume)))
            .with_state(App { status, commands });
        server.thread = Some(std::thread::spawn(move || {
            runtime.block_on(async move {
                if let Some(tcp) = tcp {
                    let listener = tcp
                        .set_nonblocking(true)
                        .and_then(|()| tokio::net::TcpListener::from_std(tcp));
                    match listener {
                        Ok(listener) => {
                            tokio::spawn(axum::serve(listener, app.clone()).into_future());
                        }
                        Err(error) => tracing::error!("TCP is not served: {error}"),
                    }
                }
                match tokio::net::UnixListener::from_std(unix) {
                    Ok(listener) => {
                        let serve = axum::serve(listener, app).into_future();
                        tokio::select! { _ = serve => (), _ = stopped => () }
                    }
                    Err(error) => tracing::error!("the socket is not served: {error}"),
                }
            });
        }));
        Ok(server)
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
        if let Err(error) = fs::remove_file(&self.socket) {
            tracing::warn!("cannot remove {}: {error}", self.socket.display());
        }
    }
}

/// Makes the socket, over the remains of an agent that was killed, but over nothing else.
fn bind(path: &Path) -> Result<UnixListener, ServerError> {
    let error = |source| ServerError::Listen {
        place: path.display().to_string(),
        source,
    };
    if let Ok(meta) = fs::symlink_metadata(path) {
        if !meta.file_type().is_socket() {
            return Err(ServerError::NotASocket(path.into()));
        }
        if UnixStream::connect(path).is_ok() {
            return Err(ServerError::Taken(path.into()));
        }
        fs::remove_file(path).map_err(error)?;
    } else if let Some(dir) = path.parent() {
        fs::create_dir_all(dir).map_err(error)?;
    }
    let listener = UnixListener::bind(path).map_err(error)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o600)).map_err(error)?;
    Ok(listener)
}

async fn metrics(State(app): State<App>) -> impl IntoResponse {
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, kind)], app.status.prometheus())
}

async fn command(State(app): State<App>, command: Command) -> StatusCode {
    match app.commands.send(command) {
        Ok(()) => StatusCode::ACCEPTED,
        Err(_) => StatusCode::SERVICE_UNAVAILABLE,
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::sync::mpsc;

    use super::*;

    fn ask(socket: &Path, request: &str) -> String {
        let mut stream = UnixStream::connect(socket).unwrap();
        write!(
            stream,
            "{request} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        )
        .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    #[test]
    fn serves_commands_and_leaves_no_socket() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("run/guest.sock");
        let (commands, received) = mpsc::channel();
        let status = StatusCell::default();
        status.update(|s| s.promoted_bytes = 42);
        let server = Server::start(&socket, None, status.clone(), commands.clone()).unwrap();
        assert_eq!(
            fs::metadata(&socket).unwrap().permissions().mode() & 0o777,
            0o600
        );

        assert!(ask(&socket, "GET /v1/status").contains("\"promoted_bytes\":42"));
        assert!(ask(&socket, "GET /metrics").contains("demeter_guest_promoted_bytes_total 42"));
        assert!(ask(&socket, "POST /v1/pause").starts_with("HTTP/1.1 202"));
        assert!(ask(&socket, "POST /v1/resume").starts_with("HTTP/1.1 202"));
        assert!(ask(&socket, "GET /v1/pause").starts_with("HTTP/1.1 405"));
        assert!(ask(&socket, "GET /etc/passwd").starts_with("HTTP/1.1 404"));
        assert_eq!(
            received.try_iter().collect::<Vec<_>>(),
            [Command::Pause, Command::Resume]
        );

        let second = Server::start(&socket, None, status, commands);
        assert!(matches!(second, Err(ServerError::Taken(_))), "{second:?}");
        drop(server);
        assert!(!socket.exists());
    }

    #[test]
    fn takes_over_from_a_dead_agent_but_not_from_a_file() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("guest.sock");
        drop(UnixListener::bind(&socket).unwrap());
        let (commands, _received) = mpsc::channel();
        drop(Server::start(&socket, None, StatusCell::default(), commands.clone()).unwrap());
        fs::write(&socket, "precious").unwrap();
        let refused = Server::start(&socket, None, StatusCell::default(), commands);
        assert!(
            matches!(refused, Err(ServerError::NotASocket(_))),
            "{refused:?}"
        );
        assert_eq!(fs::read_to_string(&socket).unwrap(), "precious");
    }
}
