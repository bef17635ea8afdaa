//! A client of the agent's API: one HTTP request per connection on its Unix socket.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, anyhow};
use demeter_http::AskError;
use demeter_proto::shown;
use serde::de::DeserializeOwned;

/// Time limit for an answer.
const TIMEOUT: Duration = Duration::from_secs(5);

/// The agent's default socket.
pub const SOCKET: &str = "/run/demeter/guest.sock";

/// The connection to an agent.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct Client {
    /// The agent's Unix socket
    #[arg(long, value_name = "PATH", default_value = SOCKET)]
    pub socket: PathBuf,
}

impl Client {
    /// Sends a GET request.
    pub fn get<T: DeserializeOwned>(&self, path: &str) -> anyhow::Result<T> {
        let body = self.request("GET", path)?;
        serde_json::from_str(&body).with_context(|| {
            let socket = self.socket.display();
            format!("{socket} gives an answer that is not an agent's")
        })
    }

    /// Sends a POST request.
    pub fn post(&self, path: &str) -> anyhow::Result<()> {
        self.request("POST", path).map(drop)
    }

    /// The body of a successful answer; otherwise an error with the agent's reason.
    fn request(&self, method: &str, path: &str) -> anyhow::Result<String> {
        let socket = self.socket.display();
        let answer = demeter_http::ask(&self.socket, &format!("{method} {path}"), "", TIMEOUT);
        answer.map_err(|error| match error {
            AskError::Status { status: 404, .. } => {
                anyhow!("the agent at {socket} knows no {path}; it is older than this command")
            }
            AskError::Status { status, body } => {
                let why = shown(body.lines().next().unwrap_or_default());
                anyhow!("the agent at {socket} answers with HTTP status {status}: {why}")
            }
            AskError::NotHttp => {
                anyhow!("{socket} does not speak HTTP; give another --socket")
            }
            AskError::TooLong(bytes) => {
                anyhow!("{socket} answers with more than {bytes} bytes; give another --socket")
            }
            AskError::Io(error) => anyhow!(
                "cannot reach the agent at {socket}: {error}; start it with demeter guest, or give its --socket"
            ),
        })
    }
}
