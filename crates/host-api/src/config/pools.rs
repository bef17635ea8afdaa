//! Pools: memory of a host that is divided between VMs.
//!
//! Most hosts have one. A host with several sockets may have one for each, by its nodes.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use demeter_linux::nodes::{Topology, parse_list};
use demeter_policy::{MIB, NodeId, PerTier, Tier, TierBytes};
use serde::de::value::{MapAccessDeserializer, SeqAccessDeserializer};
use serde::de::{MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::bounds::{mib, within};
use super::error::{ConfigError, wrong};
use super::{Config, VmConfig};
use crate::{PoolName, VmName};

/// Memory that is divided between VMs: `pool` for one pool, `[[pool]]` for several.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct PoolConfig {
    /// Name, by which a VM chooses it. Needed with several pools.
    #[serde(default, skip_serializing_if = "is_nameless")]
    pub name: PoolName,
    /// Fast memory, MiB.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fast_mib: Option<u64>,
    /// Slow memory, MiB.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slow_mib: Option<u64>,
    /// The host's nodes of fast memory: `"0"`, `"0-1,4"`. Needed with several pools. By default they
    /// are detected, and used to tell where VMs' memory lies.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fast_nodes: Option<String>,
    /// The host's nodes of slow memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slow_nodes: Option<String>,
    /// In place of `fast_mib`: all memory of `fast_nodes` but this, MiB.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fast_all_but_mib: Option<u64>,
    /// In place of `slow_mib`: all memory of `slow_nodes` but this, MiB.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slow_all_but_mib: Option<u64>,
}

fn is_nameless(name: &PoolName) -> bool {
    name.0.is_empty()
}

/// A pool on this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pool {
    /// Its memory.
    pub sizes: TierBytes,
    /// The host's nodes of each tier; empty if unknown.
    pub nodes: PerTier<Vec<NodeId>>,
}

impl PoolConfig {
    /// A pool of this size.
    pub fn of(fast_mib: u64, slow_mib: u64) -> Self {
        Self {
            fast_mib: Some(fast_mib),
            slow_mib: Some(slow_mib),
            ..Self::default()
        }
    }

    /// Size of a tier, if the configuration says it.
    pub fn size_mib(&self, tier: Tier) -> Option<u64> {
        match tier {
            Tier::Fast => self.fast_mib,
            Tier::Slow => self.slow_mib,
        }
    }

    fn all_but_mib(&self, tier: Tier) -> Option<u64> {
        match tier {
            Tier::Fast => self.fast_all_but_mib,
            Tier::Slow => self.slow_all_but_mib,
        }
    }

    fn node_list(&self, tier: Tier) -> Option<&str> {
        match tier {
            Tier::Fast => self.fast_nodes.as_deref(),
            Tier::Slow => self.slow_nodes.as_deref(),
        }
    }

    /// The named nodes of a tier; empty if none are named.
    fn nodes(&self, tier: Tier) -> Vec<NodeId> {
        let numbers = parse_list(self.node_list(tier).unwrap_or_default());
        numbers.into_iter().map(NodeId).collect()
    }

    /// Whether each part of a tier's list names nodes.
    fn are_numbers(&self, tier: Tier) -> bool {
        let parts = self
            .node_list(tier)
            .into_iter()
            .flat_map(|of| of.split(','));
        { parts }.all(|part| !parse_list(part).is_empty())
    }

    /// Checks what concerns this pool alone. `key` is its key in the file.
    fn check(&self, key: &str, is_one_of_many: bool) -> Result<(), ConfigError> {
        let named = &self.name.0;
        // The rules of VMs' names. An only pool needs none.
        if named.parse::<VmName>().is_err() && (is_one_of_many || !named.is_empty()) {
            return Err(wrong(
                format!("{key}.name = {named:?} is no name"),
                "give each [[pool]] a name of letters, digits, '-', '_' and '.'",
            ));
        }
        for tier in Tier::ALL {
            let is_named = self.node_list(tier).is_some();
            if !self.are_numbers(tier) {
                return Err(wrong(
                    format!("{key}.{tier}_nodes is no list of nodes"),
                    "list nodes of the host, such as \"0\" or \"0-1,4\"; demeter probe --host shows them",
                ));
            }
            match (self.size_mib(tier), self.all_but_mib(tier)) {
                (None, None) => {
                    return Err(wrong(
                        format!("{key}.{tier}_mib is missing"),
                        "give the MiB that all VMs together may use",
                    ));
                }
                (Some(_), Some(_)) => {
                    return Err(wrong(
                        format!("{key}.{tier}_all_but_mib is set beside {tier}_mib"),
                        "remove one of them",
                    ));
                }
                (None, Some(_)) if !is_named => {
                    return Err(wrong(
                        format!("{key}.{tier}_all_but_mib is set without nodes"),
                        "name the nodes, too: fast_nodes, slow_nodes",
                    ));
                }
                (size, but) => {
                    let value = size.or(but).unwrap_or_default();
                    within(&format!("{key}.{tier}_mib"), value)?;
                }
            }
            if is_one_of_many && !is_named {
                return Err(wrong(
                    format!("{key}.{tier}_nodes is missing"),
                    "with several pools, name the host's nodes of each",
                ));
            }
        }
        Ok(())
    }

