//! A minimal HTTP client for one question to a server on a Unix socket.

use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

/// Maximum length of an answer. The view of a full host with all its events is shorter.
const ANSWER_BYTES_MAX: usize = 16 << 20;

/// Maximum length of an answer's head.
const HEAD_BYTES_MAX: usize = 64 << 10;

/// Reason why a question failed.
#[derive(Debug, thiserror::Error)]
pub enum AskError {
    /// The connection failed or timed out.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The answer is not HTTP.
    #[error("the answer is not HTTP")]
    NotHttp,
    /// The answer exceeds the bound.
    #[error("the answer is longer than {0} bytes")]
    TooLong(usize),
    /// The server answered with an error status.
    #[error("status {status}: {}", body.lines().next().unwrap_or_default())]
    Status {
        /// HTTP status code, not 200 to 299.
        status: u16,
        /// The answer's body.
        body: String,
    },
}

/// Sends a question and returns the answer's body.
///
/// `question` has the form `GET /v1/status`, `body` is JSON, and `limit` covers the whole exchange.
pub fn ask(socket: &Path, question: &str, body: &str, limit: Duration) -> Result<String, AskError> {
    let stream = UnixStream::connect(socket)?;
    ask_over(stream, question, body, limit, ANSWER_BYTES_MAX)
}

/// Like [`ask`], over an open connection and with the caller's bound on the answer. The server may
/// keep the connection open: an answer that states its length ends there.
pub fn ask_over(
    mut stream: UnixStream,
    question: &str,
    body: &str,
    limit: Duration,
    bytes_max: usize,
) -> Result<String, AskError> {
    let deadline = Instant::now() + limit;
    stream.set_write_timeout(Some(limit))?;
    write!(
        stream,
        "{question} HTTP/1.0\r\nHost: demeter\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    )?;
    let mut answer = vec![];
    let mut end = None;
    let mut piece = [0; 16 << 10];
    while end.is_none_or(|end| answer.len() < end) {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::Error::from(ErrorKind::TimedOut).into());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut piece) {
            Ok(0) if end.is_some() => return Err(io::Error::from(ErrorKind::UnexpectedEof).into()),
            Ok(0) => break,
            Ok(count) => answer.extend_from_slice(&piece[..count]),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            // The error kind of a socket's own time-out.
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                return Err(io::Error::from(ErrorKind::TimedOut).into());
            }
            Err(error) => return Err(error.into()),
        }
        end = end.or_else(|| end_of(&answer));
        if answer.len().max(end.unwrap_or(0)) > bytes_max {
            return Err(AskError::TooLong(bytes_max));
        }
    }
    answer.truncate(end.unwrap_or(usize::MAX));
    let answer = String::from_utf8(answer).map_err(|_| AskError::NotHttp)?;
    let (status, body) = parse(&answer).ok_or(AskError::NotHttp)?;
    let body = body.to_owned();
    match status {
        200..300 => Ok(body),
        _ => Err(AskError::Status { status, body }),
    }
}

/// Length of the whole answer, if its head has arrived and states it. Status 204 has no body.
fn end_of(answer: &[u8]) -> Option<usize> {
    const HEAD_END: &[u8] = b"\r\n\r\n";
    let beginning = &answer[..answer.len().min(HEAD_BYTES_MAX)];
    let head = beginning
        .windows(HEAD_END.len())
        .position(|at| at == HEAD_END)?;
    let text = std::str::from_utf8(&answer[..head]).ok()?;
    let mut lines = text.split("\r\n");
    let status = lines.next()?.split_whitespace().nth(1);
    let length = lines
        .filter_map(|line| line.split_once(':'))
        .find(|(name, _)| name.eq_ignore_ascii_case("content-length"));
    let body = match (status, length) {
        (Some("204"), _) => 0,
        (_, Some((_, length))) => length.trim().parse().ok()?,
        (_, None) => return None,
    };
    (head + HEAD_END.len()).checked_add(body)
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

    /// The result for a server that gives this answer.
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

    /// The result for a server that sends this answer and leaves the connection open.
    fn kept_open(answer: &'static str, bytes_max: usize) -> Result<String, AskError> {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        theirs.write_all(answer.as_bytes()).unwrap();
        ask_over(ours, "GET /x", "", Duration::from_millis(200), bytes_max)
    }

    #[test]
    fn an_answer_ends_where_its_length_says() {
        let ok = "HTTP/1.1 200 \r\nServer: x\r\ncontent-length: 4\r\n\r\n{ }\nmore";
        assert_eq!(kept_open(ok, 1000).unwrap(), "{ }\n");
        let nothing = "HTTP/1.1 204 \r\nConnection: keep-alive\r\n\r\n";
        assert_eq!(kept_open(nothing, 1000).unwrap(), "");
        for late in [
            "",
            "HTTP/1.1 200 \r\n",
            "HTTP/1.1 200 \r\nContent-Length: 9\r\n\r\n{}",
        ] {
            let said = kept_open(late, 1000).unwrap_err();
            assert!(
                matches!(&said, AskError::Io(error) if error.kind() == ErrorKind::TimedOut),
                "{late}: {said}"
            );
        }
        for huge in [
            ok,
            "HTTP/1.1 200 \r\nContent-Length: 18446744073709551615\r\n\r\n",
        ] {
            assert!(matches!(kept_open(huge, 20), Err(AskError::TooLong(20))));
        }
        let cut = put("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}").unwrap_err();
        assert!(matches!(cut, AskError::Io(_)), "{cut}");
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
