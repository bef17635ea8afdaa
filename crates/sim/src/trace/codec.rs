//! Payload of a frame: accesses as differences to one of four remembered words.

use demeter_policy::GuestVirtAddr;

use crate::Access;

const SLOTS: usize = 4;
const WORD_SHIFT: u32 = 3;
/// Bits of a word address: 57 of a byte address, without those of the byte in a word.
const WORD_BITS: u32 = 57 - WORD_SHIFT;

const STORE: u8 = 1;
const SLOT_SHIFT: u32 = 1;
const FIRST_SHIFT: u32 = 3;
/// Bits of the difference in the first byte and in each later byte.
const FIRST_BITS: u32 = 4;
const NEXT_BITS: u32 = 7;
const MORE: u8 = 0x80;

/// A larger difference is a jump: it replaces the least recently used word, so that active streams keep theirs.
const NEAR: u64 = 1 << (FIRST_BITS + NEXT_BITS - 1);

/// Maximum bytes of an access: 4 + 8 x 7 bits hold a difference of 54 bits and its sign.
pub(super) const ACCESS_BYTES_MAX: usize = 9;

/// Encoder for the accesses of a frame.
#[derive(Debug, Clone, Default)]
pub(super) struct Encoder {
    words: [u64; SLOTS],
    /// Time of each word's last use, in accesses.
    used: [u32; SLOTS],
    count: u32,
    bytes: Vec<u8>,
}

impl Encoder {
    /// Appends an access.
    pub(super) fn push(&mut self, access: Access) {
        let word = access.gva().0 >> WORD_SHIFT;
        let distance = |slot: &usize| self.words[*slot].abs_diff(word);
        let nearest = (0..SLOTS).min_by_key(distance).unwrap_or(0);
        let slot = if distance(&nearest) < NEAR {
            nearest
        } else {
            (0..SLOTS).min_by_key(|&slot| self.used[slot]).unwrap_or(0)
        };
        self.count += 1;
        self.used[slot] = self.count;
        let difference = word.wrapping_sub(self.words[slot]) as i64;
        self.words[slot] = word;

        let mut rest = ((difference << 1) ^ (difference >> 63)) as u64;
        let low = (rest & ((1 << FIRST_BITS) - 1)) as u8;
        rest >>= FIRST_BITS;
        let store = if access.is_store() { STORE } else { 0 };
        let mut byte = store | (slot as u8) << SLOT_SHIFT | low << FIRST_SHIFT;
        while rest > 0 {
            self.bytes.push(byte | MORE);
            byte = (rest & ((1 << NEXT_BITS) - 1)) as u8;
            rest >>= NEXT_BITS;
        }
        self.bytes.push(byte);
    }

    /// Number of accesses in the frame.
    pub(super) fn count(&self) -> u32 {
        self.count
    }

    /// The frame's payload.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Starts a new frame.
    pub(super) fn clear(&mut self) {
        self.words = [0; SLOTS];
        self.used = [0; SLOTS];
        self.count = 0;
        self.bytes.clear();
    }
}

/// Decodes exactly `count` accesses that fill `bytes`; `None` for any other content.
pub(super) fn decode(bytes: &[u8], count: usize, out: &mut Vec<Access>) -> Option<()> {
    out.clear();
    let mut words = [0u64; SLOTS];
    let mut bytes = bytes.iter();
    for _ in 0..count {
        let first = *bytes.next()?;
        let mut zigzag = u64::from(first >> FIRST_SHIFT) & ((1 << FIRST_BITS) - 1);
        let (mut more, mut shift) = (first & MORE, FIRST_BITS);
        while more != 0 {
            let next = *bytes.next()?;
            if shift > FIRST_BITS + 7 * NEXT_BITS {
                return None;
            }
            zigzag |= u64::from(next & !MORE) << shift;
            shift += NEXT_BITS;
            more = next & MORE;
        }
        let difference = (zigzag >> 1) ^ (zigzag & 1).wrapping_neg();
        let word = &mut words[usize::from(first >> SLOT_SHIFT) % SLOTS];
        *word = word.wrapping_add(difference);
        if *word >> WORD_BITS != 0 {
            return None;
        }
        let gva = GuestVirtAddr(*word << WORD_SHIFT);
        out.push(if first & STORE == 0 {
            Access::load(gva)
        } else {
            Access::store(gva)
        });
    }
    bytes.next().is_none().then_some(())
}