    /// Finds the pool's nodes and sizes on a machine.
    fn resolve(&self, key: &str, machine: &Machine) -> Result<Pool, ConfigError> {
        let mut sizes = TierBytes::default();
        let mut nodes = machine.tiers.clone();
        for tier in Tier::ALL {
            if self.node_list(tier).is_some() {
                *nodes.get_mut(tier) = self.nodes(tier);
            }
            let has_mib = match self.node_list(tier).is_some() {
                true => Some(machine.memory_of(&format!("{key}.{tier}_nodes"), nodes.get(tier))?),
                false => None,
            };
            let size_mib = match (self.size_mib(tier), self.all_but_mib(tier), has_mib) {
                (Some(size), _, Some(has)) if size > has => {
                    return Err(wrong(
                        format!(
                            "{key}.{tier}_mib = {size} is more than the {has} MiB of its nodes"
                        ),
                        "give less, and leave some to the host: for example fast_all_but_mib = 2048",
                    ));
                }
                (Some(size), ..) => size,
                (None, Some(but), Some(has)) if but < has => has - but,
                (None, but, has) => {
                    return Err(wrong(
                        format!(
                            "{key}.{tier}_all_but_mib = {} leaves nothing of the {} MiB of its nodes",
                            but.unwrap_or_default(),
                            has.unwrap_or_default()
                        ),
                        "give less",
                    ));
                }
            };
            *sizes.get_mut(tier) = mib(size_mib);
        }
        Ok(Pool { sizes, nodes })
    }
}

/// The facts about a machine that pools need.
struct Machine<'a> {
    topology: Option<&'a Topology>,
    /// Its detected tiers; empty if there are none.
    tiers: PerTier<Vec<NodeId>>,
}

impl Machine<'_> {
    /// Memory of all these nodes, MiB. `key` names them in the file.
    fn memory_of(&self, key: &str, nodes: &[NodeId]) -> Result<u64, ConfigError> {
        let there = self.topology.map_or(&[][..], |of| &of.nodes);
        let mut sum = 0;
        for node in nodes {
            let found = there.iter().find(|of| of.id == *node && of.total.0 > 0);
            let found = found.ok_or_else(|| {
                wrong(
                    format!("{key} names node {node}, which has no memory or is not there"),
                    "demeter probe --host shows the nodes",
                )
            })?;
            sum += found.total.0 / MIB;
        }
        Ok(sum)
    }
}

impl Config {
    /// Checks the pools, and that each VM has one.
    pub(super) fn check_pools(&self) -> Result<(), ConfigError> {
        if self.pool.is_empty() {
            return Err(wrong(
                "pool is empty",
                "describe one, with fast_mib and slow_mib",
            ));
        }
        let many = self.pool.len() > 1;
        let mut names = BTreeSet::new();
        let mut nodes = BTreeSet::new();
        for (at, pool) in self.pool.iter().enumerate() {
            let key = self.key_of(at);
            pool.check(&key, many)?;
            if !names.insert(&pool.name) {
                return Err(wrong(
                    format!("{key}.name = {:?} is taken", pool.name.0),
                    "give each pool a name of its own",
                ));
            }
            for tier in Tier::ALL {
                for node in pool.nodes(tier) {
                    if !nodes.insert(node) {
                        return Err(wrong(
                            format!("{key}.{tier}_nodes: node {node} is named twice"),
                            "a node belongs to one tier of one pool",
                        ));
                    }
                }
            }
        }
        if let Some(named) = &self.defaults.pool
            && !names.contains(named)
        {
            return Err(wrong(
                format!("defaults.pool = {:?} is not there", named.0),
                "set it to the name of a [[pool]]",
            ));
        }
        for (name, vm) in &self.vms {
            if self.pool_of(vm).is_none() {
                let what = match &vm.pool {
                    Some(pool) => format!("vm.{name}.pool = {:?} is not there", pool.0),
                    None => format!("vm.{name} names none of the {} pools", self.pool.len()),
                };
                return Err(wrong(what, "set pool to the name of a [[pool]]"));
            }
        }
        Ok(())
    }

