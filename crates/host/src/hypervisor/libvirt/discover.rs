//! Discovers VMs through libvirt: lists domains at every start and stop of one.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::time::Duration;

use demeter_policy::provision::ProvisionerKind;
use demeter_policy::{ByteCount, MIB, NodeId, PerTier, TierBytes};
use demeter_proto::shown;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout_at};

use super::LibvirtError;
use super::client::{Client, Life, Which};
use super::domain::{Facts, Lack};
use crate::VmName;
use crate::config::{Libvirt, VmChange, VmConfig};
use crate::outside::Outside;

/// Retry interval of the connection.
const PAUSE: Duration = Duration::from_secs(2);

/// Interval between lists without an event.
const LIST_EVERY: Duration = Duration::from_secs(10);

/// All running domains.
#[derive(Debug, Default)]
pub(crate) struct Domains {
    /// Domains that can be managed.
    pub managed: BTreeMap<VmName, FoundDomain>,
    /// The others, by name, cleaned for people.
    pub left: BTreeMap<String, LeftDomain>,
}

/// A domain that can be managed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FoundDomain {
    /// The VM as its hardware says.
    pub config: VmConfig,
    /// The host's nodes that each tier's memory is bound to; empty if it may lie anywhere.
    pub bound: PerTier<Vec<NodeId>>,
    /// Values that its owner sets in its XML.
    pub own: VmChange,
}

/// A domain that is not managed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LeftDomain {
    /// The reason.
    pub why: String,
    /// All its memory, if its XML states it.
    pub memory: ByteCount,
}

/// Lists domains until the receiver is dropped. Each new obstacle is logged once.
pub(crate) async fn discover(libvirt: Libvirt, found: mpsc::Sender<Domains>) {
    let outside = Outside::default();
    let mut told = String::new();
    while !found.is_closed() {
        let Err(error) = look(&libvirt, &outside, &found).await;
        let why = error.to_string();
        if told != why {
            tracing::warn!("{why}");
            told = why;
        }
        sleep(PAUSE).await;
    }
}

async fn look(
    libvirt: &Libvirt,
    outside: &Outside,
    found: &mpsc::Sender<Domains>,
) -> Result<Infallible, LibvirtError> {
    let mut client = Client::connect(libvirt, outside).await?;
    client.watch(None).await?;
    loop {
        let mut domains = Domains::default();
        for domain in client.running().await? {
            let facts = match client.xml(&domain, Which::Running).await {
                Ok(xml) => Facts::read(&xml),
                // The domain has stopped meanwhile.
                Err(LibvirtError::Refused { .. }) => continue,
                Err(error) => return Err(error),
            };
            let memory = facts.as_ref().ok().and_then(|facts| facts.memory);
            match facts.and_then(|facts| managed(&domain.name, &facts)) {
                Ok((name, found)) => drop(domains.managed.insert(name, found)),
                Err(why) => {
                    let memory = memory.unwrap_or_default();
                    let why = shown(&why);
                    let left = LeftDomain { why, memory };
                    domains.left.insert(shown(&domain.name), left);
                }
            }
        }
        if found.send(domains).await.is_err() {
            return Err(LibvirtError::Gone {
                socket: libvirt.socket(),
                why: "the receiver has gone".into(),
            });
        }
        let until = Instant::now() + LIST_EVERY;
        while let Ok(life) = timeout_at(until, client.next_life()).await {
            if life? != Life::Other {
                break;
            }
        }
    }
}

