//! The state file: desired sizes, committed memory and hostile marks that survive the controller.
//!
//! # Approach
//! It is one small JSON file. A save writes a new file beside it, flushes it, renames it over the
//! old one and flushes the directory. After a crash at any point there is either the old or the new
//! file.
//!
//! Committed memory is saved before any command that relies on it is sent. So a controller that
//! restarts after a kill counts at least what each VM may have.
//!
//! A damaged file is refused, never repaired: a guess could commit memory twice.

use std::collections::BTreeMap;
use std::fs::{self, File, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use demeter_linux::lock::LockedFile;
use demeter_policy::provision::Policy;
use demeter_policy::{ByteCount, TierBytes};
use demeter_proto::shown;
use serde::{Deserialize, Serialize};

use crate::config::Settings;
use crate::controller::Account;
use crate::{PoolName, VmName};

/// Version of the file format. It has the pools of discovered VMs.
const VERSION: u32 = 3;

/// The version without pools. The oldest version that can hold the contents is written, so that an
/// older release can read the file.
const VERSION_SETTINGS: u32 = 2;

/// The version without pools and settings.
const VERSION_PLAIN: u32 = 1;

/// Maximum length of the file; ten thousand VMs need less.
const FILE_BYTES_MAX: u64 = 4 << 20;

/// Contents of the state file.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Ledger {
    /// The policy chosen over the API; `None` leaves it to the configuration.
    pub policy: Option<Policy>,
    /// The account of each VM.
    pub accounts: BTreeMap<VmName, Account>,
    /// The reason for each hostile mark. Each marked VM has an account.
    pub marks: BTreeMap<VmName, String>,
    /// Settings of VMs that were made over the API.
    pub settings: Settings,
    /// The pool of each discovered VM, on a host with several pools. The configuration does not name
    /// it, and memory must count in it before libvirt answers.
    pub pools: BTreeMap<VmName, PoolName>,
}

/// Reason why the file cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The system returned an error.
    #[error("cannot {action} {path}: {source}")]
    Io {
        /// Read or write.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The file is not a valid state.
    #[error(
        "{path} is damaged ({reason}); if no VM of this host runs, remove it, otherwise restore it: \
         it says how much memory the VMs may have"
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The damage.
        reason: String,
    },
    /// Another controller uses the file.
    #[error(
        "{path} is another controller's; stop that one, or give this one another socket and another \
         state"
    )]
    Taken {
        /// The file.
        path: PathBuf,
    },
    /// The file has another version.
    #[error(
        "{path} has version {found}, this demeter reads {VERSION_PLAIN} to {VERSION}; start the demeter that wrote \
         it"
    )]
    Version {
        /// The file.
        path: PathBuf,
        /// Its version.
        found: u32,
    },
}

/// An open state file. No other controller can open it while a clone exists.
#[derive(Debug, Clone)]
pub struct Store {
    path: PathBuf,
    /// Lock on a separate file, because saving replaces the state file.
    _lock: Arc<LockedFile>,
}

impl Store {
    /// Opens the file at `path` and reads it. A missing file is empty.
    pub fn open(path: &Path) -> Result<(Self, Ledger), StoreError> {
        let store = Self {
            path: path.into(),
            _lock: Arc::new(lock(path)?),
        };
        let text = match read_bounded(path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Ok((store, Ledger::default()));
            }
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                return Err(store.damaged(error));
            }
            Err(error) => return Err(store.io("read", error)),
        };
        // Check the version before parsing the rest.
        let Version { version } = serde_json::from_str(&text).map_err(|e| store.damaged(e))?;
        if !(VERSION_PLAIN..=VERSION).contains(&version) {
            return Err(StoreError::Version {
                path: path.into(),
                found: version,
            });
        }
        let file: FileText = serde_json::from_str(&text).map_err(|e| store.damaged(e))?;
        Ok((store, file.ledger()))
    }

    /// Replaces the file. After the call, `ledger` survives a crash of the machine.
    pub fn save(&self, ledger: &Ledger) -> Result<(), StoreError> {
        self.replace(&FileText::from(ledger))
            .map_err(|error| self.io("write", error))
    }

    fn replace(&self, file: &FileText) -> io::Result<()> {
        let dir = match self.path.parent() {
            Some(dir) if !dir.as_os_str().is_empty() => dir,
            _ => Path::new("."),
        };
        fs::create_dir_all(dir)?;
        let new = self.path.with_extension("new");
        let mut out = File::create(&new)?;
        serde_json::to_writer_pretty(&mut out, file)?;
        out.write_all(b"\n")?;
        out.sync_all()?;
        fs::rename(&new, &self.path)?;
        File::open(dir)?.sync_all()
    }

    fn io(&self, action: &'static str, source: io::Error) -> StoreError {
        StoreError::Io {
            action,
            path: self.path.clone(),
            source,
        }
    }

    fn damaged(&self, reason: impl ToString) -> StoreError {
        StoreError::Damaged {
            path: self.path.clone(),
            reason: reason.to_string(),
        }
    }
}

