//! Questions to a server on a Unix socket: HTTP/1.0, one question a connection.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// Longest answer that is read, bytes.
const ANSWER_MAX_BYTES: u64 = 16 << 20;

/// Asks `question`, such as `GET /v1/status`, with `body`, and returns the answer's body when its
/// status is 2xx. No read or write takes longer than `limit`.
///
/// Any other status is an error that quotes the body's first line.
pub fn ask(socket: &Path, question: &str, body: &str, limit: Duration) -> io::Result<String> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(limit))?;
    stream.set_write_timeout(Some(limit))?;
    // HTTP/1.0: the answer ends with the stream and is never chunked.
    let request = format!(
        "{question} HTTP/1.0\r\nHost: demeter\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(request.as_bytes())?;
    let mut answer = String::new();
    stream.take(ANSWER_MAX_BYTES).read_to_string(&mut answer)?;
    let (head, body) = answer
        .split_once("\r\n\r\n")
        .ok_or_else(|| io::Error::other("the answer is no HTTP"))?;
    let status = head.split_whitespace().nth(1).unwrap_or_default();
    if status.len() == 3 && status.starts_with('2') {
        return Ok(body.to_owned());
    }
    let line = body.lines().next().unwrap_or_default();
    Err(io::Error::other(format!("{question}: {status} {line}")))
}

#[cfg(test)]
pub(crate) mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    /// What `client` makes of a server that answers its one question with `answer`; also the
    /// question.
    pub(crate) fn answered<T>(
        answer: &'static str,
        client: impl FnOnce(&Path) -> T,
    ) -> (T, String) {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("api.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut question = [0; 512];
            let length = stream.read(&mut question).unwrap();
            stream.write_all(answer.as_bytes()).unwrap();
            String::from_utf8_lossy(&question[..length]).into_owned()
        });
        let made = client(&socket);
        (made, server.join().unwrap())
    }

    fn put(answer: &'static str) -> io::Result<String> {
        let (body, question) = answered(answer, |socket| {
            ask(socket, "PUT /v1/x", "{}", Duration::from_secs(5))
        });
        assert!(question.starts_with("PUT /v1/x HTTP/1.0\r\n"), "{question}");
        assert!(
            question.ends_with("Content-Length: 2\r\n\r\n{}"),
            "{question}"
        );
        body
    }

    #[test]
    fn the_body_comes_with_success_only() {
        assert_eq!(put("HTTP/1.0 200 OK\r\n\r\n[]").unwrap(), "[]");
        assert_eq!(put("HTTP/1.0 204 No Content\r\n\r\n").unwrap(), "");
        let said = put("HTTP/1.0 409 Conflict\r\n\r\nbeyond the pool\n").unwrap_err();
        assert!(said.to_string().contains("beyond the pool"), "{said}");
        assert!(put("garbage").is_err());
    }
}
