//! Finds open files of a process that pin its memory: pinned pages are not the guest's alone, so no hole returns them.

use std::io;
use std::path::Path;

use demeter_policy::Pid;

use super::process::DESCRIPTORS_MAX;
use crate::outside::{self, MayWait};

/// An open file of the process that pins its memory, as far as descriptors show it.
pub(crate) fn pinned_by(root: &Path, pid: Pid, wait: &MayWait) -> io::Result<Option<String>> {
    let process = root.join(format!("proc/{pid}"));
    for path in outside::entries_of(&process.join("fd"), DESCRIPTORS_MAX, wait)? {
        // The descriptor may have been closed meanwhile.
        let Ok(target) = outside::link_of(&path, wait) else {
            continue;
        };
        let target = target.to_string_lossy();
        if PINNING.iter().any(|device| target.starts_with(device)) {
            return Ok(Some(target.into_owned()));
        }
        if target.contains(GUEST_MEMFD) {
            return Ok(Some(
                "guest_memfd, as the memory of a confidential VM".into(),
            ));
        }
        if target == "anon_inode:[io_uring]" {
            let number = path.file_name().unwrap_or_default();
            let info = outside::text_of(&process.join("fdinfo").join(number), wait);
            if fixed_buffers(&info.unwrap_or_default()) {
                return Ok(Some("an io_uring with fixed buffers".into()));
            }
        }
    }
    Ok(None)
}

/// Devices that pin their users' memory: VFIO (passed-through devices, NVMe in user space),
/// IOMMUFD, vhost-vdpa, encrypted memory, RDMA.
const PINNING: [&str; 5] = [
    "/dev/vfio/",
    "/dev/iommu",
    "/dev/vhost-vdpa",
    "/dev/sev",
    "/dev/infiniband/",
];

/// Part of the name of KVM's guest_memfd (Linux's virt/kvm/guest_memfd.c), which has the private memory
/// of SEV-SNP and TDX guests. The files that we could punch are empty then, so punching them would
/// return nothing, and the VM would count with too little.
const GUEST_MEMFD: &str = "[kvm-gmem]";

/// Whether a ring has registered buffers, from its fdinfo (Linux's io_uring/fdinfo.c).
fn fixed_buffers(info: &str) -> bool {
    let counts = info
        .lines()
        .filter_map(|line| line.strip_prefix("UserBufs:"));
    counts.into_iter().any(|count| count.trim() != "0")
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn what_pins_memory_is_found_among_descriptors() {
        let root = tempfile::tempdir().unwrap();
        let process = root.path().join("proc/9");
        fs::create_dir_all(process.join("fd")).unwrap();
        fs::create_dir_all(process.join("fdinfo")).unwrap();
        let found = || pinned_by(root.path(), Pid(9), &MayWait::in_a_test()).unwrap();
        let open = |number: &str, target| symlink(target, process.join("fd").join(number)).unwrap();
        open("0", "/dev/vhost-net");
        open("1", "anon_inode:[io_uring]");
        open("2", "/dev/kvm");
        fs::write(
            process.join("fdinfo/1"),
            "flags:\t02\nUserFiles:\t3\nUserBufs:\t0\n",
        )
        .unwrap();
        assert_eq!(found(), None);
        fs::write(
            process.join("fdinfo/1"),
            "UserBufs:\t2\n    0: 0x7f00/4096\n",
        )
        .unwrap();
        assert_eq!(found().unwrap(), "an io_uring with fixed buffers");
        fs::remove_file(process.join("fd/1")).unwrap();
        for device in [
            "/dev/vfio/17",
            "/dev/vfio/vfio",
            "/dev/iommu",
            "/dev/vhost-vdpa-0",
            "/dev/sev",
        ] {
            open("7", device);
            assert_eq!(found().as_deref(), Some(device));
            fs::remove_file(process.join("fd/7")).unwrap();
        }
        // Its name as an anonymous inode, and in a file system of its own.
        for link in ["anon_inode:[kvm-gmem]", "/[kvm-gmem]"] {
            open("7", link);
            assert!(found().unwrap().contains("confidential VM"), "{link}");
            fs::remove_file(process.join("fd/7")).unwrap();
        }
        // A failed check is an error, not an absence.
        assert!(pinned_by(root.path(), Pid(8), &MayWait::in_a_test()).is_err());
    }
}
