//! The host controller's API from the outside: one HTTP request per connection on its Unix socket.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, bail};
use demeter_host::api::Problem;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// How long the controller may think.
const TIMEOUT: Duration = Duration::from_secs(5);

/// The longest answer: the view of a full host and all kept events take less.
const ANSWER_BYTES_MAX: u64 = 16 << 20;

/// Where the controller listens.
#[derive(Debug, Clone, clap::Args)]
pub struct Client {
    /// The host controller's Unix socket
    #[arg(long, value_name = "PATH", default_value = "/run/demeter/host.sock")]
    socket: PathBuf,
}

impl Client {
    /// Asks for something.
    pub fn get<T: DeserializeOwned>(&self, path: &str) -> anyhow::Result<T> {
        let body = self.request("GET", path, "")?;
        serde_json::from_str(&body)
            .with_context(|| format!("{} gives an answer that is not ours", self.socket.display()))
    }

    /// Tells to do something.
    pub fn put(&self, path: &str, body: &impl Serialize) -> anyhow::Result<()> {
        self.request("PUT", path, &serde_json::to_string(body)?)?;
        Ok(())
    }

    /// The body of a good answer; a bad one is an error with its reason.
    fn request(&self, method: &str, path: &str, body: &str) -> anyhow::Result<String> {
        let socket = self.socket.display();
        let answer = self.exchange(method, path, body).with_context(|| {
            format!(
                "cannot reach the host controller at {socket}; start it with demeter host --config FILE, or give its --socket"
            )
        })?;
        let (status, body) = parse(&answer)
            .with_context(|| format!("{socket} does not speak HTTP; give another --socket"))?;
        if (200..300).contains(&status) {
            return Ok(body.into());
        }
        match serde_json::from_str::<Problem>(body) {
            Ok(problem) => bail!(problem.error),
            Err(_) => bail!("{socket} answers {method} {path} with HTTP status {status}"),
        }
    }

    fn exchange(&self, method: &str, path: &str, body: &str) -> std::io::Result<String> {
        let mut stream = UnixStream::connect(&self.socket)?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        stream.set_write_timeout(Some(TIMEOUT))?;
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nHost: demeter\r\nConnection: close\r\n\
             Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        )?;
        let mut answer = String::new();
        stream.take(ANSWER_BYTES_MAX).read_to_string(&mut answer)?;
        Ok(answer)
    }
}

/// Status and body of an answer.
fn parse(answer: &str) -> Option<(u16, &str)> {
    let (head, body) = answer.split_once("\r\n\r\n")?;
    let status = head.strip_prefix("HTTP/1.1 ")?.split(' ').next()?;
    Some((status.parse().ok()?, body))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_taken_apart() {
        let answer = "HTTP/1.1 409 Conflict\r\ncontent-length: 2\r\n\r\n{}\r\n\r\n";
        assert_eq!(parse(answer), Some((409, "{}\r\n\r\n")));
        for bad in [
            "",
            "SSH-2.0\r\n\r\n",
            "HTTP/1.1 x\r\n\r\n",
            "HTTP/1.1 200 OK",
        ] {
            assert_eq!(parse(bad), None, "{bad}");
        }
    }
}
