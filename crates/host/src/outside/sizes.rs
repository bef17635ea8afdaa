//! Watches the sizes of all VMs' memory files, on one thread.
//!
//! # Problem
//! A guest may touch memory that it returned, and nobody tells. So the files of each VM are read
//! twice a second. A thread for each reading costs far more than the reading itself: a thousand VMs
//! took a sixth of a CPU.
//!
//! # Approach
//! One thread reads the files of all VMs, one after the other, and wakes only the tasks of VMs whose
//! sizes have changed. A file may hang, so a second thread takes over the rest of the round after
//! `HANGS_AFTER`. The first one keeps its VM's slot (see [`Outside`]), so later rounds leave that VM
//! out.
//!
//! # Properties
//! - A VM whose files hang delays the others by `HANGS_AFTER`, once, and holds one thread.
//! - Each change of a size that lasts half a second reaches the VM's task.

use std::convert::Infallible;
use std::fmt;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use demeter_policy::TierBytes;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, timeout};

use super::{MayWait, Outside};

/// Interval between readings.
const READ_EVERY: Duration = Duration::from_millis(500);

/// Time after which another thread reads the rest; a round takes a few milliseconds.
const HANGS_AFTER: Duration = Duration::from_millis(100);

/// Reads the size of a VM's files.
pub type ReadSizes = Box<dyn Fn(&MayWait) -> io::Result<TierBytes> + Send + Sync>;

/// The watched files of all VMs. Clones share the list.
#[derive(Debug, Clone, Default)]
pub(crate) struct FileSizes(Arc<Mutex<Vec<Weak<Watched>>>>);

/// The watched files of one VM.
struct Watched {
    outside: Outside,
    read: ReadSizes,
    sizes: watch::Sender<TierBytes>,
    /// Whether the next reading counts as a change even if nothing has changed.
    is_asked: AtomicBool,
}

impl fmt::Debug for Watched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watched").finish_non_exhaustive()
    }
}

/// A VM's end of the watch. Dropping it ends the watch.
#[derive(Debug)]
pub(crate) struct SizeWatch {
    watched: Arc<Watched>,
    sizes: watch::Receiver<TierBytes>,
}

impl FileSizes {
    /// Watches a VM's files. `outside` is the VM's.
    pub(crate) fn watch(&self, outside: Outside, read: ReadSizes) -> SizeWatch {
        let (sender, sizes) = watch::channel(TierBytes::default());
        let watched = Arc::new(Watched {
            outside,
            read,
            sizes: sender,
            is_asked: AtomicBool::new(true),
        });
        self.list(|all| all.push(Arc::downgrade(&watched)));
        SizeWatch { watched, sizes }
    }

    /// Reads again and again, until cancelled.
    pub(crate) async fn run(self) -> Infallible {
        let mut due = interval(READ_EVERY);
        due.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            due.tick().await;
            let all = self.list(|all| {
                all.retain(|watched| watched.strong_count() > 0);
                all.clone()
            });
            if !all.is_empty() {
                read_all(all).await;
            }
        }
    }

    fn list<T>(&self, with: impl FnOnce(&mut Vec<Weak<Watched>>) -> T) -> T {
        with(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Reads all files once, except for those that hang.
async fn read_all(all: Vec<Weak<Watched>>) {
    let most = all.len();
    let round = Arc::new((all, AtomicUsize::new(0)));
    let mut threads = JoinSet::new();
    // Each thread may hang at one VM. A thread that reaches the end leaves nothing to read.
    for _ in 0..=most {
        let round = round.clone();
        threads.spawn_blocking(move || {
            let (all, next) = &*round;
            while let Some(watched) = all.get(next.fetch_add(1, Ordering::Relaxed)) {
                if let Some(watched) = watched.upgrade() {
                    watched.read(&MayWait(()));
                }
            }
        });
        if timeout(HANGS_AFTER, threads.join_next()).await.is_ok() {
            break;
        }
    }
    // Threads that hang end by themselves.
    threads.detach_all();
}

impl Watched {
    /// Reads the sizes and tells a change. A VM that waits for its files already is left out.
    fn read(&self, wait: &MayWait) {
        // Kept until the sizes are published, so that no punch comes between.
        let Ok(_turn) = self.outside.0.try_acquire() else {
            return;
        };
        let is_asked = self.is_asked.swap(false, Ordering::Relaxed);
        let Ok(sizes) = (self.read)(wait) else {
            // The next punch reports the error.
            self.is_asked.fetch_or(is_asked, Ordering::Relaxed);
            return;
        };
        self.sizes.send_if_modified(|known| {
            let before = std::mem::replace(known, sizes);
            is_asked || before != sizes
        });
    }
}

impl SizeWatch {
    /// Waits until the sizes change, or for the first reading after [`renew`](Self::renew).
    /// Cancel-safe.
    pub(crate) async fn changed(&mut self) -> TierBytes {
        // The sender is as old as this.
        let _ = self.sizes.changed().await;
        *self.sizes.borrow_and_update()
    }

    /// Forgets what was read so far, because the VM has changed since.
    pub(crate) fn renew(&mut self) {
        // In this order: a reading between the two is of the VM as it is now.
        self.sizes.mark_unchanged();
        self.watched.is_asked.store(true, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;
    use std::sync::mpsc;

    use demeter_policy::ByteCount;

    use super::*;

    fn fast(bytes: u64) -> TierBytes {
        TierBytes {
            fast: ByteCount(bytes),
            slow: ByteCount(0),
        }
    }

    async fn soon<T>(what: impl Future<Output = T>) -> T {
        timeout(Duration::from_secs(10), what).await.unwrap()
    }

    #[tokio::test]
    async fn a_change_is_told_once_and_a_vm_that_hangs_delays_no_other() {
        let sizes = FileSizes::default();
        let (go, hangs) = mpsc::channel::<()>();
        let hangs = Mutex::new(hangs);
        let mut hung = sizes.watch(
            Outside::default(),
            Box::new(move |_| {
                // An error once the test ends.
                let _ = hangs.lock().unwrap().recv();
                Ok(fast(1))
            }),
        );
        let bytes = Arc::new(AtomicU64::new(7));
        let now = bytes.clone();
        let mut well = sizes.watch(
            Outside::default(),
            Box::new(move |_| Ok(fast(now.load(Ordering::Relaxed)))),
        );
        let running = tokio::spawn(sizes.clone().run());
        assert_eq!(soon(well.changed()).await, fast(7));
        let quiet = timeout(READ_EVERY * 3, well.changed()).await;
        assert!(quiet.is_err(), "nothing has changed");
        bytes.store(8, Ordering::Relaxed);
        assert_eq!(soon(well.changed()).await, fast(8));
        well.renew();
        assert_eq!(soon(well.changed()).await, fast(8), "asked for");

        let waits = timeout(Duration::from_millis(1), hung.changed()).await;
        assert!(waits.is_err());
        go.send(()).unwrap();
        assert_eq!(soon(hung.changed()).await, fast(1));
        drop((go, hung, well));
        soon(async {
            while !sizes.list(|all| all.is_empty()) {
                tokio::time::sleep(READ_EVERY).await;
            }
        })
        .await;
        running.abort();
    }
}
