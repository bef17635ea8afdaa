//! Weighted interleaving of fresh memory (`MPOL_WEIGHTED_INTERLEAVE`): some pages to the fast node, then some to the slow one.

use demeter_policy::{BLOCK_SIZE, GuestVirtAddr, Tier};

use super::Guest;
use crate::machine::radix::PageSize;

/// Where the next page goes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Interleave {
    weights: [u32; 2],
    /// Pages of this round so far.
    taken: u32,
}

impl Interleave {
    /// A round begins, with a number of pages for each node.
    pub(super) fn new(weights: [u32; 2]) -> Self {
        Self { weights, taken: 0 }
    }

    /// The next page's node.
    fn next(&mut self) -> Tier {
        let [fast, slow] = self.weights;
        let node = match self.taken < fast {
            true => Tier::Fast,
            false => Tier::Slow,
        };
        self.taken = (self.taken + 1) % (fast + slow).max(1);
        node
    }
}

impl Guest {
    /// A page from the node whose turn it is, or from the other one if that has none; nothing where memory is not
    /// interleaved.
    pub(super) fn interleaved(&mut self, gva: GuestVirtAddr) -> Option<(PageSize, u32)> {
        let node = self.interleave.as_mut()?.next();
        let is_huge = self.takes_huge(gva);
        let nodes = match node {
            Tier::Fast => [Tier::Fast, Tier::Slow],
            Tier::Slow => [Tier::Slow, Tier::Fast],
        };
        let huge = nodes.iter().filter(|_| is_huge).find_map(|&node| {
            let block = self.page_of(node, PageSize::Huge)?;
            Some((PageSize::Huge, block))
        });
        huge.or_else(|| {
            let base = |&node: &Tier| self.page_of(node, PageSize::Base);
            Some((PageSize::Base, nodes.iter().find_map(base)?))
        })
    }

    fn page_of(&mut self, node: Tier, size: PageSize) -> Option<u32> {
        let frames = match size {
            PageSize::Base => 1,
            _ => (BLOCK_SIZE >> self.page_bits) as u32,
        };
        if !self.has(node.into(), frames, None) {
            return None;
        }
        let node = &mut self.nodes[node as usize];
        match size {
            PageSize::Base => node.take_page(),
            _ => node.take_block(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_round_has_its_weights() {
        let mut interleave = Interleave::new([3, 2]);
        let nodes: Vec<_> = (0..10).map(|_| interleave.next()).collect();
        let (fast, slow) = (Tier::Fast, Tier::Slow);
        assert_eq!(nodes[..5], [fast, fast, fast, slow, slow]);
        assert_eq!(nodes[..5], nodes[5..]);
    }
}
