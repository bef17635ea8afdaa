//! Asks a server on a Unix socket one question.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// The longest answer that is read, bytes. The view of a full host and all its events take less.
const ANSWER_BYTES_MAX: u64 = 16 << 20;

/// Why a question has no good answer.
#[derive(Debug, thiserror::Error)]
pub enum AskError {
    /// Nobody listens, or answers in time.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// It is no server of ours.
    #[error("the answer is no HTTP")]
    NotHttp,
    /// The server refuses.
    #[error("status {status}: {}", body.lines().next().unwrap_or_default())]
    Status {
        /// HTTP's status code; none of 200 to 299.
        status: u16,
        /// What else it says.
        body: String,
    },
}

/// Asks `question`, such as `GET /v1/status`, with a JSON `body`, and returns the answer's body. No
/// read or write takes longer than `limit`.
pub fn ask(socket: &Path, question: &str, body: &str, limit: Duration) -> Result<String, AskError> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(limit))?;
    stream.set_write_timeout(Some(limit))?;
    write!(
        stream,
        "{question} HTTP/1.0\r\nHost: demeter\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    )?;
    let mut answer = String::new();
    stream.take(ANSWER_BYTES_MAX).read_to_string(&mut answer)?;
    let (status, body) = parse(&answer).ok_or(AskError::NotHttp)?;
    let body = body.to_owned();
    match status {
        200..300 => Ok(body),
        _ => Err(AskError::Status { status, body }),
    }
}

/// Status and body of an answer.
fn parse(answer: &str) -> Option<(u16, &str)> {
    let (head, body) = answer.split_once("\r\n\r\n")?;
    let (_version, rest) = head.strip_prefix("HTTP/1.")?.split_once(' ')?;
    Some((rest.split_whitespace().next()?.parse().ok()?, body))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    /// What comes of an answer to one question.
    fn put(answer: &'static str) -> Result<String, AskError> {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("api.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let end = "Content-Length: 2\r\n\r\n{}";
            let mut question = String::new();
            while !question.ends_with(end) {
                let mut byte = [0];
                stream.read_exact(&mut byte).unwrap();
                question.push(byte[0].into());
            }
            assert!(question.starts_with("PUT /v1/x HTTP/1.0\r\n"), "{question}");
            stream.write_all(answer.as_bytes()).unwrap();
        });
        let answer = ask(&socket, "PUT /v1/x", "{}", Duration::from_secs(5));
        server.join().unwrap();
        answer
    }

    #[test]
    fn the_body_comes_with_success_only() {
        assert_eq!(
            put("HTTP/1.0 200 OK\r\n\r\n[]\r\n\r\n").unwrap(),
            "[]\r\n\r\n"
        );
        assert_eq!(put("HTTP/1.1 204 No Content\r\n\r\n").unwrap(), "");
        let said = put("HTTP/1.0 409 Conflict\r\n\r\nbeyond the pool\n").unwrap_err();
        assert_eq!(said.to_string(), "status 409: beyond the pool");
        for bad in [
            "garbage",
            "SSH-2.0\r\n\r\n",
            "HTTP/1.1 x\r\n\r\n",
            "HTTP/1.1 200 OK",
        ] {
            assert!(matches!(put(bad), Err(AskError::NotHttp)), "{bad}");
        }
    }
}
