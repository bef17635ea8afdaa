//! Reads elements and sizes in a domain's XML.

use demeter_policy::ByteCount;
use demeter_proto::shown;
use roxmltree::{Document, Node};

/// Parses XML. The error is one line for people; quoted text is cleaned.
pub(super) fn parse(xml: &str) -> Result<Document<'_>, String> {
    let wrong = |error: roxmltree::Error| {
        let why = shown(&error.to_string());
        format!("libvirt's XML cannot be read: {why}")
    };
    Document::parse(xml).map_err(wrong)
}

/// The NUMA cells of a domain.
pub(super) fn cells_of<'a, 'input>(
    domain: Node<'a, 'input>,
) -> impl Iterator<Item = Node<'a, 'input>> {
    let cells = child(domain, &["cpu", "numa"])
        .into_iter()
        .flat_map(|numa| numa.children());
    cells.filter(|of| of.has_tag_name("cell"))
}

/// The first element at a path below another.
pub(super) fn child<'a, 'input>(node: Node<'a, 'input>, path: &[&str]) -> Option<Node<'a, 'input>> {
    path.iter().try_fold(node, |node, name| {
        node.children().find(|child| child.has_tag_name(*name))
    })
}

/// Parses a size with its unit; the default is KiB.
pub(super) fn size(number: Option<&str>, unit: Option<&str>) -> Option<ByteCount> {
    let number: u64 = number?.trim().parse().ok()?;
    let unit = match unit.unwrap_or("KiB") {
        "b" | "bytes" => 1,
        "KB" => 1000,
        "k" | "KiB" => 1 << 10,
        "MB" => 1_000_000,
        "M" | "MiB" => 1 << 20,
        "GB" => 1_000_000_000,
        "G" | "GiB" => 1 << 30,
        "TB" => 1_000_000_000_000,
        "T" | "TiB" => 1 << 40,
        _ => return None,
    };
    number.checked_mul(unit).map(ByteCount)
}
