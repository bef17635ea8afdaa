//! Paths in option lists of the emulator.

use std::path::Path;

/// A path in an option list, with commas escaped.
pub fn quoted(path: &Path) -> String {
    path.display().to_string().replace(',', ",,")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commas_in_paths_do_not_end_an_option() {
        assert_eq!(quoted(Path::new("/a,b/c")), "/a,,b/c");
    }
}
