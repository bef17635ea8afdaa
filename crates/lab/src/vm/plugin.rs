//! The emulator's plugin: compiled once from the source that we carry, kept in the cache.

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;

use super::tool;
use crate::error::Error;

/// What is compiled; it includes the headers.
const SOURCE: &str = "demeter_lab.c";

/// Every file of the plugin, by its name.
const FILES: [(&str, &str); 5] = [
    (SOURCE, include_str!("../../plugin/demeter_lab.c")),
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

/// The compiled plugin in `cache`; its name changes with its source.
pub fn plugin(cache: &Path) -> Result<PathBuf, Error> {
    let mut hasher = DefaultHasher::new();
    FILES.hash(&mut hasher);
    let kept = cache.join(format!("plugin-{:016x}.so", hasher.finish()));
    if kept.exists() {
        return Ok(kept);
    }
    let work = tempfile::tempdir_in(cache).map_err(Error::io("create a folder in", cache))?;
    for (name, text) in FILES {
        let path = work.path().join(name);
        fs::write(&path, text).map_err(Error::io("write", &path))?;
    }
    let built = work.path().join("plugin.so");
    tool::output(
        Command::new("cc")
            .args(["-std=gnu11", "-O2", "-shared", "-fPIC", "-o"])
            .arg(&built)
            .arg(work.path().join(SOURCE)),
        "the lab's plugin needs a C compiler: apt-get install gcc libc6-dev",
    )?;
    fs::rename(&built, &kept).map_err(Error::io("create", &kept))?;
    Ok(kept)
}
