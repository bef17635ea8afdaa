//! Files, sockets and processes of others: the one place where the controller waits for them.
//!
//! # Problem
//! A VM's owner decides what its descriptors, its sockets and its memory lie on. A `stat` of a file on hung
//! storage, a path lookup or a read of `/proc/PID/maps` may wait as long as that owner likes. On a worker
//! of the runtime it would stop all VMs and the API with it.
//!
//! # Approach
//! All functions that may wait take a [`MayWait`]. Only [`Outside::ask`] makes one, on a thread made for
//! waiting, and whoever asks stops waiting after [`LIMIT`]. Each VM has an `Outside` with a single turn,
//! so that a VM whose storage hangs holds one thread, however often it is tried again.
//!
//! A test of this module reads this crate's sources: no other module opens or looks at files, but for
//! those that read what is the controller's own.

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

use crate::memory::FileId;

/// How long anybody waits for others' files.
pub(crate) const LIMIT: Duration = Duration::from_secs(3);

/// The most symbolic links in a path, as Linux has it.
const LINKS_MAX: usize = 40;

/// The longest text that is read of a process: its mappings take at most a third of it.
const TEXT_BYTES_MAX: u64 = 32 << 20;

/// Shows that the thread may wait: it is none of the runtime's workers.
#[derive(Debug)]
pub struct MayWait(());

impl MayWait {
    /// For tests, whose thread may wait.
    #[cfg(test)]
    pub(crate) fn in_a_test() -> Self {
        Self(())
    }
}

/// One VM's way to what is not ours. Clones share its single turn.
#[derive(Debug, Clone)]
pub struct Outside(Arc<Semaphore>);

impl Default for Outside {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(1)))
    }
}

/// Somebody else's files do not answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "{what}: no answer within {limit:?}; does the VM's storage hang? Only this VM waits, and it is tried \
     again"
)]
pub struct Stuck {
    /// The action.
    what: &'static str,
    /// How long we waited.
    limit: Duration,
}

impl From<Stuck> for io::Error {
    fn from(stuck: Stuck) -> Self {
        Self::new(io::ErrorKind::TimedOut, stuck)
    }
}

impl Outside {
    /// Has something done on a thread that may wait, and waits for it, no longer than [`LIMIT`]. The
    /// action itself goes on; until it has ended nothing else of this VM begins.
    pub(crate) async fn ask<T: Send + 'static>(
        &self,
        what: &'static str,
        work: impl FnOnce(&MayWait) -> T + Send + 'static,
    ) -> Result<T, Stuck> {
        self.ask_within(LIMIT, what, work).await
    }

    /// The same for what may take longer.
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
            // The runtime ends, and with it all that could come of it.
            Ok(Err(_)) | Err(_) => Err(Stuck { what, limit }),
        }
    }

    /// Connects to a Unix socket. Symbolic links on the way are followed only where root or this process's
    /// user made them: a VM's owner could lead us to another VM.
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
    // The very file that was looked at, whatever lies at the path by now.
    let address = SocketAddrUnix::new(format!("/proc/self/fd/{}", found.as_raw_fd()))?;
    connect(&socket, &address)?;
    Ok(socket.into())
}

/// Opens what lies at a path, without any right to it.
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

/// The names of a path, the first one last.
fn parts(path: &Path) -> Vec<OsString> {
    let names = path.components().rev().filter_map(|part| match part {
        Component::Normal(name) => Some(name.to_owned()),
        Component::ParentDir => Some("..".into()),
        _ => None,
    });
    names.collect()
}

/// Which file lies at a path. Storage is not asked where the kernel knows it.
pub(crate) fn file_at(path: &Path, _: &MayWait) -> io::Result<FileId> {
    let found = statx(CWD, path, AtFlags::STATX_DONT_SYNC, StatxFlags::INO)?;
    Ok(FileId {
        device: libc::makedev(found.stx_dev_major, found.stx_dev_minor),
        inode: found.stx_ino,
    })
}

/// The user that a path belongs to; a link itself is not followed.
pub(crate) fn owner_of(path: &Path, _: &MayWait) -> io::Result<u32> {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::STATX_DONT_SYNC;
    Ok(statx(CWD, path, flags, StatxFlags::UID)?.stx_uid)
}

/// Reads a file of another process, as far as [`TEXT_BYTES_MAX`]. Files may be called anything, so that
/// what is no text becomes marks.
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

/// All entries of a folder; an error where there are more than `most`.
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

/// Where a link of `/proc` leads; what lies there is not touched.
pub(crate) fn link_of(path: &Path, _: &MayWait) -> io::Result<PathBuf> {
    fs::read_link(path)
}

/// Opens a file.
pub(crate) fn open(path: &Path, writable: bool, _: &MayWait) -> io::Result<File> {
    File::options().read(true).write(writable).open(path)
}

#[cfg(test)]
mod tests;
