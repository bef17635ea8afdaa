//! Parses a VM's guest-physical memory layout from the monitor's `info mtree -f`.
//!
//! No QMP command reports this layout for memory given by `-numa node,memdev=`. The objects in
//! QEMU's tree have sizes and names only, and the holes (below 1 MiB, below 4 GiB) are aliases with
//! hidden targets. The flat view is the memory that the VM's CPUs see, resolved to the byte. Its
//! lines (QEMU's softmmu/memory.c):
//!
//! ```text
//! FlatView #1
//!  AS "memory", root: system
//!   0000000100000000-000000013fffffff (prio 0, ram): node0 @00000000c0000000 KVM
//! ```

use demeter_policy::{ByteCount, GuestPhysAddr, PhysRange};
use demeter_proto::shown;

/// Maximum number of memory ranges of a VM.
const RANGES_MAX: usize = 4096;

/// A range of guest-physical memory and its memory region.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RamRange {
    /// Guest-physical addresses.
    pub range: PhysRange,
    /// The region's name, which identifies its backend.
    pub region: String,
}

/// The memory ranges of the CPUs' address space, in text order; an error for invalid text.
///
/// Read-only ranges are included. Firmware makes parts of ordinary memory (below 1 MiB) read-only
/// and writable again during boot, and the layout must not depend on the time of the question.
pub fn parse(text: &str) -> Result<Vec<RamRange>, String> {
    let mut ranges = vec![];
    let mut wanted = false;
    for line in text.lines() {
        if line.starts_with("FlatView") {
            if !ranges.is_empty() {
                break;
            }
            wanted = false;
        } else if line.trim_start().starts_with("AS \"memory\",") {
            wanted = true;
        } else if wanted && let Some((addresses, region)) = memory(line) {
            let range = range(addresses, region);
            ranges.push(range.ok_or_else(|| format!("this line: {}", brief(line)))?);
            if ranges.len() > RANGES_MAX {
                return Err(format!("more than {RANGES_MAX} ranges of memory"));
            }
        }
    }
    if ranges.is_empty() {
        return Err("no memory in the address space \"memory\"".into());
    }
    Ok(ranges)
}

/// The addresses and the region in a line about memory.
fn memory(line: &str) -> Option<(&str, &str)> {
    let read_write = line.split_once(", ram): ");
    read_write.or_else(|| line.split_once(", rom): "))
}

fn range(addresses: &str, region: &str) -> Option<RamRange> {
    let (start, rest) = addresses.trim_start().split_once('-')?;
    let (last, _) = rest.split_once(" (prio ")?;
    let start = u64::from_str_radix(start, 16).ok()?;
    let last = u64::from_str_radix(last, 16).ok()?;
    let region = region.trim_end().trim_end_matches(" KVM");
    let region = match region.rsplit_once(" @") {
        Some((name, offset)) if u64::from_str_radix(offset, 16).is_ok() => name,
        _ => region,
    };
    let bytes = ByteCount(last.checked_sub(start)?.checked_add(1)?);
    Some(RamRange {
        range: PhysRange::new(GuestPhysAddr(start), bytes)?,
        region: region.into(),
    })
}

/// A foreign line, cleaned and cut for an error message.
fn brief(line: &str) -> String {
    shown(&line.trim().chars().take(80).collect::<String>())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Output of QEMU 7.2.22 (-M pc, 2 x 256 MiB), shortly after SeaBIOS has started.
    const EARLY: &str = "FlatView #1\r
 AS \"I/O\", root: io\r
 Root memory region: io\r
  0000000000000000-0000000000000007 (prio 0, i/o): dma-chan\r
\r
FlatView #2\r
 AS \"cpu-smm-0\", root: memory\r
 Root memory region: memory\r
  0000000000000000-000000000fffffff (prio 0, ram): smm\r
\r
FlatView #3\r
 AS \"memory\", root: system\r
 AS \"cpu-memory-0\", root: system\r
 Root memory region: system\r
  0000000000000000-00000000000c2fff (prio 0, ram): node0\r
  00000000000c3000-00000000000e7fff (prio 0, rom): node0 @00000000000c3000\r
  00000000000e8000-00000000000effff (prio 0, ram): node0 @00000000000e8000 KVM\r
  00000000000f0000-00000000000fffff (prio 0, rom): node0 @00000000000f0000\r
  0000000000100000-000000000fffffff (prio 0, ram): node0 @0000000000100000\r
  0000000010000000-000000001fffffff (prio 0, ram): node1\r
  00000000fec00000-00000000fec00fff (prio 0, i/o): ioapic\r
  00000000fffc0000-00000000ffffffff (prio 0, rom): pc.bios\r
  0000000100000000-000000010fffffff (prio 0, ram): a name, ram): @home KVM\r
\r
FlatView #4\r
 AS \"other\", root: other\r
  0000000000000000-00000000000c2fff (prio 0, ram): other\r
";

    #[test]
    fn what_the_cpus_see_is_read_to_the_byte() {
        let ranges = parse(EARLY).unwrap();
        let of = |name: &str| -> Vec<_> {
            let named = ranges.iter().filter(|ram| ram.region == name);
            named
                .map(|ram| (ram.range.start().0, ram.range.end().0))
                .collect()
        };
        assert_eq!(
            of("node0"),
            [
                (0, 0xc_3000),
                (0xc_3000, 0xe_8000),
                (0xe_8000, 0xf_0000),
                (0xf_0000, 0x10_0000),
                (0x10_0000, 0x1000_0000)
            ]
        );
        assert_eq!(of("node1"), [(0x1000_0000, 0x2000_0000)]);
        assert_eq!(of("a name, ram): @home"), [(1 << 32, 0x1_1000_0000)]);
        assert_eq!(ranges.len(), 8);
    }

    #[test]
    fn what_is_not_understood_is_not_guessed() {
        for line in [
            "  0000000000000000-0000000000000001 (prio 0, ram): x".replace('-', "+"),
            "  0000000000000002-0000000000000000 (prio 0, ram): x".into(),
            "  0000000000000000-ffffffffffffffff (prio 0, ram): x".into(),
            "  g-h (prio 0, ram): x".into(),
            "  0-1, ram): x".into(),
        ] {
            let text = format!("FlatView #0\n AS \"memory\", root: system\n{line}\n");
            assert!(parse(&text).is_err(), "{line}");
        }
        assert!(parse("").is_err());
        let line = "  0000000000001000-0000000000001fff (prio 0, ram): x\n";
        let many = format!("AS \"memory\",\n{}", line.repeat(RANGES_MAX + 1));
        assert!(parse(&many).unwrap_err().contains("more than"));
    }

    proptest! {
        #[test]
        fn any_text_is_survived(text in "(AS \"memory\",\n)?(\\PC{0,40}, ram\\): \\PC{0,20}\n){0,5}") {
            let _ = parse(&text);
        }
    }
}