/// Locks the file for this process until the result is dropped.
fn lock(path: &Path) -> Result<LockedFile, StoreError> {
    let beside = path.with_extension("lock");
    let error = |source| StoreError::Io {
        action: "lock",
        path: beside.clone(),
        source,
    };
    if let Some(folder) = path.parent().filter(|of| !of.as_os_str().is_empty()) {
        fs::create_dir_all(folder).map_err(error)?;
    }
    let mut options = File::options();
    let file = options.write(true).create(true).truncate(false);
    let file = file.open(&beside).map_err(error)?;
    LockedFile::try_new(file).map_err(|refused| match refused {
        TryLockError::WouldBlock => StoreError::Taken { path: path.into() },
        TryLockError::Error(source) => error(source),
    })
}

fn read_bounded(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    io::Read::read_to_string(
        &mut io::Read::take(File::open(path)?, FILE_BYTES_MAX + 1),
        &mut text,
    )?;
    if text.len() as u64 > FILE_BYTES_MAX {
        let reason = format!("it is longer than {FILE_BYTES_MAX} bytes");
        return Err(io::Error::new(io::ErrorKind::InvalidData, reason));
    }
    Ok(text)
}

#[derive(Deserialize)]
struct Version {
    version: u32,
}

/// The file's fields.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct FileText {
    version: u32,
    policy: Option<Policy>,
    vms: BTreeMap<VmName, AccountText>,
    /// Since version 2.
    #[serde(default, skip_serializing_if = "Settings::is_empty")]
    settings: Settings,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct AccountText {
    desired_fast_bytes: u64,
    desired_slow_bytes: u64,
    /// Former name: `counted`.
    #[serde(alias = "counted_fast_bytes")]
    committed_fast_bytes: u64,
    /// Former name: `counted`.
    #[serde(alias = "counted_slow_bytes")]
    committed_slow_bytes: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    marked: Option<String>,
    /// Since version 3.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pool: Option<PoolName>,
}

impl From<&Ledger> for FileText {
    fn from(ledger: &Ledger) -> Self {
        let account = |(name, account): (&VmName, &Account)| {
            let text = AccountText {
                desired_fast_bytes: account.desired.fast.0,
                desired_slow_bytes: account.desired.slow.0,
                committed_fast_bytes: account.committed.fast.0,
                committed_slow_bytes: account.committed.slow.0,
                marked: ledger.marks.get(name).cloned(),
                pool: ledger.pools.get(name).cloned(),
            };
            (name.clone(), text)
        };
        Self {
            version: match (ledger.pools.is_empty(), ledger.settings.is_empty()) {
                (true, true) => VERSION_PLAIN,
                (true, false) => VERSION_SETTINGS,
                (false, _) => VERSION,
            },
            policy: ledger.policy,
            vms: ledger.accounts.iter().map(account).collect(),
            settings: ledger.settings.clone(),
        }
    }
}

impl FileText {
    fn ledger(mut self) -> Ledger {
        let marks = self.vms.iter_mut();
        let marks = marks.filter_map(|(name, text)| {
            // A person may have edited the text.
            Some((name.clone(), shown(&text.marked.take()?)))
        });
        let marks = marks.collect();
        let pools = self.vms.iter_mut();
        let pools = pools.filter_map(|(name, text)| Some((name.clone(), text.pool.take()?)));
        let pools = pools.collect();
        let account = |(name, text): (VmName, AccountText)| {
            let account = Account {
                desired: TierBytes {
                    fast: ByteCount(text.desired_fast_bytes),
                    slow: ByteCount(text.desired_slow_bytes),
                },
                committed: TierBytes {
                    fast: ByteCount(text.committed_fast_bytes),
                    slow: ByteCount(text.committed_slow_bytes),
                },
            };
            (name, account)
        };
        Ledger {
            policy: self.policy,
            accounts: self.vms.into_iter().map(account).collect(),
            marks,
            settings: self.settings,
            pools,
        }
    }
}

#[cfg(test)]
mod tests;
