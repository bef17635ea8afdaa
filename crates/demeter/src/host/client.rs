//! A client of the host controller's API: one HTTP request per connection on its Unix socket.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, bail};
use demeter_host::api::Problem;
use demeter_http::AskError;
use demeter_proto::shown;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Time limit for an answer.
const TIMEOUT: Duration = Duration::from_secs(5);

/// The controller's default socket.
pub const SOCKET: &str = "/run/demeter/host.sock";

/// The connection to a controller.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct Client {
    /// The host controller's Unix socket
    #[arg(long, value_name = "PATH", default_value = SOCKET)]
    pub socket: PathBuf,
}

impl Client {
    /// Sends a GET request.
    pub fn get<T: DeserializeOwned>(&self, path: &str) -> anyhow::Result<T> {
        let body = self.request(&format!("GET {path}"), "")?;
        serde_json::from_str(&body)
            .with_context(|| format!("{} gives an answer that is not ours", self.socket.display()))
    }

    /// Sends a PUT request.
    pub fn put(&self, path: &str, body: &impl Serialize) -> anyhow::Result<()> {
        self.request(&format!("PUT {path}"), &serde_json::to_string(body)?)?;
        Ok(())
    }

    /// Sends a POST request without a body.
    pub fn post(&self, path: &str) -> anyhow::Result<()> {
        self.request(&format!("POST {path}"), "")?;
        Ok(())
    }

    /// Sends a DELETE request.
    pub fn delete(&self, path: &str) -> anyhow::Result<()> {
        self.request(&format!("DELETE {path}"), "")?;
        Ok(())
    }

    /// Sends a POST request and parses the answer.
    pub fn post_for<T: DeserializeOwned>(&self, path: &str) -> anyhow::Result<T> {
        let body = self.request(&format!("POST {path}"), "")?;
        serde_json::from_str(&body)
            .with_context(|| format!("{} gives an answer that is not ours", self.socket.display()))
    }

    /// The body of a successful answer; otherwise an error with the controller's reason.
    fn request(&self, question: &str, body: &str) -> anyhow::Result<String> {
        let socket = self.socket.display();
        let (status, body) = match demeter_http::ask(&self.socket, question, body, TIMEOUT) {
            Err(AskError::Status { status, body }) => (status, body),
            Err(AskError::NotHttp) => bail!("{socket} does not speak HTTP; give another --socket"),
            answer => {
                return answer.with_context(|| {
                    format!(
                        "cannot reach the host controller at {socket}; start it with demeter host --config FILE, or give its --socket"
                    )
                });
            }
        };
        match serde_json::from_str::<Problem>(&body) {
            Ok(problem) => bail!(shown(&problem.error)),
            Err(_) => bail!("{socket} answers {question} with HTTP status {status}"),
        }
    }
}
