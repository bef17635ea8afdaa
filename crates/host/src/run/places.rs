//! Compares where a VM's memory lies with the nodes of its tiers.

use demeter_policy::{ByteCount, MIB, NodeId, PerTier, Tier, TierBytes};

use crate::memory::{OnNodes, Places};
use crate::view::{PlaceView, PlacesView};

/// Part of a tier's memory that may lie elsewhere before it is a problem: one in this many bytes.
const TOLERATED: u64 = 20;

/// The places of a VM's memory, and how much of it is not on its tier's nodes.
pub(super) fn view(places: &Places, nodes: &PerTier<Vec<NodeId>>) -> PlacesView {
    let of_tiers = by_tier(places, nodes);
    let views = |tier| {
        let of_node = |(node, bytes): (&NodeId, &ByteCount)| PlaceView {
            node: node.0,
            bytes: bytes.0,
        };
        of_tiers.get(tier).iter().map(of_node).collect()
    };
    let is_known = Tier::ALL.iter().all(|tier| !nodes.get(*tier).is_empty());
    let elsewhere = TierBytes::from_fn(|tier| sum(&others(&of_tiers, nodes, tier)));
    PlacesView {
        fast: views(Tier::Fast),
        slow: views(Tier::Slow),
        elsewhere: is_known.then(|| elsewhere.into()),
    }
}

/// A line for people if much of a tier's memory is not on the tier's nodes.
pub(super) fn problem(places: &Places, nodes: &PerTier<Vec<NodeId>>) -> Option<String> {
    let of_tiers = by_tier(places, nodes);
    Tier::ALL.into_iter().find_map(|tier| {
        let own = nodes.get(tier);
        let others = others(&of_tiers, nodes, tier);
        let (elsewhere, all) = (sum(&others), sum(of_tiers.get(tier)));
        if own.is_empty() || elsewhere.0 <= all.0 / TOLERATED {
            return None;
        }
        let (elsewhere, all) = (elsewhere.0 / MIB, all.0 / MIB);
        let others = list(others.keys());
        Some(match places {
            Places::OfTiers(_) => format!(
                "{elsewhere} of {all} MiB of its {tier} memory lie on node {others}, and the {tier} tier is node {}; \
                 bind it (demeter host xml; QEMU: host-nodes={},policy=bind), and start the VM again",
                list(own),
                own[0],
            ),
            Places::Whole(_) => format!(
                "{elsewhere} MiB of its memory lie on node {others}, which is in no tier of its pool; bind its memory \
                 to node {}, and start the VM again",
                list(nodes.fast.iter().chain(&nodes.slow)),
            ),
        })
    })
}

/// Memory of each tier by node. Where the nodes are the tiers, memory on a node of no tier counts as slow.
fn by_tier(places: &Places, nodes: &PerTier<Vec<NodeId>>) -> PerTier<OnNodes> {
    match places {
        Places::OfTiers(of) => of.clone(),
        Places::Whole(all) => {
            let is_fast = |node: &NodeId| nodes.fast.contains(node);
            let (fast, slow) = all.iter().partition(|(node, _)| is_fast(node));
            PerTier { fast, slow }
        }
    }
}

/// Memory of a tier on nodes that are not the tier's.
fn others(of_tiers: &PerTier<OnNodes>, nodes: &PerTier<Vec<NodeId>>, tier: Tier) -> OnNodes {
    let mut others = of_tiers.get(tier).clone();
    others.retain(|node, bytes| !nodes.get(tier).contains(node) && bytes.0 > 0);
    others
}

fn sum(places: &OnNodes) -> ByteCount {
    ByteCount(places.values().fold(0, |sum, of| sum.saturating_add(of.0)))
}

fn list<'a>(nodes: impl IntoIterator<Item = &'a NodeId>) -> String {
    let numbers: Vec<_> = nodes.into_iter().map(ToString::to_string).collect();
    numbers.join(",")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::view::TierView;

    fn places(fast: &[(u32, u64)], slow: &[(u32, u64)]) -> Places {
        let of = |of: &[(u32, u64)]| {
            let bytes = |&(node, mib): &(u32, u64)| (NodeId(node), ByteCount(mib * MIB));
            of.iter().map(bytes).collect()
        };
        Places::OfTiers(PerTier {
            fast: of(fast),
            slow: of(slow),
        })
    }

    #[test]
    fn memory_on_nodes_of_another_tier_is_told() {
        let nodes = PerTier {
            fast: vec![NodeId(0), NodeId(1)],
            slow: vec![NodeId(2)],
        };
        let right = places(&[(0, 90), (1, 6), (2, 4)], &[(2, 300)]);
        assert_eq!(problem(&right, &nodes), None, "a few pages are no problem");
        let elsewhere = view(&right, &nodes).elsewhere.unwrap();
        assert_eq!(elsewhere.fast_bytes, 4 * MIB);

        let wrong = places(&[(0, 60), (2, 40)], &[(2, 300)]);
        let said = problem(&wrong, &nodes).unwrap();
        assert!(
            said.starts_with(
                "40 of 100 MiB of its fast memory lie on node 2, and the fast tier is node 0,1; bind it"
            ),
            "{said}"
        );
        let seen = view(&wrong, &nodes);
        assert_eq!(
            seen.elsewhere,
            Some(TierView {
                fast_bytes: 40 * MIB,
                slow_bytes: 0
            })
        );
        assert_eq!(
            seen.fast[1],
            PlaceView {
                node: 2,
                bytes: 40 * MIB
            }
        );

        // On a host without tiers there is nothing to compare with.
        let none = PerTier::default();
        assert_eq!(
            (view(&wrong, &none).elsewhere, problem(&wrong, &none)),
            (None, None)
        );
    }

    #[test]
    fn where_the_nodes_are_the_tiers_memory_on_another_node_is_told() {
        let nodes = PerTier {
            fast: vec![NodeId(1)],
            slow: vec![NodeId(3), NodeId(5)],
        };
        let whole = |of: &[(u32, u64)]| {
            let bytes = |&(node, mib): &(u32, u64)| (NodeId(node), ByteCount(mib * MIB));
            Places::Whole(of.iter().map(bytes).collect())
        };
        let right = whole(&[(1, 40), (3, 60), (5, 10)]);
        let seen = view(&right, &nodes);
        let on = |places: &[PlaceView]| {
            let places = places.iter().map(|of| (of.node, of.bytes / MIB));
            places.collect::<Vec<_>>()
        };
        assert_eq!(
            (on(&seen.fast), on(&seen.slow)),
            (vec![(1, 40)], vec![(3, 60), (5, 10)])
        );
        assert_eq!(seen.elsewhere, Some(TierView::default()));
        assert_eq!(problem(&right, &nodes), None);

        let wrong = whole(&[(0, 30), (1, 40), (3, 60)]);
        let elsewhere = view(&wrong, &nodes).elsewhere.unwrap();
        assert_eq!((elsewhere.fast_bytes, elsewhere.slow_bytes), (0, 30 * MIB));
        let said = problem(&wrong, &nodes).unwrap();
        assert!(
            said.starts_with(
                "30 MiB of its memory lie on node 0, which is in no tier of its pool; bind its memory to node 1,3,5"
            ),
            "{said}"
        );
    }
}
