//! Creates a server's Unix socket.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

/// Reason why a socket cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// Another server listens on it.
    #[error("another demeter answers on {0}; stop it, or give this one another socket")]
    Taken(PathBuf),
    /// The path belongs to a file that is not a socket.
    #[error("{0} exists and is not a socket; remove it, or give another socket")]
    NotASocket(PathBuf),
    /// The system returned an error.
    #[error("cannot listen on {path}: {source}; give another socket")]
    Listen {
        /// The socket's path.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

/// The file of a socket; removed when dropped.
#[derive(Debug)]
pub struct SocketFile(PathBuf);

impl Drop for SocketFile {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_file(&self.0) {
            tracing::warn!("cannot remove {}: {error}", self.0.display());
        }
    }
}

/// Listens at `path`, accessible to this process's user only. Replaces the stale socket of a server
/// that was killed, but nothing else. The listener does not block.
pub fn bind(path: &Path) -> Result<(UnixListener, SocketFile), BindError> {
    let error = |source| BindError::Listen {
        path: path.into(),
        source,
    };
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    fs::create_dir_all(folder).map_err(error)?;
    // The lock serializes servers that start at once. Otherwise the second could take the first
    // one's new socket for a stale one.
    let _lock = locked(folder).map_err(error)?;
    if let Ok(meta) = fs::symlink_metadata(path) {
        if !meta.file_type().is_socket() {
            return Err(BindError::NotASocket(path.into()));
        }
        if UnixStream::connect(path).is_ok() {
            return Err(BindError::Taken(path.into()));
        }
        fs::remove_file(path).map_err(error)?;
    }
    let listener = UnixListener::bind(path).map_err(error)?;
    let file = SocketFile(path.into());
    fs::set_permissions(path, fs::Permissions::from_mode(0o600)).map_err(error)?;
    listener.set_nonblocking(true).map_err(error)?;
    Ok((listener, file))
}

/// Locks a folder against concurrent calls (flock(2)).
fn locked(folder: &Path) -> io::Result<File> {
    let folder = File::open(folder)?;
    // SAFETY: takes a descriptor that is open, and a number.
    match unsafe { libc::flock(folder.as_raw_fd(), libc::LOCK_EX) } {
        0 => Ok(folder),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dead_servers_socket_is_replaced_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run/demeter.sock");
        let (first, file) = bind(&path).unwrap();
        let mode = fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert!(matches!(bind(&path), Err(BindError::Taken(_))));
        // After a kill the socket file stays without a listener.
        drop(first);
        std::mem::forget(file);
        let (_second, file) = bind(&path).unwrap();
        drop(file);
        assert!(!path.exists());
        fs::write(&path, "precious").unwrap();
        assert!(matches!(bind(&path), Err(BindError::NotASocket(_))));
        assert_eq!(fs::read_to_string(&path).unwrap(), "precious");
    }

    #[test]
    fn of_many_that_start_at_once_one_listens() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("demeter.sock");
        drop(UnixListener::bind(&path).unwrap());
        let servers: Vec<_> = std::thread::scope(|scope| {
            let starters: Vec<_> = (0..16).map(|_| scope.spawn(|| bind(&path))).collect();
            starters.into_iter().map(|s| s.join().unwrap()).collect()
        });
        assert_eq!(servers.iter().filter(|server| server.is_ok()).count(), 1);
        UnixStream::connect(&path).unwrap();
    }
}
