//! Values for the controller in a domain's own XML, set by the domain's owner.
//!
//! ```xml
//! <metadata>
//!   <demeter:vm xmlns:demeter="urn:demeter:vm:1" share="300" pool="socket0">
//!     <demeter:fast guarantee_mib="512" limit_mib="4096"/>
//!   </demeter:vm>
//! </metadata>
//! ```
//!
//! `virsh metadata` writes it. The names of keys are those of a VM's section in the configuration.

use demeter_proto::shown;
use roxmltree::Node;

use super::xml::child;
use crate::PoolName;
use crate::config::{TierDefaults, VmChange};

/// The namespace of the element; libvirt keeps one element for each.
const NAMESPACE: &str = "urn:demeter:vm:1";

/// Reads a domain's element. Without one nothing is set.
///
/// # Errors
/// A line for people: a name or value that is not understood. Half of it is never used.
pub(super) fn read(domain: Node) -> Result<VmChange, String> {
    let mut change = VmChange::default();
    let ours = |of: &Node| of.is_element() && of.tag_name().namespace() == Some(NAMESPACE);
    let Some(element) = child(domain, &["metadata"]).and_then(|all| all.children().find(ours))
    else {
        return Ok(change);
    };
    for attribute in element.attributes() {
        match attribute.name() {
            "share" => change.share = Some(number(element, attribute.name())?),
            "slowdown_max_percent" => {
                change.slowdown_max_percent = Some(number(element, attribute.name())?);
            }
            "pool" => change.pool = Some(PoolName(attribute.value().into())),
            other => return Err(unknown(other)),
        }
    }
    for inner in element.children().filter(Node::is_element) {
        match inner.tag_name().name() {
            "fast" => change.fast = tier(inner)?,
            "slow" => change.slow = tier(inner)?,
            other => return Err(unknown(other)),
        }
    }
    Ok(change)
}

fn tier(element: Node) -> Result<TierDefaults, String> {
    let mut tier = TierDefaults::default();
    for attribute in element.attributes() {
        match attribute.name() {
            "guarantee_mib" => tier.guarantee_mib = Some(number(element, attribute.name())?),
            "limit_mib" => tier.limit_mib = Some(number(element, attribute.name())?),
            other => return Err(unknown(other)),
        }
    }
    Ok(tier)
}

fn number<T: std::str::FromStr>(element: Node, name: &str) -> Result<T, String> {
    let text = element.attribute(name).unwrap_or_default();
    text.parse().map_err(|_| {
        format!(
            "its metadata has {name} = {:?}; give a whole number from 0 on",
            shown(text)
        )
    })
}

fn unknown(name: &str) -> String {
    format!(
        "its metadata has {:?}; give share, slowdown_max_percent or pool, and in elements fast and slow \
         guarantee_mib or limit_mib",
        shown(name)
    )
}

#[cfg(test)]
mod tests {
    use super::super::xml::parse;
    use super::*;

    fn read(inside: &str) -> Result<VmChange, String> {
        let xml = format!("<domain><metadata>{inside}</metadata></domain>");
        super::read(parse(&xml).unwrap().root_element())
    }

    #[test]
    fn what_an_owner_says_is_read_whole_or_refused() {
        let element = |attributes: &str, inner: &str| {
            format!("<d:vm xmlns:d='urn:demeter:vm:1' {attributes}>{inner}</d:vm>")
        };
        assert_eq!(read(""), Ok(VmChange::default()));
        let other = "<x:vm xmlns:x='http://example.org' share='no number'/>";
        assert_eq!(read(other), Ok(VmChange::default()));
        let full = element(
            "share='300' slowdown_max_percent='10' pool='s0'",
            "<d:fast guarantee_mib='512' limit_mib='4096'/>\n<d:slow guarantee_mib='1024'/>",
        );
        let change = read(&(other.to_owned() + &full)).unwrap();
        assert_eq!(
            (change.share, change.slowdown_max_percent),
            (Some(300), Some(10))
        );
        assert_eq!(change.pool, Some(PoolName("s0".into())));
        assert_eq!(
            (change.fast.guarantee_mib, change.fast.limit_mib),
            (Some(512), Some(4096))
        );
        assert_eq!(
            (change.slow.guarantee_mib, change.slow.limit_mib),
            (Some(1024), None)
        );
        for (attributes, inner, why) in [
            ("shares='1'", "", "has \"shares\""),
            ("share='-1'", "", "share = \"-1\""),
            ("share='4294967296'", "", "share = "),
            ("share=''", "", "share = \"\""),
            ("", "<d:medium/>", "has \"medium\""),
            ("", "<d:fast size_mib='1'/>", "has \"size_mib\""),
            ("", "<d:fast limit_mib='1.5'/>", "limit_mib = \"1.5\""),
        ] {
            let said = read(&element(attributes, inner)).unwrap_err();
            assert!(said.contains(why) && !said.contains('\n'), "{said}");
        }
    }
}
