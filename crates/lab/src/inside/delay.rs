//! The switch that makes slow memory slow.
//!
//! It is a word in the control page that the emulator's plugin shares with the VM, as BAR 2 of
//! an ivshmem device; layout in plugin/shared_page.h. Memory is filled while it is off, because
//! filling takes a minute otherwise and nobody measures it.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use super::fault::Fault;

const VENDOR: &str = "0x1af4";
const DEVICE: &str = "0x1110";
const MAGIC: u32 = 0x3152_5444;
const CONTROL_BYTES: usize = 4096;
const MAGIC_WORD: usize = 0;
const ARMED_WORD: usize = 4;

/// The mapped control page; disarms when dropped.
#[derive(Debug)]
pub struct Delay {
    page: *mut u32,
}

impl Delay {
    /// Maps the control page and switches the delay on.
    pub fn arm(root: &Path) -> Result<Self, Fault> {
        let path = find_device(root)?.join("resource2");
        let file = File::options()
            .read(true)
            .write(true)
            .open(&path)
            .map_err(Fault::io("open", &path))?;
        // SAFETY: a fresh shared mapping of the file at an address that the kernel chooses.
        let page = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                CONTROL_BYTES,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        if page == libc::MAP_FAILED {
            return Err(Fault::io("map", &path)(io::Error::last_os_error()));
        }
        let delay = Self { page: page.cast() };
        if delay.read(MAGIC_WORD) != MAGIC {
            return Err(Fault::Unsupported {
                what: format!("{} holds no control page", path.display()),
                mend: "the emulator's plugin did not start; see qemu.log",
            });
        }
        delay.write(ARMED_WORD, 1);
        Ok(delay)
    }

    fn read(&self, word: usize) -> u32 {
        // SAFETY: `page` maps CONTROL_BYTES bytes, `word` is one of the constants above.
        unsafe { self.page.add(word).read_volatile() }
    }

    fn write(&self, word: usize, value: u32) {
        // SAFETY: as in `read`; the plugin reads the word whenever it likes.
        unsafe { self.page.add(word).write_volatile(value) }
    }
}

impl Drop for Delay {
    fn drop(&mut self) {
        if self.read(MAGIC_WORD) == MAGIC {
            self.write(ARMED_WORD, 0);
        }
        // SAFETY: the mapping was made in `arm` and nothing refers to it any more.
        unsafe { libc::munmap(self.page.cast(), CONTROL_BYTES) };
    }
}

/// The ivshmem device's folder in sysfs.
fn find_device(root: &Path) -> Result<PathBuf, Fault> {
    let devices = root.join("sys/bus/pci/devices");
    for entry in fs::read_dir(&devices).map_err(Fault::io("list", &devices))? {
        let path = entry.map_err(Fault::io("list", &devices))?.path();
        let holds = |file: &str, id: &str| {
            fs::read_to_string(path.join(file)).is_ok_and(|text| text.trim() == id)
        };
        if holds("vendor", VENDOR) && holds("device", DEVICE) {
            return Ok(path);
        }
    }
    Err(Fault::Unsupported {
        what: format!("no ivshmem device in {}", devices.display()),
        mend: "use a QEMU with ivshmem-plain",
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A fake ivshmem device beside another one; the mapped file stands for its memory.
    fn machine(magic: u32) -> (tempfile::TempDir, PathBuf) {
        let root = tempfile::tempdir().unwrap();
        let devices = root.path().join("sys/bus/pci/devices");
        for (slot, vendor, device) in [
            ("0000:00:01.0", "0x8086", DEVICE),
            ("0000:00:02.0", VENDOR, DEVICE),
        ] {
            fs::create_dir_all(devices.join(slot)).unwrap();
            fs::write(devices.join(slot).join("vendor"), format!("{vendor}\n")).unwrap();
            fs::write(devices.join(slot).join("device"), format!("{device}\n")).unwrap();
        }
        let memory = devices.join("0000:00:02.0/resource2");
        let mut bytes = vec![0; CONTROL_BYTES];
        bytes[..4].copy_from_slice(&magic.to_le_bytes());
        fs::write(&memory, bytes).unwrap();
        (root, memory)
    }

    #[test]
    fn armed_while_it_lives() {
        let (root, memory) = machine(MAGIC);
        let armed = || fs::read(&memory).unwrap()[16];
        let delay = Delay::arm(root.path()).unwrap();
        assert_eq!(armed(), 1);
        drop(delay);
        assert_eq!(armed(), 0);
    }

    #[test]
    fn a_page_without_the_plugin_is_refused_and_left_alone() {
        let (root, memory) = machine(0);
        let said = Delay::arm(root.path()).unwrap_err().to_string();
        assert!(said.contains("plugin"), "{said}");
        assert_eq!(fs::read(memory).unwrap(), vec![0; CONTROL_BYTES]);
    }

    #[test]
    fn constants_match_the_header() {
        let header = include_str!("../../plugin/shared_page.h");
        assert!(header.contains(&format!("DEMETER_MAGIC {MAGIC:#x}u")));
        assert!(header.contains(&format!("DEMETER_CONTROL_BYTES {CONTROL_BYTES}u")));
        let words: Vec<&str> = header
            .split("struct demeter_control {")
            .nth(1)
            .and_then(|rest| rest.split('}').next())
            .map(|body| body.lines().filter(|l| l.contains("uint32_t")).collect())
            .unwrap_or_default();
        assert!(words[MAGIC_WORD].contains(" magic;"));
        assert!(words[ARMED_WORD].contains(" armed;"));
    }
}
