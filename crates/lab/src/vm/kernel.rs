//! The VM's kernel: a stock kernel from the distribution's package, stored in the cache.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{fs, io};

use super::{module, package, tool};
use crate::error::Error;

/// Accepted kernel series, best first. 6.12 assigns memory to tiers by HMAT and has DAMON's migrate_hot. 6.1 boots, but
/// `linux` and `damon` report missing features.
const SERIES: [&str; 2] = [r"6\.12", r"6\.1"];

/// Suffix of Debian's kernel names for virtual machines, for this architecture.
const ENDING: &str = if cfg!(target_arch = "aarch64") {
    "-cloud-arm64"
} else {
    "-cloud-amd64"
};

/// Drivers that a VM needs for any output, in dependency order. Most kernels have them built in.
const EARLY: [&str; 6] = [
    "drivers/virtio/virtio",
    "drivers/virtio/virtio_ring",
    "drivers/virtio/virtio_pci_modern_dev",
    "drivers/virtio/virtio_pci_legacy_dev",
    "drivers/virtio/virtio_pci",
    "drivers/char/virtio_console",
];

const HINT: &str = "run `apt-get update`, or set DEMETER_KERNEL to the vmlinuz of a kernel with \
                    virtio-pci and virtio-console built in, or beside its modules";

/// The newest kernel in `cache`; an empty cache is filled from the package archive.
pub fn kernel(cache: &Path) -> Result<PathBuf, Error> {
    match newest_cached(cache)? {
        Some(kernel) => Ok(kernel),
        None => fetch(cache),
    }
}

fn newest_cached(cache: &Path) -> Result<Option<PathBuf>, Error> {
    let mut newest: Option<String> = None;
    for entry in fs::read_dir(cache).map_err(Error::io("list", cache))? {
        let name = entry.map_err(Error::io("list", cache))?.file_name();
        let is_ours = |name: &&str| name.starts_with("vmlinuz-") && name.ends_with(ENDING);
        let Some(name) = name.to_str().filter(is_ours) else {
            continue;
        };
        if newest
            .as_deref()
            .is_none_or(|other| version(other) < version(name))
        {
            newest = Some(name.to_owned());
        }
    }
    Ok(newest.map(|name| cache.join(name)))
}

/// Downloads and unpacks the newest package; the file appears in `cache` complete or not at all.
fn fetch(cache: &Path) -> Result<PathBuf, Error> {
    let unpacked = unpack(cache, &newest_package()?)?;
    let image = file_in(&unpacked.path().join("boot"), "vmlinuz-")?;
    let kept = cache.join(image.file_name().unwrap_or_default());
    early_modules(cache, &image)?;
    fs::rename(&image, &kept).map_err(Error::io("create", &kept))?;
    Ok(kept)
}

/// Modules of the kernel in `image`. They come from `cache`, from beside the image, or from the package archive. Names
/// are paths below `kernel` without suffix, such as `drivers/virtio/virtio_mem`.
pub fn modules<const N: usize>(
    cache: &Path,
    image: &Path,
    paths: [&str; N],
) -> Result<[PathBuf; N], Error> {
    let release = module::release(image)?;
    let kept = paths.map(|path| kept(cache, path, &release));
    if kept.iter().all(|kept| kept.exists()) {
        return Ok(kept);
    }
    let (dir, _unpacked) = match modules_beside(image, &release) {
        Some(dir) => (dir, None),
        None => {
            let unpacked = unpack(cache, &format!("linux-image-{release}"))?;
            (modules_dir(unpacked.path(), &release), Some(unpacked))
        }
    };
    for (path, kept) in paths.iter().zip(&kept) {
        keep_module(&dir.join(path), kept)?;
    }
    Ok(kept)
}

/// Modules of [`EARLY`] that the kernel in `image` has as files.
pub fn early_modules(cache: &Path, image: &Path) -> Result<Vec<PathBuf>, Error> {
    // Only x86 images contain their release; Arm's kernels have these drivers built in.
    let Ok(release) = module::release(image) else {
        return Ok(vec![]);
    };
    let dir = modules_beside(image, &release);
    let mut found = vec![];
    for path in EARLY {
        let kept = kept(cache, path, &release);
        if !kept.exists() {
            let Some(module) = dir.as_ref().map(|dir| dir.join(path)) else {
                continue;
            };
            if packed(&module).is_err() {
                continue;
            }
            keep_module(&module, &kept)?;
        }
        found.push(kept);
    }
    Ok(found)
}

/// Path of a module in the cache.
fn kept(cache: &Path, path: &str, release: &str) -> PathBuf {
    let name = path.rsplit('/').next().unwrap_or(path);
    cache.join(format!("{name}-{release}.ko"))
}

/// The module folder of an unpacked or installed package. Since Linux 7.1, modules lie beside the image.
fn modules_beside(image: &Path, release: &str) -> Option<PathBuf> {
    let folder = image.parent()?;
    let beside = folder.join("kernel");
    let dirs = [beside, modules_dir(folder.parent()?, release)];
    dirs.into_iter().find(|dir| dir.is_dir())
}

/// The module folder of an unpacked kernel package: below /usr since Debian 13.
fn modules_dir(unpacked: &Path, release: &str) -> PathBuf {
    let below_usr = unpacked.join(format!("usr/lib/modules/{release}/kernel"));
    match below_usr.is_dir() {
        true => below_usr,
        false => unpacked.join(format!("lib/modules/{release}/kernel")),
    }
}

