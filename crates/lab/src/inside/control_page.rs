//! The control page shared by the emulator's plugin and the VM: the first page of BAR 2 of an ivshmem device.
//! plugin/shared_page.h defines its layout.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use crate::fault::Fault;

const VENDOR: &str = "0x1af4";
const DEVICE: &str = "0x1110";
const MAGIC: u32 = 0x3152_5444;
const CONTROL_BYTES: usize = 4096;
const MAGIC_AT: usize = 0;

/// Byte offsets of the page's fields.
pub mod field {
    /// Whether slow memory is delayed.
    pub const ARMED: usize = 16;
    /// Loads per sample.
    pub const PERIOD: usize = 20;
    /// Sequence number of the page shown to the plugin.
    pub const ASKED: usize = 28;
    /// 64 bits: the page's virtual address.
    pub const PAGE_GVA: usize = 32;
    /// 64 bits: the page's physical address.
    pub const PAGE_GPA: usize = 40;
    /// The page's node.
    pub const PAGE_NODE: usize = 48;
    /// Sequence number of the page that the plugin saw last.
    pub const ANSWERED: usize = 52;
    /// Bit mask of address formats that match all pages so far.
    pub const FITTING: usize = 56;
    /// 64 bits: the address that the emulator reported for the page.
    pub const PAGE_REPORTED: usize = 64;
    /// 64 bits for each node: its start, as the plugin knows it.
    pub const NODE_GPA: usize = 72;
}

/// The mapped control page.
#[derive(Debug)]
pub struct ControlPage {
    page: *mut u8,
}

impl ControlPage {
    /// Finds and maps the page.
    pub fn map(root: &Path) -> Result<Self, Fault> {
        let path = shared_memory(root)?;
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
        let page = Self { page: page.cast() };
        if page.read(MAGIC_AT) != MAGIC {
            return Err(Fault::Unsupported {
                what: format!("{} holds no control page", path.display()),
                hint: "the emulator's plugin did not start; see qemu.log",
            });
        }
        Ok(page)
    }

    /// Reads a field of 32 bits.
    pub fn read(&self, field: usize) -> u32 {
        self.copy_out(field)
    }

    /// Reads a field of 64 bits.
    pub fn read_u64(&self, field: usize) -> u64 {
        self.copy_out(field)
    }

    /// Writes a field of 32 bits.
    pub fn write(&self, field: usize, value: u32) {
        self.copy_in(field, value);
    }

    /// Writes a field of 64 bits.
    pub fn write_u64(&self, field: usize, value: u64) {
        self.copy_in(field, value);
    }

    fn copy_out<T: Copy>(&self, at: usize) -> T {
        assert!(at.is_multiple_of(size_of::<T>()) && at + size_of::<T>() <= CONTROL_BYTES);
        // SAFETY: inside the mapping and aligned, as checked above; the callers' integers have no invalid values.
        // Volatile, as the plugin may write at any time.
        unsafe { self.page.add(at).cast::<T>().read_volatile() }
    }

    fn copy_in<T: Copy>(&self, at: usize, value: T) {
        assert!(at.is_multiple_of(size_of::<T>()) && at + size_of::<T>() <= CONTROL_BYTES);
        // SAFETY: as in `copy_out`; the plugin may read at any time.
        unsafe { self.page.add(at).cast::<T>().write_volatile(value) }
    }
}

impl Drop for ControlPage {
    fn drop(&mut self) {
        // SAFETY: the mapping was made in `map` and nothing refers to it any more.
        unsafe { libc::munmap(self.page.cast(), CONTROL_BYTES) };
    }
}

/// The file of the plugin's shared memory: the control page, followed by the sample rings.
pub fn shared_memory(root: &Path) -> Result<PathBuf, Fault> {
    Ok(find_device(root)?.join("resource2"))
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
        hint: "use a QEMU with ivshmem-plain",
    })
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// A fake ivshmem device beside another device; the mapped file represents its memory.
    pub fn machine(magic: u32) -> (tempfile::TempDir, PathBuf) {
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

    /// A fake device with the plugin's page.
    pub fn machine_with_plugin() -> (tempfile::TempDir, PathBuf) {
        machine(MAGIC)
    }

    #[test]
    fn a_page_without_the_plugin_is_refused_and_left_alone() {
        let (root, memory) = machine(0);
        let said = ControlPage::map(root.path()).unwrap_err().to_string();
        assert!(said.contains("plugin"), "{said}");
        assert_eq!(fs::read(memory).unwrap(), vec![0; CONTROL_BYTES]);
    }

    #[test]
    fn figures_agree_with_the_header() {
        let header = include_str!("../../plugin/shared_page.h");
        assert!(header.contains(&format!("DEMETER_MAGIC {MAGIC:#x}u")));
        assert!(header.contains(&format!("DEMETER_CONTROL_BYTES {CONTROL_BYTES}u")));
        let body = header.split("struct demeter_control {").nth(1).unwrap();
        let mut at = 0;
        let mut offsets = std::collections::BTreeMap::new();
        for line in body.split("\n};").next().unwrap().lines() {
            let mut words = line.split_whitespace();
            let bytes = match words.next() {
                Some("uint32_t") => 4,
                Some("uint64_t") => 8,
                _ => continue,
            };
            // Alignment follows the C compiler's rules.
            at = usize::next_multiple_of(at, bytes);
            let name = words.next().unwrap().trim_end_matches(';');
            // A list is the last field.
            offsets.insert(name.split('[').next().unwrap(), at);
            at += bytes;
        }
        for (name, offset) in [
            ("magic", MAGIC_AT),
            ("armed", field::ARMED),
            ("period", field::PERIOD),
            ("asked", field::ASKED),
            ("page_gva", field::PAGE_GVA),
            ("page_gpa", field::PAGE_GPA),
            ("page_node", field::PAGE_NODE),
            ("answered", field::ANSWERED),
            ("fitting", field::FITTING),
            ("page_reported", field::PAGE_REPORTED),
            ("node_gpa", field::NODE_GPA),
        ] {
            assert_eq!(offsets.get(name), Some(&offset), "{name}");
        }
    }
}
