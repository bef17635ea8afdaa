//! The emulator's plugins: compiled once from the source that we carry, kept in the cache.

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;

use super::qemu::{self, Version};
use super::tool;
use crate::error::Error;

/// A file's name and text.
type File = (&'static str, &'static str);

/// The files of the plugin that slows memory down and takes samples; the first includes the rest.
const LAB: [File; 5] = [
    ("demeter_lab.c", include_str!("../../plugin/demeter_lab.c")),
    (
        "memory_model.h",
        include_str!("../../plugin/memory_model.h"),
    ),
    ("qemu_plugin.h", include_str!("../../plugin/qemu_plugin.h")),
    ("sample_ring.h", include_str!("../../plugin/sample_ring.h")),
    ("shared_page.h", include_str!("../../plugin/shared_page.h")),
];

/// The files of the plugin that records a program.
const TRACE: [File; 2] = [
    (
        "demeter_trace.c",
        include_str!("../../plugin/demeter_trace.c"),
    ),
    ("qemu_plugin.h", include_str!("../../plugin/qemu_plugin.h")),
];

/// The compiled plugin for a VM under the emulator `qemu`, which is there, new enough and loads it.
pub fn plugin(cache: &Path, qemu: &Path) -> Result<PathBuf, Error> {
    let version = qemu::check_version(qemu)?;
    let plugin = compiled(cache, &LAB, version)?;
    qemu::check_loads(qemu, &plugin)?;
    Ok(plugin)
}

/// The compiled plugin that records a program under the user-mode emulator `qemu`.
pub fn trace_plugin(cache: &Path, qemu: &Path) -> Result<PathBuf, Error> {
    compiled(cache, &TRACE, qemu::check_user_version(qemu)?)
}

/// The version of the plugin interface to build for an emulator: plugin/qemu_plugin.h has the
/// table.
fn api(qemu: Version) -> u32 {
    if qemu < Version(9, 0) { 1 } else { 2 }
}

/// The first of `files` compiled for an emulator, in `cache`; its name there changes with its
/// source and the interface.
fn compiled(cache: &Path, files: &[File], qemu: Version) -> Result<PathBuf, Error> {
    let define = format!("-DQEMU_PLUGIN_API={}", api(qemu));
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
