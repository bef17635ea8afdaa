//! The API's listeners: a Unix socket for its owner and, if configured, TCP with a token.

use std::fs;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use demeter_http::{BindError, SocketFile};
use tokio::net::{TcpListener, UnixListener};

/// Minimum length of a token in bytes, so that it cannot be guessed.
const TOKEN_BYTES_MIN: usize = 16;

/// Reason why the API cannot listen.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// The Unix socket cannot be created.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// The TCP address cannot be used.
    #[error("cannot listen on {address}: {source}; set another address")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The system's error.
        source: io::Error,
    },
    /// The token file cannot be read.
    #[error("cannot read token_file {path}: {source}")]
    Token {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The token is not secret or too short.
    #[error("token_file {path} {what}; {hint}")]
    WeakToken {
        /// The file.
        path: PathBuf,
        /// The token's fault.
        what: &'static str,
        /// How to fix it.
        hint: &'static str,
    },
}

/// Creates the Unix socket, accessible to this process's user only.
pub fn unix(path: &Path) -> Result<(UnixListener, SocketFile), ListenError> {
    let (listener, file) = demeter_http::bind(path)?;
    let path = path.into();
    let listener =
        UnixListener::from_std(listener).map_err(|source| BindError::Listen { path, source })?;
    Ok((listener, file))
}

/// Listens on TCP.
pub async fn tcp(address: SocketAddr) -> Result<TcpListener, ListenError> {
    TcpListener::bind(address)
        .await
        .map_err(|source| ListenError::Listen { address, source })
}

/// The secret that TCP clients must send. It is never printed.
#[derive(Clone)]
pub struct Token(String);

impl Token {
    /// Reads the token from a file that only its owner may read.
    pub fn load(path: &Path) -> Result<Self, ListenError> {
        let read_error = |source| ListenError::Token {
            path: path.into(),
            source,
        };
        let weak = |what, hint| ListenError::WeakToken {
            path: path.into(),
            what,
            hint,
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

    /// Whether `shown` is the token. Compares in constant time, so that timing does not reveal
    /// characters.
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
    use std::os::unix::fs::PermissionsExt;

    use super::*;

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
