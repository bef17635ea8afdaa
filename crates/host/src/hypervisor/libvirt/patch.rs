//! What a domain's XML lacks to be sized, as a patch.
//!
//! What is there stays as it is written: lines are put in, and only what is wrong is replaced.

use std::ops::Range;

use demeter_policy::provision::ProvisionerKind;
use demeter_policy::{ByteCount, MIB, NodeId, PerTier};
use roxmltree::Node;

use super::PORT;
use super::domain::{Facts, cells_of, child, parse, size};

/// What the domain is to have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wanted {
    /// How its size is to be changed.
    pub provisioner: ProvisionerKind,
    /// The fast cell of a domain that has no two cells yet; a quarter of its memory without it.
    pub fast: Option<ByteCount>,
}

/// The nodes that the patch makes: the first is fast.
const NODES: PerTier<NodeId> = PerTier {
    fast: NodeId(0),
    slow: NodeId(1),
};

/// Slots for memory devices, where the domain has none.
const SLOTS: u32 = 16;

/// What is to be changed in a domain's XML, as a unified diff of a file NAME.xml; `None` if it has all.
///
/// # Errors
/// A line for a person, where the XML cannot be read or mended.
pub fn patch(name: &str, xml: &str, wanted: Wanted) -> Result<Option<String>, String> {
    let mended = mended(xml, wanted)?;
    if mended == xml {
        return Ok(None);
    }
    let lacks = Facts::read(&mended)?.check(wanted.provisioner, NODES);
    lacks.map_err(|lack| format!("{lack}, and there is no place to put it in"))?;
    let file = format!("{name}.xml");
    let diff = similar::TextDiff::from_lines(xml, &mended);
    Ok(Some(diff.unified_diff().header(&file, &file).to_string()))
}

/// The XML with what it lacks.
fn mended(xml: &str, wanted: Wanted) -> Result<String, String> {
    let facts = Facts::read(xml)?;
    let document = parse(xml)?;
    let domain = document.root_element();
    let devices =
        child(domain, &["devices"]).ok_or("its XML has no <devices> to put anything in")?;
    let mut edits = Edits { xml, edits: vec![] };
    let elastic = wanted.provisioner == ProvisionerKind::VirtioMem;
    let enough_cells = facts.cells.len() >= 2;
    if !elastic && (!enough_cells || facts.cells.iter().any(|cell| !cell.shared)) {
        edits.share(domain, devices);
        // One cell alone is replaced as a whole.
        if enough_cells {
            edits.share_cells(domain);
        }
    }
    let mut sizes: Vec<_> = facts.cells.iter().map(|of| (of.node, of.size)).collect();
    if !enough_cells {
        let tiers = split(domain, wanted.fast)?;
        sizes = vec![(NODES.fast, tiers.fast), (NODES.slow, tiers.slow)];
        edits.cells(domain, devices, tiers)?;
    }
    let lacking: Vec<_> = sizes
        .into_iter()
        .filter(|(node, _)| elastic && !facts.elastic.contains(node))
        .collect();
    if !lacking.is_empty() {
        edits.devices(domain, devices, &lacking)?;
    }
    if !facts.has_port && wanted.provisioner == ProvisionerKind::DemeterBalloon {
        let channel = format!(
            "    <channel type='unix'>\n      <target type='virtio' name='{PORT}'/>\n    </channel>\n"
        );
        edits.before_end(devices, channel);
    }
    edits.apply()
}

/// A domain's memory in two cells.
fn split(domain: Node, fast: Option<ByteCount>) -> Result<PerTier<ByteCount>, String> {
    let memory = child(domain, &["memory"]);
    let whole = memory.and_then(|of| size(of.text(), of.attribute("unit")));
    let whole = whole.ok_or("its XML has no <memory> that can be read")?;
    let fast = fast.unwrap_or(ByteCount(whole.0 / 4 / MIB * MIB));
    let slow = ByteCount(whole.0.saturating_sub(fast.0));
    if fast.0 == 0 || slow.0 == 0 {
        let (whole, fast) = (whole.0 / MIB, fast.0 / MIB);
        return Err(format!(
            "its {whole} MiB cannot be split into {fast} MiB of fast memory and the rest; give --fast-mib \
             less than it has, and more than 0"
        ));
    }
    Ok(PerTier { fast, slow })
}

struct Edits<'a> {
    xml: &'a str,
    /// What is put in which place; none overlaps another.
    edits: Vec<(Range<usize>, String)>,
}

