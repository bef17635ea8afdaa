//! Protocols of key-value stores: Redis' protocol (RESP 2) and memcached's text protocol.

use std::io::{self, BufRead, Read, Write};

use clap::ValueEnum;

/// Maximum line length of an answer.
const LINE_BYTES_MAX: u64 = 4096;

/// The protocol of a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Protocol {
    /// Redis, and what speaks as it does
    Redis,
    /// memcached
    Memcached,
}

impl Protocol {
    /// Requests a key's value.
    pub(crate) fn ask_get(self, to: &mut impl Write, key: &str) -> io::Result<()> {
        match self {
            Self::Redis => write!(to, "*2\r\n$3\r\nGET\r\n${}\r\n{key}\r\n", key.len()),
            Self::Memcached => write!(to, "get {key}\r\n"),
        }
    }

    /// Requests to store a value.
    pub(crate) fn ask_set(self, to: &mut impl Write, key: &str, value: &[u8]) -> io::Result<()> {
        let (key_bytes, bytes) = (key.len(), value.len());
        match self {
            Self::Redis => write!(
                to,
                "*3\r\n$3\r\nSET\r\n${key_bytes}\r\n{key}\r\n${bytes}\r\n"
            )?,
            Self::Memcached => write!(to, "set {key} 0 0 {bytes}\r\n")?,
        }
        to.write_all(value)?;
        to.write_all(b"\r\n")
    }

    /// Reads the answer to a get into `value`, which must have the stored length.
    ///
    /// # Errors
    /// When the answer is anything else, or missing.
    pub(crate) fn got(
        self,
        from: &mut impl BufRead,
        key: &str,
        value: &mut [u8],
    ) -> io::Result<()> {
        let bytes = value.len();
        let expected = match self {
            Self::Redis => format!("${bytes}"),
            Self::Memcached => format!("VALUE {key} 0 {bytes}"),
        };
        expect(from, &expected)?;
        from.read_exact(value)?;
        expect(from, "")?;
        match self {
            Self::Redis => Ok(()),
            Self::Memcached => expect(from, "END"),
        }
    }

    /// Reads the answer to a set.
    ///
    /// # Errors
    /// When the answer is anything else, or missing.
    pub(crate) fn was_set(self, from: &mut impl BufRead) -> io::Result<()> {
        expect(
            from,
            match self {
                Self::Redis => "+OK",
                Self::Memcached => "STORED",
            },
        )
    }
}

/// Reads a line that must equal `line`.
fn expect(from: &mut impl BufRead, line: &str) -> io::Result<()> {
    let mut said = vec![];
    from.take(LINE_BYTES_MAX).read_until(b'\n', &mut said)?;
    if said.strip_suffix(b"\r\n") == Some(line.as_bytes()) {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&said);
    let said: String = said.trim_end().chars().take(80).collect();
    let what = format!("said {said:?} instead of {line:?}");
    Err(io::Error::new(io::ErrorKind::InvalidData, what))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_protocols_are_as_their_servers_expect() {
        let asked = |protocol: Protocol| {
            let mut said = vec![];
            protocol.ask_get(&mut said, "k1").unwrap();
            protocol.ask_set(&mut said, "k1", b"v").unwrap();
            String::from_utf8(said).unwrap()
        };
        assert_eq!(
            asked(Protocol::Redis),
            "*2\r\n$3\r\nGET\r\n$2\r\nk1\r\n*3\r\n$3\r\nSET\r\n$2\r\nk1\r\n$1\r\nv\r\n"
        );
        assert_eq!(
            asked(Protocol::Memcached),
            "get k1\r\nset k1 0 0 1\r\nv\r\n"
        );
        for (protocol, answer) in [
            (Protocol::Redis, &b"$2\r\n\r\n\r\n+OK\r\n"[..]),
            (
                Protocol::Memcached,
                b"VALUE k1 0 2\r\n\r\n\r\nEND\r\nSTORED\r\n",
            ),
        ] {
            let (mut answer, mut value) = (answer, [0; 2]);
            protocol.got(&mut answer, "k1", &mut value).unwrap();
            assert_eq!(&value, b"\r\n");
            protocol.was_set(&mut answer).unwrap();
            assert!(protocol.was_set(&mut answer).is_err(), "nothing is left");
        }
        let missing = Protocol::Redis.got(&mut &b"$-1\r\n"[..], "k", &mut [0; 2]);
        assert!(missing.unwrap_err().to_string().contains("\"$-1\""));
    }

    proptest! {
        /// For any data from a server, reading its answer terminates.
        #[test]
        fn any_answer_is_read_or_refused(answer: Vec<u8>, bytes in 0usize..20) {
            for protocol in [Protocol::Redis, Protocol::Memcached] {
                let _ = protocol.got(&mut &answer[..], "k", &mut vec![0; bytes]);
                let _ = protocol.was_set(&mut &answer[..]);
            }
        }
    }
}