    /// Checks that the VMs' first sizes fit into pools of known size.
    pub(super) fn check_sums(&self) -> Result<(), ConfigError> {
        self.pool.iter().try_for_each(|pool| {
            let sizes = PerTier::from_fn(|tier| pool.size_mib(tier));
            self.check_sum(&pool.name, sizes)
        })
    }

    /// Checks that the VMs' first sizes fit into a pool, as far as its size is known.
    fn check_sum(
        &self,
        pool: &PoolName,
        sizes_mib: PerTier<Option<u64>>,
    ) -> Result<(), ConfigError> {
        for tier in Tier::ALL {
            let Some(pool_mib) = *sizes_mib.get(tier) else {
                continue;
            };
            // Cannot overflow: a size is at most MIB_MAX, and there are at most VMS_MAX of them.
            let own = self
                .vms
                .values()
                .filter(|vm| self.pool_of(vm) == Some(pool));
            let sum_mib: u64 = own.map(|vm| vm.tier(tier).size_mib).sum();
            if sum_mib > pool_mib {
                let of = match pool.0.as_str() {
                    "" => String::new(),
                    name => format!(" of pool {name}"),
                };
                return Err(wrong(
                    format!(
                        "the VMs' {tier}.size_mib{of} add up to {sum_mib}, pool.{tier}_mib is {pool_mib}"
                    ),
                    "enlarge the pool or shrink the VMs",
                ));
            }
        }
        Ok(())
    }

    /// The pool of a VM, if there is one: the one it names, or the only one.
    pub fn pool_of(&self, vm: &VmConfig) -> Option<&PoolName> {
        let mut pools = self.pool.iter().map(|pool| &pool.name);
        match &vm.pool {
            Some(name) => pools.find(|pool| *pool == name),
            None if self.pool.len() == 1 => pools.next(),
            None => None,
        }
    }

    /// The pools on this machine, by name.
    ///
    /// # Errors
    /// A pool does not fit on its nodes, or the VMs do not fit into it.
    pub fn pools(
        &self,
        topology: Option<&Topology>,
    ) -> Result<BTreeMap<PoolName, Pool>, ConfigError> {
        let order = topology.and_then(|topology| topology.order().ok());
        let machine = Machine {
            topology,
            tiers: order.map_or_else(PerTier::default, |order| PerTier {
                fast: order.tiers.fastest().to_vec(),
                slow: order.tiers.slower().collect(),
            }),
        };
        let mut pools = BTreeMap::new();
        for (at, pool) in self.pool.iter().enumerate() {
            let found = pool.resolve(&self.key_of(at), &machine)?;
            let sizes = PerTier::from_fn(|tier| Some(found.sizes.get(tier).0 / MIB));
            self.check_sum(&pool.name, sizes)?;
            pools.insert(pool.name.clone(), found);
        }
        Ok(pools)
    }

    /// The key of a pool in the file.
    fn key_of(&self, at: usize) -> String {
        match self.pool.len() {
            1 => "pool".into(),
            _ => format!("pool.{at}"),
        }
    }
}

/// Reads one pool or a list of them.
pub(super) fn read<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<PoolConfig>, D::Error> {
    struct OneOrMany;

    impl<'de> Visitor<'de> for OneOrMany {
        type Value = Vec<PoolConfig>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a pool, or several as [[pool]]")
        }

        fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
            Ok(vec![PoolConfig::deserialize(MapAccessDeserializer::new(
                map,
            ))?])
        }

        fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<Self::Value, A::Error> {
            Deserialize::deserialize(SeqAccessDeserializer::new(seq))
        }
    }

    from.deserialize_any(OneOrMany)
}

/// The schema of [`read`].
#[cfg(feature = "schema")]
pub(super) fn schema(generator: &mut schemars::SchemaGenerator) -> schemars::Schema {
    let one = generator.subschema_for::<PoolConfig>();
    let many = generator.subschema_for::<Vec<PoolConfig>>();
    schemars::json_schema!({ "anyOf": [one, many] })
}

/// Writes one pool as a table, several as a list.
pub(super) fn write<S: Serializer>(pools: &[PoolConfig], to: S) -> Result<S::Ok, S::Error> {
    match pools {
        [one] => one.serialize(to),
        many => many.serialize(to),
    }
}
