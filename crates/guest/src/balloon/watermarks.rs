//! Recomputes the kernel's watermarks after the balloon changed.
//!
//! Every zone keeps some pages free: a part of `vm.min_free_kbytes`, by its managed size. The driver subtracts held
//! memory from that size, but the kernel recomputes watermarks only when the sysctl is written. Until then a small rest
//! of a fast node would keep as much free as the whole node.

use std::fs;
use std::io;
use std::path::Path;

/// The sum of the minimum watermarks (Documentation/admin-guide/sysctl/vm.rst).
const MIN_FREE: &str = "proc/sys/vm/min_free_kbytes";

/// Makes the kernel recompute its watermarks by writing the sysctl's present value.
pub fn deal_out(root: &Path) -> io::Result<()> {
    let path = root.join(MIN_FREE);
    let sum = fs::read(&path)?;
    fs::write(&path, sum)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sum_stays() {
        let root = tempfile::tempdir().unwrap();
        assert!(deal_out(root.path()).is_err());
        let path = root.path().join(MIN_FREE);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, "67584\n").unwrap();
        deal_out(root.path()).unwrap();
        assert_eq!(fs::read_to_string(path).unwrap(), "67584\n");
    }
}
