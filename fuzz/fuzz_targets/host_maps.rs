//! Any mappings of a hypervisor, and any text in their place: an address has a file exactly if each
//! of its pages has. Any pieces make a map that resolves accordingly, or none.
#![no_main]

use std::fmt::Write;

use arbitrary::Arbitrary;
use demeter_host::backing::FileOffset;
use demeter_host::hypervisor::HostVirtAddr;
use demeter_host::memory::{Maps, MemoryMap, Piece};
use demeter_policy::{ByteCount, GuestPhysAddr, PAGE_SIZE, PhysRange, Pid, Tier};
use libfuzzer_sys::fuzz_target;

#[derive(Debug, Arbitrary)]
struct Input<'a> {
    lines: Vec<Line<'a>>,
    page: u16,
    pages: u8,
    text: &'a str,
    addr: u64,
    bytes: u64,
    pieces: Vec<(u64, u64, bool, u64)>,
}

#[derive(Debug, Arbitrary)]
struct Line<'a> {
    gap: u8,
    pages: u8,
    is_shared: bool,
    is_writable: bool,
    offset: u8,
    inode: u8,
    name: &'a str,
}

/// Inode and page of the file behind a page, if the page may be punched.
fn page_of(lines: &[Line], page: u64) -> Option<(u64, u64)> {
    let mut at = 0;
    for line in lines {
        at += u64::from(line.gap);
        let end = at + u64::from(line.pages);
        if (at..end).contains(&page) {
            let fits = line.is_shared && line.is_writable && line.inode != 0;
            return fits.then(|| (line.inode.into(), u64::from(line.offset) + page - at));
        }
        at = end;
    }
    None
}

fuzz_target!(|input: Input| {
    let (mut text, mut at) = (String::new(), 0);
    for line in &input.lines {
        at += u64::from(line.gap) * PAGE_SIZE;
        let end = at + u64::from(line.pages) * PAGE_SIZE;
        let rights = [
            if line.is_writable { "rw-" } else { "r--" },
            if line.is_shared { "s" } else { "p" },
        ]
        .concat();
        // The kernel writes line feeds in names as \012.
        let name = line.name.replace(['\n', '\r'], "\\012");
        let (offset, inode) = (u64::from(line.offset) * PAGE_SIZE, line.inode);
        writeln!(
            text,
            "{at:08x}-{end:08x} {rights} {offset:08x} 00:01 {inode} {name}"
        )
        .unwrap();
        at = end;
    }
    let (first, count) = (u64::from(input.page), u64::from(input.pages).max(1));
    let addr = HostVirtAddr(first * PAGE_SIZE);
    let maps = Maps::parse(text.clone(), Pid(1)).expect("few lines");
    let found = maps.find(addr, ByteCount(count * PAGE_SIZE));
    let found = found.ok().map(|m| (m.file.inode, m.offset.0 / PAGE_SIZE));
    let want = page_of(&input.lines, first).filter(|&(inode, offset)| {
        (0..count).all(|n| page_of(&input.lines, first + n) == Some((inode, offset + n)))
    });
    assert_eq!(found, want, "{text}");
    if let Ok(maps) = Maps::parse(input.text.into(), Pid(1)) {
        let _ = maps.find(HostVirtAddr(input.addr), ByteCount(input.bytes));
    }

    let piece = |&(start, bytes, fast, offset): &(u64, u64, bool, u64)| {
        Some(Piece {
            range: PhysRange::new(GuestPhysAddr(start), ByteCount(bytes))?,
            tier: if fast { Tier::Fast } else { Tier::Slow },
            offset: FileOffset(offset),
        })
    };
    let pieces: Vec<Piece> = input.pieces.iter().filter_map(piece).collect();
    let Ok(map) = MemoryMap::new(pieces.clone()) else {
        return;
    };
    for piece in &pieces {
        let extent = map.resolve(piece.tier, piece.range).expect("a piece");
        assert_eq!(
            (extent.offset, extent.len),
            (piece.offset, piece.range.len())
        );
    }
    if let Some(range) = PhysRange::new(GuestPhysAddr(input.addr), ByteCount(input.bytes)) {
        for tier in Tier::ALL {
            let touches = |piece: &Piece| {
                piece.tier == tier
                    && piece.range.start() <= range.start()
                    && range.start() < piece.range.end()
            };
            let found = map.resolve(tier, range);
            assert!(found.is_err() || pieces.iter().any(touches));
        }
    }
});