/// The file of a module, given without suffix.
fn packed(module: &Path) -> Result<PathBuf, Error> {
    let name = module.file_name().unwrap_or_default().to_string_lossy();
    file_in(module.parent().unwrap_or(module), &format!("{name}.ko"))
}

/// Copies a module to the cache, decompressing it if needed; it appears complete or not at all.
fn keep_module(module: &Path, kept: &Path) -> Result<(), Error> {
    let from = packed(module)?;
    let folder = kept.parent().unwrap_or(kept);
    let new =
        tempfile::NamedTempFile::new_in(folder).map_err(Error::io("create a file in", folder))?;
    let copied = match from.extension().is_some_and(|ext| ext == "xz") {
        true => {
            let out = new.reopen().map_err(Error::io("open", new.path()))?;
            let mut xz = Command::new("xz");
            xz.args(["--decompress", "--stdout"]).arg(&from).stdout(out);
            xz.status().and_then(|status| match status.success() {
                true => Ok(()),
                false => Err(io::Error::other(format!(
                    "xz: {status}; apt-get install xz-utils"
                ))),
            })
        }
        false => fs::copy(&from, new.path()).map(drop),
    };
    copied.map_err(Error::io("unpack", &from))?;
    new.persist(kept)
        .map(drop)
        .map_err(|error| Error::io("create", kept)(error.error))
}

fn unpack(cache: &Path, package: &str) -> Result<tempfile::TempDir, Error> {
    tracing::info!(
        "downloading {package} once; the required files are kept in {}",
        cache.display()
    );
    let unpacked = tempfile::tempdir_in(cache).map_err(Error::io("create a folder in", cache))?;
    package::unpack(&[package], unpacked.path(), HINT)?;
    Ok(unpacked)
}

fn newest_package() -> Result<String, Error> {
    for series in SERIES {
        let names = format!(r"^linux-image-{series}\.[0-9.+a-z~-]*{ENDING}$");
        let found = tool::output(
            Command::new("apt-cache").args(["search", "--names-only", &names]),
            "the lab takes its kernel from Debian; elsewhere set DEMETER_KERNEL to a vmlinuz",
        )?;
        let names = found
            .lines()
            .filter_map(|line| line.split_whitespace().next());
        if let Some(newest) = names.max_by_key(|name| version(name)) {
            return Ok(newest.to_owned());
        }
    }
    Err(Error::Missing {
        what: format!("the package lists name no linux-image-6.12.*{ENDING}"),
        hint: HINT.into(),
    })
}

fn file_in(dir: &Path, start: &str) -> Result<PathBuf, Error> {
    let entries = fs::read_dir(dir).map_err(Error::io("list", dir))?;
    entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .find(|path| {
            path.is_file()
                && path
                    .file_name()
                    .is_some_and(|name| name.to_string_lossy().starts_with(start))
        })
        .ok_or_else(|| Error::Missing {
            what: format!("the kernel's package holds no {start}* file"),
            hint: HINT.into(),
        })
}

/// The numbers in a name, in order: 6.12.117 is newer than 6.12.99.
fn version(name: &str) -> Vec<u64> {
    name.split(|c: char| !c.is_ascii_digit())
        .filter_map(|digits| digits.parse().ok())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_are_found_as_each_debian_lays_them_out() {
        for lib in ["lib", "usr/lib"] {
            let unpacked = tempfile::tempdir().unwrap();
            let dir = format!("{lib}/modules/6.12.1-cloud-amd64/kernel/virt/lib");
            let dir = unpacked.path().join(dir);
            fs::create_dir_all(&dir).unwrap();
            fs::write(dir.join("irqbypass.ko"), "module").unwrap();
            let image = unpacked.path().join("boot/vmlinuz-6.12.1-cloud-amd64");
            let found = modules_beside(&image, "6.12.1-cloud-amd64").unwrap();
            let kept = unpacked.path().join("kept.ko");
            keep_module(&found.join("virt/lib/irqbypass"), &kept).unwrap();
            assert_eq!(fs::read_to_string(kept).unwrap(), "module");
            // The package keeps its own copy.
            assert!(dir.join("irqbypass.ko").exists());
            let newer = found.parent().unwrap().join("vmlinuz");
            assert_eq!(modules_beside(&newer, "6.12.1-cloud-amd64"), Some(found));
        }
    }

    #[test]
    fn the_newest_cached_kernel_wins_by_number() {
        let cache = tempfile::tempdir().unwrap();
        assert_eq!(newest_cached(cache.path()).unwrap(), None);
        let kernel = |version: &str| format!("vmlinuz-{version}{ENDING}");
        for name in [
            kernel("6.12.99+deb12"),
            kernel("6.12.117+deb12"),
            kernel("6.1.0-50"),
            "vmlinuz-6.18.1-of-another-architecture".into(),
            "plugin-1.so".into(),
        ] {
            fs::write(cache.path().join(name), "").unwrap();
        }
        let newest = newest_cached(cache.path()).unwrap().unwrap();
        assert!(newest.ends_with(kernel("6.12.117+deb12")), "{newest:?}");
    }
}
