//! Kernel settings that are restored after a run.

use std::fs;
use std::path::{Path, PathBuf};

use crate::inside::kernel;

/// Saved settings; dropping this restores them.
#[derive(Debug)]
pub struct Lent {
    before: Vec<(PathBuf, String)>,
}

impl Lent {
    /// Saves the settings below `root`. Settings that this kernel lacks are skipped.
    pub fn new(root: &Path) -> Self {
        let read = |file: &&str| {
            let path = root.join(file);
            let text = fs::read_to_string(&path).ok()?;
            Some((path, chosen(&text).to_owned()))
        };
        Self {
            before: kernel::SETTINGS.iter().filter_map(read).collect(),
        }
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        for (path, value) in &self.before {
            if let Err(error) = fs::write(path, value) {
                tracing::error!("cannot restore {} to {value}: {error}", path.display());
            }
        }
    }
}

/// The current value of a setting: the word in brackets if the kernel lists all values.
fn chosen(text: &str) -> &str {
    let in_brackets = || text.split_once('[')?.1.split_once(']');
    in_brackets().map_or(text.trim(), |(word, _)| word)
}

#[cfg(test)]
mod tests {
    use demeter_scenario::Thp;

    use super::*;

    #[test]
    fn settings_are_as_before_after_an_end_and_after_a_panic() {
        let root = tempfile::tempdir().unwrap();
        let before = ["1\n", "false\n", "always [madvise] never\n"];
        let put = || {
            for (file, text) in kernel::SETTINGS.iter().zip(before) {
                let path = root.path().join(file);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, text).unwrap();
            }
        };
        let now =
            || kernel::SETTINGS.map(|file| fs::read_to_string(root.path().join(file)).unwrap());
        for panics in [false, true] {
            put();
            let run = std::panic::catch_unwind(|| {
                let _lent = Lent::new(root.path());
                kernel::prepare(root.path(), Thp::Never).unwrap();
                kernel::set_tiering(root.path(), true).unwrap();
                assert_eq!(now(), ["2", "1", "never"]);
                assert!(!panics, "a panic on the way");
            });
            assert_eq!(run.is_err(), panics);
            assert_eq!(now(), ["1", "false", "madvise"]);
        }
    }

    #[test]
    fn a_setting_that_is_not_there_is_not_made() {
        let root = tempfile::tempdir().unwrap();
        drop(Lent::new(root.path()));
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0);
    }
}
