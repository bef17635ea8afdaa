//! The balloon driver, built for a VM's kernel from included source and the kernel's headers, and cached.

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;

use super::package;
use super::tool;
use crate::error::Error;

macro_rules! source {
    ($name:literal) => {
        (
            $name,
            include_str!(concat!("../../../../kernel/demeter_balloon/", $name)),
        )
    };
}

/// Source files of the module, by name.
const FILES: [(&str, &str); 7] = [
    source!("Makefile"),
    source!("balloon.h"),
    source!("calls.c"),
    source!("demeter_balloon.h"),
    source!("device.c"),
    source!("held.c"),
    source!("stats.c"),
];

const BUILT: &str = "demeter_balloon.ko";

/// Folder of headers in Debian's packages.
const SOURCES: &str = "usr/src";

const HINT: &str = "a module needs make, a C compiler and the kernel's headers: apt-get install \
                    make gcc, then apt-get update; or set DEMETER_KERNEL to a kernel whose \
                    headers are installed";

/// The module for the kernel in the image `kernel`. Its name in `cache` depends on its source and the kernel's release.
pub fn module(cache: &Path, kernel: &Path) -> Result<PathBuf, Error> {
    let release = release(kernel)?;
    let mut hasher = DefaultHasher::new();
    FILES.hash(&mut hasher);
    let kept = cache.join(format!("balloon-{release}-{:016x}.ko", hasher.finish()));
    if kept.exists() {
        return Ok(kept);
    }
    let headers = headers(cache, &release)?;
    let work = tempfile::tempdir_in(cache).map_err(Error::io("create a folder in", cache))?;
    let mut make = make_in(work.path(), &headers)?;
    tool::output(&mut make, HINT)?;
    fs::rename(work.path().join(BUILT), &kept).map_err(Error::io("create", &kept))?;
    Ok(kept)
}

/// The build command of the module in `folder`, which gets its source.
fn make_in(folder: &Path, headers: &Path) -> Result<Command, Error> {
    for (name, text) in FILES {
        let path = folder.join(name);
        fs::write(&path, text).map_err(Error::io("write", &path))?;
    }
    let mut make = Command::new("make");
    make.arg(format!("KDIR={}", headers.display()));
    make.current_dir(folder);
    Ok(make)
}

/// The release (`uname -r`) in the header of a kernel image (Documentation/arch/x86/boot.rst: `kernel_version`).
pub fn release(kernel: &Path) -> Result<String, Error> {
    const POINTER: usize = 0x20e;
    const BASE: usize = 0x200;
    let image = fs::read(kernel).map_err(Error::io("read", kernel))?;
    let find = || {
        let pointer: [u8; 2] = image.get(POINTER..POINTER + 2)?.try_into().ok()?;
        let text = image.get(usize::from(u16::from_le_bytes(pointer)) + BASE..)?;
        let end = text.iter().take(128).position(|&c| c == b' ' || c == 0)?;
        let release = std::str::from_utf8(&text[..end]).ok()?;
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "+-._~".contains(c);
        (!release.is_empty() && release.chars().all(is_plain)).then(|| release.to_owned())
    };
    find().ok_or_else(|| Error::Missing {
        what: format!("{} does not contain its kernel's release", kernel.display()),
        hint: "set DEMETER_KERNEL to a vmlinuz for x86".into(),
    })
}

/// The build folder for modules of a release: the installed one, or one in `cache`, filled from the package archive.
fn headers(cache: &Path, release: &str) -> Result<PathBuf, Error> {
    let installed = PathBuf::from(format!("/lib/modules/{release}/build"));
    if installed.join("Makefile").exists() {
        return Ok(installed);
    }
    let kept = cache.join(format!("headers-{release}"));
    if !kept.exists() {
        let fetched =
            tempfile::tempdir_in(cache).map_err(Error::io("create a folder in", cache))?;
        fetch(fetched.path(), release)?;
        relocate(fetched.path(), &kept, release)?;
        let done = fetched.keep();
        fs::rename(&done, &kept).map_err(Error::io("create", &kept))?;
    }
    Ok(kept.join(format!("{SOURCES}/linux-headers-{release}")))
}

