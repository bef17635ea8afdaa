//! Where the API listens: a Unix socket made for its owner only and, when configured, TCP for
//! those who show a token.

use std::fs;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use tokio::net::{TcpListener, UnixListener};

/// The least that a token must have, bytes: nobody guesses it.
const TOKEN_BYTES_MIN: usize = 16;

/// Why the API cannot be offered.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// Another host controller answers on the socket.
    #[error("another host controller answers on {0}; stop it, or set another socket")]
    Taken(PathBuf),
    /// Something that is not a socket has its path.
    #[error("{0} exists and is not a socket; remove it, or set another socket")]
    NotASocket(PathBuf),
    /// The socket cannot be made.
    #[error("cannot listen on {place}: {source}; set another socket or listen")]
    Listen {
        /// Path or address.
        place: String,
        /// What the system said.
        source: io::Error,
    },
    /// The token cannot be read.
    #[error("cannot read token_file {path}: {source}")]
    Token {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The token protects nothing.
    #[error("token_file {path} {what}; {mend}")]
    WeakToken {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        what: &'static str,
        /// What to do about it.
        mend: &'static str,
    },
}

/// A Unix socket that is removed when dropped.
#[derive(Debug)]
pub struct Socket(PathBuf);

impl Drop for Socket {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_file(&self.0) {
            tracing::warn!("cannot remove {}: {error}", self.0.display());
        }
    }
}

/// Makes the socket, over the remains of a controller that was killed, but over nothing else.
pub fn unix(path: &Path) -> Result<(UnixListener, Socket), ListenError> {
    let error = |source| ListenError::Listen {
        place: path.display().to_string(),
        source,
    };
    if let Ok(meta) = fs::symlink_metadata(path) {
        if !meta.file_type().is_socket() {
            return Err(ListenError::NotASocket(path.into()));
        }
        if UnixStream::connect(path).is_ok() {
            return Err(ListenError::Taken(path.into()));
        }
        fs::remove_file(path).map_err(error)?;
    } else if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).map_err(error)?;
    }
    let listener = UnixListener::bind(path).map_err(error)?;
    let socket = Socket(path.into());
    fs::set_permissions(path, fs::Permissions::from_mode(0o600)).map_err(error)?;
    Ok((listener, socket))
}

/// Listens on TCP.
pub async fn tcp(address: SocketAddr) -> Result<TcpListener, ListenError> {
    TcpListener::bind(address)
        .await
        .map_err(|source| ListenError::Listen {
            place: address.to_string(),
            source,
        })
}

/// The secret that whoever comes over TCP has to show. Never printed.
#[derive(Clone)]
pub struct Token(String);

impl Token {
    /// Reads it from a file that only its owner may read.
    pub fn load(path: &Path) -> Result<Self, ListenError> {
        let read_error = |source| ListenError::Token {
            path: path.into(),
            source,
        };
        let weak = |what, mend| ListenError::WeakToken {
            path: path.into(),
            what,
            mend,
        };
        let meta = fs::metadata(path).map_err(read_error)?;
        if meta.mode() & 0o077 != 0 {
            return Err(weak("can be read by others", "chmod 600 it"));
        }
        let text = fs::read_to_string(path).map_err(read_error)?;
        let token = text.trim();
        if token.len() < TOKEN_BYTES_MIN {
            return Err(weak(
                "holds less than 16 characters",
                "write for example the output of openssl rand -hex 32 into it",
            ));
        }
        Ok(Self(token.into()))
    }

    /// Whether `shown` is it. Takes as long for any text of the same length, so that nobody learns
    /// it character by character.
    pub fn matches(&self, shown: &str) -> bool {
        let (own, shown) = (self.0.as_bytes(), shown.as_bytes());
        let differ = own.iter().zip(shown).fold(0, |sum, (a, b)| sum | (a ^ b));
        own.len() == shown.len() && std::hint::black_box(differ) == 0
    }
}

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn takes_over_from_the_dead_only() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run/host.sock");
        let (first, guard) = unix(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert!(matches!(unix(&path), Err(ListenError::Taken(_))));
        // Killed: the socket stays, nobody listens.
        drop(first);
        std::mem::forget(guard);
        let (_second, guard) = unix(&path).unwrap();
        drop(guard);
        assert!(!path.exists());
        fs::write(&path, "precious").unwrap();
        assert!(matches!(unix(&path), Err(ListenError::NotASocket(_))));
        assert_eq!(fs::read_to_string(&path).unwrap(), "precious");
    }

    #[test]
    fn a_token_is_secret_and_long() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        let write = |text: &str, mode| {
            fs::write(&path, text).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            Token::load(&path).map_err(|error| error.to_string())
        };
        let secret = "0123456789abcdef";
        assert!(write(secret, 0o644).unwrap_err().contains("chmod 600"));
        assert!(write("short\n", 0o600).unwrap_err().contains("openssl"));
        let token = write(&format!("{secret}\n"), 0o600).unwrap();
        assert!(token.matches(secret));
        for wrong in [
            "",
            "0123456789abcde",
            "0123456789abcdeF",
            "0123456789abcdef0",
        ] {
            assert!(!token.matches(wrong), "{wrong}");
        }
        assert!(!format!("{token:?}").contains("0123"));
        fs::remove_file(&path).unwrap();
        assert!(
            Token::load(&path)
                .unwrap_err()
                .to_string()
                .contains("token_file")
        );
    }
}
