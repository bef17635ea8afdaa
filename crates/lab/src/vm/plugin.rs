//! The emulator's plugins: compiled once from the source that we carry, kept in the cache.

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;

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
    (
        "qemu_plugin_v1.h",
        include_str!("../../plugin/qemu_plugin_v1.h"),
    ),
    ("sample_ring.h", include_str!("../../plugin/sample_ring.h")),
    ("shared_page.h", include_str!("../../plugin/shared_page.h")),
];

/// The files of the plugin that records a program.
const TRACE: [File; 2] = [
    (
        "demeter_trace.c",
        include_str!("../../plugin/demeter_trace.c"),
    ),
    (
        "qemu_plugin_v1.h",
        include_str!("../../plugin/qemu_plugin_v1.h"),
    ),
];

/// The compiled plugin for a VM.
pub fn plugin(cache: &Path) -> Result<PathBuf, Error> {
    compiled(cache, &LAB)
}

/// The compiled plugin that records a program.
pub fn trace_plugin(cache: &Path) -> Result<PathBuf, Error> {
    compiled(cache, &TRACE)
}

/// The first of `files` compiled, in `cache`; its name there changes with its source.
fn compiled(cache: &Path, files: &[File]) -> Result<PathBuf, Error> {
    let mut hasher = DefaultHasher::new();
    files.hash(&mut hasher);
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
            .args(["-std=gnu11", "-O2", "-shared", "-fPIC", "-o"])
            .arg(&built)
            .arg(work.path().join(files[0].0)),
        "the emulator's plugin needs a C compiler: apt-get install gcc libc6-dev",
    )?;
    fs::rename(&built, &kept).map_err(Error::io("create", &kept))?;
    Ok(kept)
}
