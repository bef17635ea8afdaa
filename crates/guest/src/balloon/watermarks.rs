//! The kernel's watermarks follow what a node still has.
//!
//! Every zone keeps some pages free, its part of `vm.min_free_kbytes` by the size of what the page
//! allocator manages of it. The driver takes what it holds out of that size, but the kernel deals
//! the watermarks out only when it is told the sum. Until then a fast node of which little is left
//! would keep as much free as if it were whole.

use std::fs;
use std::io;
use std::path::Path;

/// The sum of the minimum watermarks (Documentation/admin-guide/sysctl/vm.rst).
const MIN_FREE: &str = "proc/sys/vm/min_free_kbytes";

/// Has the kernel deal out the watermarks anew, by telling it the sum that it has.
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
