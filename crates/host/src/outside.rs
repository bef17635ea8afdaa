//! Access to files, sockets and processes of others, which may block.
//!
//! # Problem
//! A VM's owner chooses the storage behind its descriptors, sockets and memory. A `stat` of a file
//! on hung storage, a path lookup or a read of `/proc/PID/maps` may block as long as the owner
//! likes. On a worker of the runtime it would stop all VMs and the API.
//!
//! # Approach
//! Every function that may block takes a [`MayWait`]. Only this module makes one, on a thread that
//! may block, and its caller gives up after `LIMIT`. Each VM has an `Outside` with a single
//! slot. So a VM on hung storage blocks one thread, however often it is retried.
//!
//! A test of this module reads this crate's sources. No other module may open or inspect files,
//! except for those that read the controller's own.

mod file_id;
mod sizes;

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::net::UnixStream as StdUnixStream;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, StatxFlags, fstat, openat, readlinkat, statx,
};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use rustix::process::geteuid;
use tokio::net::UnixStream;
use tokio::sync::Semaphore;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

pub use file_id::FileId;
pub use sizes::ReadSizes;
pub(crate) use sizes::{FileSizes, SizeWatch};

/// Time limit of a wait for files of others.
pub(crate) const LIMIT: Duration = Duration::from_secs(3);

/// Maximum number of symbolic links in a path, as in Linux.
const LINKS_MAX: usize = 40;

/// Maximum length of a file read as text; a process's mappings take at most a third of it.
const TEXT_BYTES_MAX: u64 = 32 << 20;

/// Proof that the thread may block: it is no worker of the runtime.
#[derive(Debug)]
pub struct MayWait(());

impl MayWait {
    /// For tests, whose thread may block.
    #[cfg(test)]
    pub(crate) fn in_a_test() -> Self {
        Self(())
    }
}

/// One VM's access to files of others. Clones share its single slot.
#[derive(Debug, Clone)]
pub struct Outside(Arc<Semaphore>);

impl Default for Outside {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(1)))
    }
}

/// Error: a file or process of others does not answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "{what}: no answer within {limit:?}; does the VM's storage hang? Only this VM is affected, and \
     the controller retries"
)]
pub struct Stuck {
    /// The action.
    what: &'static str,
    /// Time limit of the wait.
    limit: Duration,
}

impl From<Stuck> for io::Error {
    fn from(stuck: Stuck) -> Self {
        Self::new(io::ErrorKind::TimedOut, stuck)
    }
}

impl Outside {
    /// Runs an action on a thread that may block, and waits for it up to [`LIMIT`]. The action
    /// continues after that, and no other action of this VM starts until it has ended.
    pub(crate) async fn ask<T: Send + 'static>(
        &self,
        what: &'static str,
        work: impl FnOnce(&MayWait) -> T + Send + 'static,
    ) -> Result<T, Stuck> {
        self.ask_within(LIMIT, what, work).await
    }

    /// Like `ask`, with another time limit.
    pub(crate) async fn ask_within<T: Send + 'static>(
        &self,
        limit: Duration,
        what: &'static str,
        work: impl FnOnce(&MayWait) -> T + Send + 'static,
    ) -> Result<T, Stuck> {
        let turn = self.0.clone();
        let asked = async move {
            // The semaphore is never closed.
            let turn = turn.acquire_owned().await;
            let work = spawn_blocking(move || {
                let _turn = turn;
                work(&MayWait(()))
            });
            work.await
        };
        match timeout(limit, asked).await {
            Ok(Ok(value)) => Ok(value),
            // The runtime is stopping, so no result will be needed.
            Ok(Err(_)) | Err(_) => Err(Stuck { what, limit }),
        }
    }

    /// Connects to a Unix socket. Symbolic links on the way are followed only if root or this
    /// process's user owns them. A VM's owner could otherwise redirect us to another VM.
    pub(crate) async fn connect(&self, path: &Path) -> io::Result<UnixStream> {
        let path = path.to_owned();
        let connecting = self.ask("connect", move |wait| connect_to(&path, wait));
        UnixStream::from_std(connecting.await??)
    }
}