impl Edits<'_> {
    /// Shared memory in memfds.
    fn share(&mut self, domain: Node, devices: Node) {
        let mut text = String::from("  <memoryBacking>\n");
        let there = child(domain, &["memoryBacking"]);
        let kept = there.into_iter().flat_map(|of| of.children());
        // Memory on hugetlbfs is never given back.
        let kept = kept.filter(|of| {
            let replaced = ["source", "access", "hugepages"];
            of.is_element() && !replaced.contains(&of.tag_name().name())
        });
        for element in kept {
            text += &format!("    {}\n", &self.xml[element.range()]);
        }
        text += "    <source type='memfd'/>\n    <access mode='shared'/>\n  </memoryBacking>\n";
        match there {
            Some(there) => self.replace(there.range(), text.trim()),
            None => self.before(devices, text),
        }
    }

    /// No private cells.
    fn share_cells(&mut self, domain: Node) {
        for cell in cells_of(domain) {
            let access = cell.attributes().find(|of| of.name() == "memAccess");
            if let Some(access) = access.filter(|access| access.value() != "shared") {
                self.replace(access.range_value(), "shared");
            }
        }
    }

    /// Two cells; all CPUs are in the fast one.
    fn cells(
        &mut self,
        domain: Node,
        devices: Node,
        tiers: PerTier<ByteCount>,
    ) -> Result<(), String> {
        let cpus = child(domain, &["vcpu"]).and_then(|of| of.text()?.trim().parse::<u32>().ok());
        let cpus = match cpus {
            Some(0) | None => return Err("its XML has no <vcpu> that can be read".into()),
            Some(1) => "0".into(),
            Some(count) => format!("0-{}", count - 1),
        };
        let [fast, slow] = [tiers.fast.0 >> 10, tiers.slow.0 >> 10];
        let numa = format!(
            "    <numa>\n      \
             <cell id='0' cpus='{cpus}' memory='{fast}' unit='KiB' memAccess='shared'/>\n      \
             <cell id='1' memory='{slow}' unit='KiB' memAccess='shared'/>\n    \
             </numa>\n"
        );
        match (child(domain, &["cpu"]), child(domain, &["cpu", "numa"])) {
            (_, Some(there)) => self.replace(there.range(), numa.trim()),
            (Some(cpu), None) => {
                let text = &self.xml[cpu.range()];
                match text.strip_suffix("/>") {
                    Some(open) => {
                        let open = format!("{open}>\n{numa}  </cpu>");
                        self.replace(cpu.range(), &open);
                    }
                    None => self.before_end(cpu, numa),
                }
            }
            (None, None) => self.before(devices, format!("  <cpu>\n{numa}  </cpu>\n")),
        }
        Ok(())
    }

    /// A virtio-mem device for each cell, by which it can grow to twice its size.
    fn devices(
        &mut self,
        domain: Node,
        devices: Node,
        lacking: &[(NodeId, ByteCount)],
    ) -> Result<(), String> {
        if child(domain, &["maxMemory"]).is_none() {
            let memory = child(domain, &["memory"]).ok_or("its XML has no <memory>")?;
            let whole = size(memory.text(), memory.attribute("unit"));
            let whole = whole.ok_or("its XML has no <memory> that can be read")?;
            let more: u64 = lacking.iter().map(|(_, size)| size.0).sum();
            let max = whole.0.saturating_add(more) >> 10;
            let text = format!("  <maxMemory slots='{SLOTS}' unit='KiB'>{max}</maxMemory>\n");
            self.before(memory, text);
        }
        for (node, size) in lacking {
            let text = format!(
                "    <memory model='virtio-mem'>\n      <target>\n        \
                 <size unit='KiB'>{}</size>\n        <node>{node}</node>\n        \
                 <block unit='KiB'>2048</block>\n        <requested unit='KiB'>0</requested>\n      \
                 </target>\n    </memory>\n",
                size.0 >> 10
            );
            self.before_end(devices, text);
        }
        Ok(())
    }

    fn replace(&mut self, range: Range<usize>, text: &str) {
        self.edits.push((range, text.into()));
    }

    /// Lines before the one in which an element begins.
    fn before(&mut self, element: Node, lines: String) {
        self.at(element.range().start, lines);
    }

    /// Lines before the one in which an element ends.
    fn before_end(&mut self, element: Node, lines: String) {
        let range = element.range();
        let end = self.xml[range.clone()].rfind("</").unwrap_or(0);
        self.at(range.start + end, lines);
    }

    fn at(&mut self, place: usize, lines: String) {
        let line = self.xml[..place].rfind('\n').map_or(0, |end| end + 1);
        // Where other things stand before it in its line, it is put right there.
        let blank = self.xml[line..place].trim().is_empty();
        let place = if blank { line } else { place };
        self.edits.push((place..place, lines));
    }

    fn apply(mut self) -> Result<String, String> {
        // Stable: what is put in the same place stays in order.
        self.edits.sort_by_key(|(range, _)| range.start);
        let mut text = String::new();
        let mut done = 0;
        for (range, new) in self.edits {
            let kept = self.xml.get(done..range.start);
            text += kept.ok_or("its XML is made so that it has to be changed by hand")?;
            text += &new;
            done = range.end;
        }
        Ok(text + &self.xml[done..])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BALLOON: Wanted = Wanted {
        provisioner: ProvisionerKind::DemeterBalloon,
        fast: None,
    };
    const ELASTIC: Wanted = Wanted {
        provisioner: ProvisionerKind::VirtioMem,
        fast: Some(ByteCount(100 * MIB)),
    };

    fn domain(middle: &str, devices: &str) -> String {
        format!(
            "<domain type='qemu'>\n  <name>db</name>\n  <memory unit='KiB'>409600</memory>\n  \
             <vcpu>4</vcpu>\n{middle}  <devices>\n{devices}  </devices>\n</domain>\n"
        )
    }

    #[test]
    fn whatever_is_there_becomes_a_domain_that_lacks_nothing() {
        let cells = "<numa><cell id='0' cpus='0-3' memory='100' unit='MiB'/><cell id='1' \
                     memory='300' unit='MiB' memAccess='private'/></numa>";
        for (middle, devices) in [
            ("", ""),
            ("  <cpu mode='host-model'/>\n", ""),
            (
                "  <cpu mode='host-model'>\n  <topology sockets='1'/>\n  </cpu>\n",
                "",
            ),
            (
                "  <cpu><numa><cell id='0' memory='409600'/></numa></cpu>\n",
                "",
            ),
            (
                "  <cpu><numa><cell id='0' memory='409600' memAccess='private'/></numa></cpu>\n",
                "",
            ),
            (&format!("  <cpu>{cells}</cpu>\n"), ""),
            (
                "  <memoryBacking>\n    <hugepages/>\n    <nosharepages/>\n  </memoryBacking>\n",
                "    <channel type='unix'><target type='virtio' name='org.demeter.0'/></channel>\n",
            ),
        ] {
            let xml = domain(middle, devices);
            for wanted in [BALLOON, ELASTIC] {
                let new = mended(&xml, wanted).unwrap();
                let facts = Facts::read(&new).unwrap();
                facts.check(wanted.provisioner, NODES).unwrap();
                let all: u64 = facts.cells.iter().map(|cell| cell.size.0).sum();
                assert_eq!(all, 400 * MIB, "{new}");
                assert_eq!(facts.cells[0].size, ByteCount(100 * MIB), "{new}");
                assert!(!new.contains("hugepages") || wanted == ELASTIC);
                assert_eq!(new.contains("nosharepages"), xml.contains("nosharepages"));
                assert_eq!(
                    mended(&new, wanted).unwrap(),
                    new,
                    "nothing is left to mend"
                );
                assert_eq!(patch("db", &new, wanted), Ok(None));
                let diff = patch("db", &xml, wanted).unwrap().unwrap();
                assert!(diff.starts_with("--- db.xml\n+++ db.xml\n@@ "), "{diff}");
            }
        }
    }

    #[test]
    fn what_cannot_be_mended_is_told() {
        let all = Wanted {
            fast: Some(ByteCount(400 * MIB)),
            ..BALLOON
        };
        for (xml, wanted, want) in [
            ("<domain", BALLOON, "cannot be read"),
            ("<domain a='1'/\n<domain/>", BALLOON, "cannot be read"),
            ("<network/>", BALLOON, "no domain"),
            ("<domain/>", BALLOON, "no <devices>"),
            ("<domain><devices/></domain>", BALLOON, "no <memory>"),
            (&domain("", "").replace("vcpu", "x"), BALLOON, "no <vcpu>"),
            (&domain("", ""), all, "--fast-mib"),
            (
                "<!DOCTYPE d [<!ENTITY a 'x'>]><domain>&a;</domain>",
                BALLOON,
                "cannot be read",
            ),
        ] {
            let said = patch("db", xml, wanted).unwrap_err();
            assert!(said.contains(want), "{want}: {said}");
            assert_eq!(said.lines().count(), 1);
        }
    }

    #[test]
    fn why_a_domain_cannot_be_sized_is_told() {
        let cell = |node, access| format!("<cell id='{node}' memory='1' memAccess='{access}'/>");
        let with = |cells: &str, devices: &str| {
            Facts::read(&domain(
                &format!("<cpu><numa>{cells}</numa></cpu>\n"),
                devices,
            ))
            .unwrap()
        };
        let shared = cell(0, "shared") + &cell(1, "shared");
        let balloon = ProvisionerKind::DemeterBalloon;
        for (cells, kind, want) in [
            (cell(0, "shared"), balloon, "no NUMA cell 1"),
            (
                cell(0, "shared") + &cell(1, "private"),
                balloon,
                "cell 1 has private memory",
            ),
            (shared.clone(), balloon, "no channel org.demeter.0"),
            (shared.clone(), ProvisionerKind::VirtioMem, "no virtio-mem"),
        ] {
            let said = with(&cells, "").check(kind, NODES).unwrap_err().to_string();
            assert!(said.contains(want), "{want}: {said}");
        }
        let facts = with(
            &shared,
            "<channel type='unix'><source mode='bind' path='/run/c'/><target name='org.demeter.0'/></channel>",
        );
        assert_eq!(facts.check(balloon, NODES), Ok(()));
        assert_eq!(facts.agent, Some("/run/c".into()));
        assert!(!facts.running);
        assert!(
            Facts::read("<domain><cpu><numa><cell memory='x'/></numa></cpu></domain>").is_err()
        );
    }
}
