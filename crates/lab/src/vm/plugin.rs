//! The emulator's plugins, compiled once from included source and cached.

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;

use super::qemu_check;
use super::tool;
use crate::error::Error;

/// A file's name and content.
type File = (&'static str, &'static str);

/// Files of the plugin that delays memory and takes samples; the first includes the others.
const LAB: [File; 6] = [
    ("demeter_lab.c", include_str!("../../plugin/demeter_lab.c")),
    (
        "memory_model.h",
        include_str!("../../plugin/memory_model.h"),
    ),
    ("qemu_plugin.h", include_str!("../../plugin/qemu_plugin.h")),
    ("sample_ring.h", include_str!("../../plugin/sample_ring.h")),
    ("shared_page.h", include_str!("../../plugin/shared_page.h")),
    ("tlb_model.h", include_str!("../../plugin/tlb_model.h")),
];

/// Files of the plugin that records a program.
const TRACE: [File; 2] = [
    (
        "demeter_trace.c",
        include_str!("../../plugin/demeter_trace.c"),
    ),
    ("qemu_plugin.h", include_str!("../../plugin/qemu_plugin.h")),
];

/// Plugin interface versions that our sources support, newest first: plugin/qemu_plugin.h has the table.
const APIS: [u32; 3] = [7, 2, 1];

/// The compiled plugin for VMs, checked with the emulator `qemu`.
pub fn plugin(cache: &Path, qemu: &Path) -> Result<PathBuf, Error> {
    qemu_check::check_version(qemu)?;
    loaded(cache, &LAB, |plugin| qemu_check::check_loads(qemu, plugin))
}

/// The compiled plugin that records a program under the user-mode emulator `qemu`.
pub fn trace_plugin(cache: &Path, qemu: &Path) -> Result<PathBuf, Error> {
    qemu_check::check_user_version(qemu)?;
    loaded(cache, &TRACE, |plugin| {
        qemu_check::check_user_loads(qemu, plugin)
    })
}

/// Compiles the first of `files` for the newest interface that the emulator loads. Only a trial tells: an emulator
/// reports its versions to a loaded plugin only.
fn loaded(
    cache: &Path,
    files: &[File],
    loads: impl Fn(&Path) -> Result<(), Error>,
) -> Result<PathBuf, Error> {
    let mut refused = None;
    for api in APIS {
        let plugin = compiled(cache, files, api)?;
        match loads(&plugin) {
            Ok(()) => return Ok(plugin),
            // The first error names the interface versions of a newer emulator.
            Err(error) => refused = refused.or(Some(error)),
        }
    }
    Err(refused.expect("there are versions"))
}

/// Compiles the first of `files` for one interface version, in `cache`. The file name depends on the source and the
/// version.
fn compiled(cache: &Path, files: &[File], api: u32) -> Result<PathBuf, Error> {
    let define = format!("-DQEMU_PLUGIN_API={api}");
    let mut hasher = DefaultHasher::new();
    (files, &define).hash(&mut hasher);
    fs::create_dir_all(cache).map_err(Error::io("create", cache))?;
    let kept = cache.join(format!("plugin-{:016x}.so", hasher.finish()));
    if kept.exists() {
        return Ok(kept);
    }
    let work = tempfile::tempdir_in(cache).map_err(Error::io("create a folder in", cache))?;
    for (name, text) in files {
        let path = work.path().join(name);
        fs::write(&path, text).map_err(Error::io("write", &path))?;
    }
    let built = work.path().join("plugin.so");
    tool::output(
        Command::new("cc")
            .args(["-std=gnu11", "-O2", "-shared", "-fPIC", &define, "-o"])
            .arg(&built)
            .arg(work.path().join(files[0].0)),
        "the emulator's plugin needs a C compiler: apt-get install gcc libc6-dev",
    )?;
    fs::rename(&built, &kept).map_err(Error::io("create", &kept))?;
    Ok(kept)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_emulator_gets_the_plugin_that_it_speaks() {
        let cache = tempfile::tempdir().unwrap();
        let of = |api| compiled(cache.path(), &TRACE, api).unwrap();
        let refuse = |plugin: &Path| Error::Missing {
            what: plugin.display().to_string(),
            hint: String::new(),
        };
        for api in APIS {
            let found = loaded(cache.path(), &TRACE, |plugin| match plugin == of(api) {
                true => Ok(()),
                false => Err(refuse(plugin)),
            });
            assert_eq!(found.unwrap(), of(api));
        }
        let none = loaded(cache.path(), &TRACE, |plugin| Err(refuse(plugin)));
        let newest = of(APIS[0]).display().to_string();
        assert!(none.unwrap_err().to_string().contains(&newest));
    }
}
