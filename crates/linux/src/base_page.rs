//! Size of the kernel's base pages, from the auxiliary vector of this process.

use std::path::Path;

use demeter_policy::{ByteCount, PAGE_SIZE};

/// The entry with the size of a page (getauxval(3)).
const AT_PAGESZ: usize = 6;

/// A kernel whose base pages have another size than those that Demeter moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "this kernel has pages of {0}, and Demeter moves pages of {ours} only; boot a kernel with pages of {ours}",
    ours = ByteCount(PAGE_SIZE)
)]
pub struct OtherBasePages(pub ByteCount);

/// Base page size of the kernel below `root`; `None` if it cannot be read.
pub fn base_page_size(root: &Path) -> Option<ByteCount> {
    const WORD: usize = size_of::<usize>();
    let vector = std::fs::read(root.join("proc/self/auxv")).ok()?;
    let word = |bytes: &[u8]| bytes.try_into().map(usize::from_ne_bytes).ok();
    vector.chunks_exact(2 * WORD).find_map(|entry| {
        let (key, value) = entry.split_at(WORD);
        (word(key)? == AT_PAGESZ).then(|| word(value).map(|size| ByteCount(size as u64)))?
    })
}

/// Checks that the kernel below `root` has base pages of [`PAGE_SIZE`]. An unknown size passes.
///
/// # Errors
/// They have another size, as some kernels for arm64 do.
pub fn check_base_pages(root: &Path) -> Result<(), OtherBasePages> {
    match base_page_size(root) {
        Some(size) if size.0 != PAGE_SIZE => Err(OtherBasePages(size)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn root_with(vector: &[u8]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(root.path().join("proc/self")).unwrap();
        std::fs::write(root.path().join("proc/self/auxv"), vector).unwrap();
        root
    }

    fn entries(entries: &[(usize, usize)]) -> Vec<u8> {
        let words = entries.iter().flat_map(|&(key, value)| [key, value]);
        words.flat_map(usize::to_ne_bytes).collect()
    }

    #[test]
    fn large_base_pages_are_refused_in_a_line() {
        for (kib, passes) in [(4, true), (16, false), (64, false)] {
            let root = root_with(&entries(&[(3, 77), (AT_PAGESZ, kib << 10), (0, 0)]));
            match check_base_pages(root.path()) {
                Ok(()) => assert!(passes),
                Err(error) => {
                    let line = error.to_string();
                    assert!(
                        !passes && line.contains(&format!("pages of {kib} KiB,")),
                        "{line}"
                    );
                    assert!(!line.contains('\n'), "{line}");
                }
            }
        }
        let empty = tempfile::tempdir().unwrap();
        assert_eq!(base_page_size(empty.path()), None);
        assert_eq!(check_base_pages(empty.path()), Ok(()));
    }

    #[test]
    fn the_running_kernel_says_the_same_as_the_c_library() {
        // SAFETY: takes a number only.
        let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        assert_eq!(base_page_size(Path::new("/")), Some(ByteCount(size as u64)));
    }

    proptest! {
        #[test]
        fn any_vector_is_survived(vector: Vec<u8>) {
            let root = root_with(&vector);
            let _ = base_page_size(root.path());
        }
    }
}