/// Unpacks the headers' package and its dependencies: the headers common to all kernels of the release, and the build
/// programs.
fn fetch(into: &Path, release: &str) -> Result<(), Error> {
    let headers = format!("linux-headers-{release}");
    let parts = package::dependencies(&headers, HINT)?;
    let parts = parts
        .iter()
        .map(String::as_str)
        .filter(|name| name.starts_with("linux-headers-") || name.starts_with("linux-kbuild-"));
    let packages: Vec<&str> = std::iter::once(headers.as_str()).chain(parts).collect();
    package::unpack(&packages, into, HINT)
}

/// Adapts the package's makefile, which includes the common one by its path under /usr, to a tree below `root`. All
/// other paths are relative.
fn relocate(tree: &Path, root: &Path, release: &str) -> Result<(), Error> {
    let makefile = tree.join(format!("{SOURCES}/linux-headers-{release}/Makefile"));
    let text = fs::read_to_string(&makefile).map_err(Error::io("read", &makefile))?;
    let place = format!("{}/{SOURCES}/", root.display());
    let text = text.replace(&format!("/{SOURCES}/"), &place);
    fs::write(&makefile, text).map_err(Error::io("write", &makefile))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vm::Lab;

    /// Output of compiler and sparse for the module in `folder`, with all warnings.
    fn said_of(make: &mut Command) -> String {
        let has_sparse = Command::new("sparse").arg("--version").output().is_ok();
        if has_sparse {
            make.arg("C=1");
        } else {
            eprintln!("sparse is not installed: the compiler alone looks at the module");
        }
        let made = make.arg("W=1").output().expect(HINT);
        let said = String::from_utf8_lossy(&made.stderr).into_owned();
        assert!(made.status.success(), "{said}");
        said
    }

    #[test]
    #[cfg_attr(
        not(target_arch = "x86_64"),
        ignore = "the module is built for kernels of x86"
    )]
    fn compiler_and_sparse_have_nothing_to_say() {
        let lab = Lab::from_env().unwrap();
        let release = release(&lab.kernel_image().unwrap()).unwrap();
        let headers = headers(&lab.cache, &release).unwrap();
        let work = tempfile::tempdir().unwrap();
        let said = said_of(&mut make_in(work.path(), &headers).unwrap());
        // The note about a different compiler of the kernel has no file position.
        assert!(!said.contains(": warning:"), "{said}");
        // Check that a real warning would be seen.
        let worse = tempfile::tempdir().unwrap();
        let mut make = make_in(worse.path(), &headers).unwrap();
        let path = worse.path().join("stats.c");
        let text = fs::read_to_string(&path).unwrap();
        fs::write(
            &path,
            text + "\nvoid balloon_canary(void) { int unused = 1; }\n",
        )
        .unwrap();
        let said = said_of(&mut make);
        assert!(
            said.contains("stats.c") && said.contains("balloon_canary"),
            "{said}"
        );
    }

    #[test]
    fn the_release_is_read_from_the_image() {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("vmlinuz");
        let mut bytes = vec![0u8; 0x1000];
        bytes[0x20e..0x210].copy_from_slice(&0x700u16.to_le_bytes());
        bytes[0x900..0x930].copy_from_slice(b"6.12.99+deb12-cloud-amd64 (debian-kernel@lists) ");
        fs::write(&image, &bytes).unwrap();
        assert_eq!(release(&image).unwrap(), "6.12.99+deb12-cloud-amd64");
        // A path in the release would lead elsewhere.
        bytes[0x900..0x905].copy_from_slice(b"../..");
        fs::write(&image, &bytes).unwrap();
        assert!(release(&image).is_err());
        fs::write(&image, "no kernel").unwrap();
        assert!(release(&image).is_err());
    }
}