/// Connects without waiting for the listener: a full queue is an error.
fn connect_to(path: &Path, wait: &MayWait) -> io::Result<StdUnixStream> {
    let found = walk(path, wait)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    // Connect to the inspected file itself, even if the path was changed since.
    let address = SocketAddrUnix::new(format!("/proc/self/fd/{}", found.as_raw_fd()))?;
    connect(&socket, &address)?;
    Ok(socket.into())
}

/// Opens the file at a path, without access rights to its content.
fn walk(path: &Path, _: &MayWait) -> io::Result<OwnedFd> {
    let place = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let start = |path: &Path| {
        let start = if path.is_absolute() { "/" } else { "." };
        openat(CWD, start, place, Mode::empty())
    };
    let mut at = start(path)?;
    let mut left = parts(path);
    let mut links = 0;
    while let Some(part) = left.pop() {
        let next = openat(&at, &part, place, Mode::empty())?;
        let stat = fstat(&next)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::Symlink {
            at = next;
            continue;
        }
        links += 1;
        if links > LINKS_MAX {
            return Err(Errno::LOOP.into());
        }
        if ![0, geteuid().as_raw()].contains(&stat.st_uid) {
            let why = format!(
                "{} is a symbolic link of user {}, which is not followed; name the socket itself",
                Path::new(&part).display(),
                stat.st_uid
            );
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
        }
        let target = readlinkat(&next, "", vec![])?.into_bytes();
        let target = PathBuf::from(OsString::from_vec(target));
        if target.is_absolute() {
            at = start(&target)?;
        }
        left.extend(parts(&target));
    }
    Ok(at)
}

/// The components of a path, the first one last.
fn parts(path: &Path) -> Vec<OsString> {
    let names = path.components().rev().filter_map(|part| match part {
        Component::Normal(name) => Some(name.to_owned()),
        Component::ParentDir => Some("..".into()),
        _ => None,
    });
    names.collect()
}

/// Identity of the file at a path. Uses attributes cached by the kernel, without asking storage.
pub(crate) fn file_at(path: &Path, _: &MayWait) -> io::Result<FileId> {
    let found = statx(CWD, path, AtFlags::STATX_DONT_SYNC, StatxFlags::INO)?;
    Ok(FileId {
        device: libc::makedev(found.stx_dev_major, found.stx_dev_minor),
        inode: found.stx_ino,
    })
}

/// Owner of a path; a link itself is not followed.
pub(crate) fn owner_of(path: &Path, _: &MayWait) -> io::Result<u32> {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::STATX_DONT_SYNC;
    Ok(statx(CWD, path, flags, StatxFlags::UID)?.stx_uid)
}

/// Reads a file of another process, up to [`TEXT_BYTES_MAX`]. Invalid UTF-8, as in file names, is
/// replaced.
pub(crate) fn text_of(path: &Path, _: &MayWait) -> io::Result<String> {
    let mut bytes = vec![];
    let read = File::open(path)?.take(TEXT_BYTES_MAX + 1);
    { read }.read_to_end(&mut bytes)?;
    if bytes.len() as u64 > TEXT_BYTES_MAX {
        let why = format!("it is longer than {} MiB", TEXT_BYTES_MAX >> 20);
        return Err(io::Error::new(io::ErrorKind::InvalidData, why));
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// All entries of a folder; an error for more than `most`.
pub(crate) fn entries_of(path: &Path, most: usize, _: &MayWait) -> io::Result<Vec<PathBuf>> {
    let entries = fs::read_dir(path)?.take(most + 1);
    let entries: Vec<_> = entries
        .map(|entry| Ok(entry?.path()))
        .collect::<io::Result<_>>()?;
    if entries.len() > most {
        let why = format!("{} has more than {most} entries", path.display());
        return Err(io::Error::new(io::ErrorKind::InvalidData, why));
    }
    Ok(entries)
}

/// Target of a link in `/proc`; the target itself is not touched.
pub(crate) fn link_of(path: &Path, _: &MayWait) -> io::Result<PathBuf> {
    fs::read_link(path)
}

/// Opens a file.
pub(crate) fn open(path: &Path, writable: bool, _: &MayWait) -> io::Result<File> {
    File::options().read(true).write(writable).open(path)
}

#[cfg(test)]
mod tests;
