//! The driver's interface, as `kernel/demeter_balloon/demeter_balloon.h` defines it.

use libc::Ioctl;

/// The interface version that this client speaks.
pub const ABI: u32 = 2;

/// Maximum number of ranges in one call.
pub const RANGES_MAX: usize = 4096;

/// `struct demeter_balloon_range`
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Range {
    pub start: u64,
    pub bytes: u64,
}

/// `DEMETER_BALLOON_RECLAIM`
pub const RECLAIM: u32 = 1;

/// `struct demeter_balloon_inflate`
#[repr(C)]
#[derive(Debug, Default)]
pub struct Inflate {
    pub node: u32,
    pub flags: u32,
    pub bytes: u64,
    pub ranges: u64,
    pub ranges_max: u32,
    pub ranges_count: u32,
    pub moved: u64,
    pub stop: u32,
    pub reserved: u32,
}

/// `struct demeter_balloon_deflate`
#[repr(C)]
#[derive(Debug, Default)]
pub struct Deflate {
    pub node: u32,
    pub reserved: u32,
    pub bytes: u64,
    pub start: u64,
    pub end: u64,
    pub moved: u64,
    pub stop: u32,
    pub reserved2: u32,
}

/// `struct demeter_balloon_list`
#[repr(C)]
#[derive(Debug, Default)]
pub struct List {
    pub node: u32,
    pub ranges_max: u32,
    pub ranges: u64,
    pub cursor: u64,
    pub ranges_count: u32,
    pub more: u32,
}

/// `struct demeter_balloon_allow`
#[repr(C)]
#[derive(Debug, Default)]
pub struct Allow {
    pub node: u32,
    pub reserved: u32,
    pub bytes: u64,
}

/// `struct demeter_balloon_prove`
#[repr(C)]
#[derive(Debug, Default)]
pub struct Prove {
    pub node: u32,
    pub reserved: u32,
    pub nonce: [u8; 16],
    pub page: u64,
}

/// `_IOC(read | write, 0xde, number, size)`: bit 31 if there is an answer, bit 30 if there is an argument.
const fn ioc<T>(answer: bool, argument: bool, number: u32) -> Ioctl {
    let direction = (answer as u32) << 31 | (argument as u32) << 30;
    (direction | (size_of::<T>() as u32) << 16 | 0xde << 8 | number) as Ioctl
}

pub const IOC_ABI: Ioctl = ioc::<u32>(true, false, 0);
pub const IOC_INFLATE: Ioctl = ioc::<Inflate>(true, true, 1);
pub const IOC_DEFLATE: Ioctl = ioc::<Deflate>(true, true, 2);
pub const IOC_LIST: Ioctl = ioc::<List>(true, true, 3);
pub const IOC_ALLOW: Ioctl = ioc::<Allow>(false, true, 4);
pub const IOC_PROVE: Ioctl = ioc::<Prove>(true, true, 5);

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn numbers_and_layouts_are_those_of_the_header() {
        let dir = tempfile::tempdir().unwrap();
        let source = dir.path().join("print.c");
        let header = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../../kernel/demeter_balloon/demeter_balloon.h"
        );
        let text = format!(
            "#include <stdio.h>\n#include <stddef.h>\n#include \"{header}\"\n\
             int main(void) {{ printf(\"%lu %lu %lu %lu %lu %lu %u %u %u %zu %zu %zu %zu\\n\",\
             DEMETER_BALLOON_IOC_ABI, DEMETER_BALLOON_IOC_INFLATE, DEMETER_BALLOON_IOC_DEFLATE,\
             DEMETER_BALLOON_IOC_LIST, DEMETER_BALLOON_IOC_ALLOW,\
             DEMETER_BALLOON_IOC_PROVE, DEMETER_BALLOON_ABI,\
             DEMETER_BALLOON_RANGES_MAX, DEMETER_BALLOON_RECLAIM,\
             offsetof(struct demeter_balloon_inflate, stop),\
             offsetof(struct demeter_balloon_deflate, stop),\
             offsetof(struct demeter_balloon_list, more),\
             offsetof(struct demeter_balloon_prove, page)); }}\n"
        );
        std::fs::write(&source, text).unwrap();
        let program = dir.path().join("print");
        let built = Command::new("cc")
            .args(["-Wall", "-Werror", "-o"])
            .args([&program, &source])
            .status();
        assert!(built.unwrap().success());
        let printed = Command::new(&program).output().unwrap().stdout;
        let numbers: Vec<u64> = String::from_utf8(printed)
            .unwrap()
            .split_whitespace()
            .map(|word| word.parse().unwrap())
            .collect();
        let ours = [
            IOC_ABI,
            IOC_INFLATE,
            IOC_DEFLATE,
            IOC_LIST,
            IOC_ALLOW,
            IOC_PROVE,
            u64::from(ABI),
            RANGES_MAX as u64,
            u64::from(RECLAIM),
            std::mem::offset_of!(Inflate, stop) as u64,
            std::mem::offset_of!(Deflate, stop) as u64,
            std::mem::offset_of!(List, more) as u64,
            std::mem::offset_of!(Prove, page) as u64,
        ];
        assert_eq!(numbers, ours);
    }
}