/// A domain without a section, or the reason why it cannot be managed.
fn managed(domain: &str, facts: &Facts) -> Result<(VmName, FoundDomain), String> {
    let name: VmName = domain
        .parse()
        .map_err(|error: crate::BadVmName| error.to_string())?;
    if let Some(kind) = &facts.confidential {
        return Err(Lack::Confidential(kind.clone()).to_string());
    }
    let cells = facts.cells.len();
    if cells < 2 {
        return Err(format!(
            "it has {cells} NUMA cells, not two; `demeter host xml {domain}` prints what its XML lacks"
        ));
    }
    let tiers = facts.tiers().map_err(|why| {
        format!("{why}; give it a section with libvirt = {domain:?}, fast.node and slow.node")
    })?;
    let cell = |tier| {
        let mut cells = facts.cells.iter();
        cells.find(|cell| cell.node == *tiers.get(tier))
    };
    let sizes = TierBytes::from_fn(|tier| cell(tier).map(|of| of.size).unwrap_or_default());
    let bound = PerTier::from_fn(|tier| cell(tier).map(|of| of.bound.clone()).unwrap_or_default());
    let of_domain = |kind| {
        let mut config = VmConfig::of_domain(&name, kind, sizes);
        config.fast.node = Some(tiers.fast.0);
        config.slow.node = Some(tiers.slow.0);
        config
    };
    let balloon = of_domain(ProvisionerKind::DemeterBalloon);
    let nodes = balloon.nodes();
    let config = match facts.check(balloon.provisioner, nodes) {
        Ok(()) => {
            let mut limited = balloon;
            limited.fast.limit_mib = Some(sizes.fast.0 / MIB);
            limited.slow.limit_mib = Some(sizes.slow.0 / MIB);
            limited
        }
        Err(lack) => {
            let elastic = of_domain(ProvisionerKind::VirtioMem);
            let checked = facts.check(elastic.provisioner, nodes);
            checked.map_err(|_| lack.to_string())?;
            elastic
        }
    };
    let own = facts.own.clone()?;
    for config in [&config, &own.apply(config.clone())] {
        config.check(&name).map_err(|error| error.bare())?;
    }
    Ok((name, FoundDomain { config, bound, own }))
}

#[cfg(test)]
mod tests {
    use demeter_policy::Tier;

    use super::*;

    fn managed(cells: &str, devices: &str) -> Result<VmConfig, String> {
        let xml = format!(
            "<domain id='1'><cpu><numa>{cells}</numa></cpu><devices>{devices}</devices></domain>"
        );
        super::managed("db", &Facts::read(&xml).unwrap()).map(|(_, of)| of.config)
    }

    #[test]
    fn what_its_owner_sets_must_fit() {
        let domain = |own: &str| {
            let xml = format!(
                "<domain><metadata><d:vm xmlns:d='urn:demeter:vm:1' {own}</d:vm></metadata><cpu><numa>\
                 <cell id='0' memory='64' unit='MiB' memAccess='shared'/>\
                 <cell id='1' memory='128' unit='MiB' memAccess='shared'/></numa></cpu><devices>\
                 <channel type='unix'><target name='org.demeter.0'/></channel></devices></domain>"
            );
            super::managed("db", &Facts::read(&xml).unwrap()).map(|(_, of)| of.own.share)
        };
        assert_eq!(domain("share='3'>"), Ok(Some(3)));
        for (own, why) in [
            ("share='0'>", "vm.db.share = 0"),
            ("sahre='1'>", "metadata has \"sahre\""),
            (
                ">\n<d:fast guarantee_mib='65' limit_mib='64'/>",
                "guarantee_mib = 65",
            ),
        ] {
            let said = domain(own).unwrap_err();
            assert!(said.contains(why), "{said}");
        }
    }

