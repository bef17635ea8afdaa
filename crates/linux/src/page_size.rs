//! Checks whether a huge page maps an address, by PAGEMAP_SCAN on `/proc/PID/pagemap` (Linux 6.7, linux/fs.h).

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;

use demeter_policy::{GuestVirtAddr, MIB, PAGE_SIZE, Pid};

/// Size of a huge page that one page-table entry maps.
pub const HUGE_BYTES: u64 = 2 * MIB;

/// `_IOWR('f', 16, struct pm_scan_arg)`, with 96 bytes.
const PAGEMAP_SCAN: libc::Ioctl = 0xC060_6610_u32 as libc::Ioctl;
const PAGE_IS_HUGE: u64 = 1 << 6;

/// `struct pm_scan_arg`.
#[repr(C)]
#[derive(Default)]
struct ScanArg {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// `struct page_region`.
#[repr(C)]
#[derive(Default)]
struct PageRegion {
    start: u64,
    end: u64,
    categories: u64,
}

/// A reader of a process's page sizes.
pub struct PageSizes {
    /// `None` if the process has ended or cannot be inspected.
    pagemap: Option<File>,
}

impl PageSizes {
    /// Opens a process below `root`.
    pub fn of(root: &Path, pid: Pid) -> Self {
        Self {
            pagemap: File::open(root.join(format!("proc/{pid}/pagemap"))).ok(),
        }
    }

    /// Size that an address's page-table entry maps; a huge page if the kernel does not report it.
    pub fn at(&self, addr: GuestVirtAddr) -> u64 {
        let Some(pagemap) = &self.pagemap else {
            return HUGE_BYTES;
        };
        let start = addr.0 & !(PAGE_SIZE - 1);
        let mut found = PageRegion::default();
        let mut arg = ScanArg {
            size: size_of::<ScanArg>() as u64,
            start,
            end: start.saturating_add(PAGE_SIZE),
            vec: &raw mut found as u64,
            vec_len: 1,
            category_mask: PAGE_IS_HUGE,
            return_mask: PAGE_IS_HUGE,
            ..ScanArg::default()
        };
        // SAFETY: the kernel reads and writes `arg`, whose size is in it, and writes at most `vec_len` = 1 regions to
        // `found`; both outlive the call.
        match unsafe { libc::ioctl(pagemap.as_raw_fd(), PAGEMAP_SCAN, &raw mut arg) } {
            0 => PAGE_SIZE,
            _ => HUGE_BYTES,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structures_have_the_kernels_sizes() {
        assert_eq!((size_of::<ScanArg>(), size_of::<PageRegion>()), (96, 24));
    }

    #[test]
    fn a_page_of_our_stack_is_small() {
        if !scan_is_known() {
            return eprintln!("skipped: kernels before Linux 6.7 do not report page sizes");
        }
        let pages = PageSizes::of(Path::new("/"), Pid(std::process::id()));
        let here = 0u8;
        let size = pages.at(GuestVirtAddr(&raw const here as u64));
        assert_eq!(size, PAGE_SIZE);
    }

    fn scan_is_known() -> bool {
        let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
        let mut numbers = release
            .split('.')
            .map(|part| part.parse::<u32>().unwrap_or(0));
        (numbers.next(), numbers.next()) >= (Some(6), Some(7))
    }

    #[test]
    fn where_the_kernel_does_not_tell_pages_count_as_huge() {
        let root = tempfile::tempdir().unwrap();
        let addr = GuestVirtAddr(0x1000);
        assert_eq!(PageSizes::of(root.path(), Pid(1)).at(addr), HUGE_BYTES);
        std::fs::create_dir_all(root.path().join("proc/1")).unwrap();
        std::fs::write(root.path().join("proc/1/pagemap"), "").unwrap();
        assert_eq!(PageSizes::of(root.path(), Pid(1)).at(addr), HUGE_BYTES);
    }
}