    #[test]
    fn cells_are_bound_as_libvirt_does_it() {
        let bound = |tune: &str| {
            let xml = format!(
                "<domain><numatune>{tune}</numatune><cpu><numa>\
                 <cell id='0' memory='64' unit='MiB' memAccess='shared'/>\
                 <cell id='1' memory='128' unit='MiB' memAccess='shared'/></numa></cpu><devices>\
                 <channel type='unix'><target name='org.demeter.0'/></channel></devices></domain>"
            );
            let (_, found) = super::managed("db", &Facts::read(&xml).unwrap()).unwrap();
            let numbers = |tier| {
                let nodes = found.bound.get(tier).iter();
                nodes.map(|node| node.0).collect::<Vec<_>>()
            };
            (numbers(Tier::Fast), numbers(Tier::Slow))
        };
        let memnode = |cell, mode, nodes| {
            format!("<memnode cellid='{cell}' mode='{mode}' nodeset='{nodes}'/>")
        };
        assert_eq!(bound(""), (vec![], vec![]));
        let both = memnode(0, "strict", "0-1") + &memnode(1, "interleave", "2");
        assert_eq!(bound(&both), (vec![0, 1], vec![2]));
        // Nodes of the domain hold for cells without their own.
        let of_domain = "<memory mode='strict' nodeset='4-5'/>";
        let one = of_domain.to_owned() + &memnode(0, "strict", "0");
        assert_eq!(bound(&one), (vec![0], vec![4, 5]));
        let preferred = of_domain.to_owned() + &memnode(0, "preferred", "0");
        assert_eq!(bound(&preferred), (vec![], vec![4, 5]));
        for unknown in [
            "<memory mode='strict' placement='auto'/>",
            "<memory mode='strict' nodeset='0-3,^2'/>",
            "<memory mode='strict' nodeset='none'/>",
        ] {
            assert_eq!(bound(unknown), (vec![], vec![]), "{unknown}");
        }
    }

    #[test]
    fn a_domain_is_managed_as_it_was_made() {
        let cells = "<cell id='0' memory='64' unit='MiB' memAccess='shared'/>\
                     <cell id='1' memory='128' unit='MiB' memAccess='shared'/>";
        let port = "<channel type='unix'><target name='org.demeter.0'/></channel>";
        let device = |node| {
            format!("<memory model='virtio-mem'><target><node>{node}</node></target></memory>")
        };
        let elastic = device(0) + &device(1);
        let config = managed(cells, port).unwrap();
        assert_eq!(config.provisioner, ProvisionerKind::DemeterBalloon);
        let sizes = PerTier::from_fn(|tier| config.tier(tier).size_mib);
        assert_eq!((sizes.fast, sizes.slow), (64, 128));
        assert_eq!(config.fast.limit_mib, Some(64));
        assert_eq!(config.memdev(Tier::Slow).as_deref(), Some("ram-node1"));

        let config = managed(cells, &elastic).unwrap();
        assert_eq!(config.provisioner, ProvisionerKind::VirtioMem);
        assert_eq!(config.fast.limit_mib, None);

        assert!(managed(cells, "").unwrap_err().contains("no channel"));
        // Whatever else it has or lacks.
        for kind in ["sev", "sev-snp", "tdx"] {
            let xml = format!("<domain id='1'><launchSecurity type='{kind}'/></domain>");
            let said = super::managed("db", &Facts::read(&xml).unwrap()).unwrap_err();
            let want = format!("it is a confidential VM ({kind}): ");
            assert!(said.starts_with(&want), "{said}");
        }
        assert!(managed("", port).unwrap_err().contains("0 NUMA cells"));
        let both = cells.replace("<cell", "<cell cpus='0'");
        assert!(
            managed(&both, port)
                .unwrap_err()
                .contains("2 of them with CPUs")
        );
        // The cell with CPUs is fast.
        let turned = cells.replace("<cell id='1'", "<cell id='1' cpus='0-3'");
        let config = managed(&turned, port).unwrap();
        assert_eq!((config.fast.node, config.fast.size_mib), (Some(1), 128));
        let small = cells.replace("'128'", "'8'");
        assert!(managed(&small, port).unwrap_err().contains("oom_mib"));
        let facts = Facts::read("<domain/>").unwrap();
        assert!(
            super::managed("a b", &facts)
                .unwrap_err()
                .contains("no name")
        );
    }
}
