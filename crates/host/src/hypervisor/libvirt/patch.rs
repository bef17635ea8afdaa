//! Makes a patch with the elements that a domain's XML needs for sizing.
//!
//! Lines are added and faulty elements replaced; the rest keeps its text.

use std::ops::Range;

use demeter_policy::provision::ProvisionerKind;
use demeter_policy::{ByteCount, MIB, NodeId, PerTier, Tier};
use roxmltree::Node;

use super::PORT;
use super::domain::{Facts, Lack};
use super::xml::{cells_of, child, parse, size};

/// Wanted memory setup of a domain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wanted {
    /// The provisioner that will change its size.
    pub provisioner: ProvisionerKind,
    /// Size of a new fast cell; by default a quarter of the domain's memory.
    pub fast: Option<ByteCount>,
    /// Size of a new slow cell; by default the rest of the memory.
    pub slow: Option<ByteCount>,
    /// Cells of the tiers. Required if the domain has cells whose tiers are not obvious.
    pub cells: Option<PerTier<NodeId>>,
    /// The host's tiers, if it has two.
    pub host: Option<PerTier<HostTier>>,
}

/// A tier of the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostTier {
    /// The host's node.
    pub node: NodeId,
    /// Its speed by the host's firmware, to be repeated in the guest's firmware.
    pub speed: Option<Speed>,
}

/// Speed of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Speed {
    /// Latency, nanoseconds.
    pub latency_ns: u64,
    /// Bandwidth, MB/s.
    pub bandwidth_mb_s: u64,
}

/// Changes to a domain's XML.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Patch {
    /// A unified diff of NAME.xml; `None` if nothing is missing.
    pub diff: Option<String>,
    /// Notes for people: removed elements and why, tiers of the cells, omissions.
    pub notes: Vec<String>,
}

/// Nodes that the patch creates; the first is fast.
const NODES: PerTier<NodeId> = PerTier {
    fast: NodeId(0),
    slow: NodeId(1),
};

/// Slots for memory devices, if the domain has none.
const SLOTS: u32 = 16;

/// Makes the patch of a domain's XML.
///
/// # Errors
/// A line for people: the XML cannot be read or repaired, or the tiers of its cells are unknown.
pub fn patch(name: &str, xml: &str, wanted: Wanted) -> Result<Patch, String> {
    let Mended {
        xml: new, notes, ..
    } = mended(xml, wanted)?;
    if new == xml {
        return Ok(Patch { diff: None, notes });
    }
    let file = format!("{name}.xml");
    let diff = similar::TextDiff::from_lines(xml, &new);
    let diff = diff.unified_diff().header(&file, &file).to_string();
    Ok(Patch {
        diff: Some(diff),
        notes,
    })
}

/// A repaired XML.
struct Mended {
    xml: String,
    notes: Vec<String>,
}

/// Adds the missing elements to an XML.
fn mended(xml: &str, wanted: Wanted) -> Result<Mended, String> {
    let facts = Facts::read(xml)?;
    if let Some(kind) = facts.confidential {
        return Err(Lack::Confidential(kind).to_string());
    }
    let document = parse(xml)?;
    let domain = document.root_element();
    let devices = child(domain, &["devices"]).ok_or("its XML has no <devices>")?;
    let mut edits = Edits {
        xml,
        edits: vec![],
        notes: vec![],
    };
    let elastic = wanted.provisioner == ProvisionerKind::VirtioMem;
    let enough_cells = facts.cells.len() >= 2;
    let tiers = match (enough_cells, wanted.cells) {
        (false, _) => NODES,
        (true, Some(cells)) => cells,
        (true, None) => facts.tiers().map_err(|why| {
            format!(
                "{why}; name them with --fast-cell and --slow-cell, and in its section with \
                     fast.node and slow.node"
            )
        })?,
    };
    if tiers.fast == tiers.slow {
        return Err(
            "one cell cannot be both tiers; give --fast-cell and --slow-cell different cells"
                .into(),
        );
    }
    if tiers != NODES {
        edits.note(format!(
            "cell {} is fast memory and cell {} slow: set in its section fast.node = {} and slow.node \
             = {}",
            tiers.fast, tiers.slow, tiers.fast, tiers.slow
        ));
    }
    if !elastic && (!enough_cells || facts.cells.iter().any(|cell| !cell.shared)) {
        edits.share(domain, devices);
        // A single cell is replaced as a whole.
        if enough_cells {
            edits.share_cells(domain);
        }
    }
    let of_tier = |node: &NodeId| [tiers.fast, tiers.slow].contains(node);
    let sizes = facts.cells.iter().map(|of| (of.node, of.size));
    let mut sizes: Vec<_> = sizes.filter(|(node, _)| of_tier(node)).collect();
    if !enough_cells {
        let split = split(domain, wanted)?;
        sizes = vec![(NODES.fast, split.fast), (NODES.slow, split.slow)];
        edits.cells(domain, devices, split, wanted.host)?;
    }
    let lacking: Vec<_> = sizes
        .into_iter()
        .filter(|(node, _)| elastic && !facts.elastic.contains(node))
        .collect();
    if !lacking.is_empty() {
        edits.devices(domain, devices, &lacking)?;
    }
    edits.bind(domain, devices, tiers, wanted.host)?;
    if !facts.has_port && wanted.provisioner == ProvisionerKind::DemeterBalloon {
        let channel = format!(
            "    <channel type='unix'>\n      <target type='virtio' name='{PORT}'/>\n    </channel>\n"
        );
        edits.before_end(devices, channel);
    }
    let notes = std::mem::take(&mut edits.notes);
    let new = edits.apply()?;
    let lacks = Facts::read(&new)?.check(wanted.provisioner, tiers);
    lacks.map_err(|lack| format!("{lack}, and its XML has no place for it"))?;
    Ok(Mended { xml: new, notes })
}

/// Splits a domain's memory into two cells.
fn split(domain: Node, wanted: Wanted) -> Result<PerTier<ByteCount>, String> {
    let memory = child(domain, &["memory"]);
    let whole = memory.and_then(|of| size(of.text(), of.attribute("unit")));
    let whole = whole.ok_or("its XML has no <memory> that can be read")?;
    let fast = wanted.fast.unwrap_or(ByteCount(whole.0 / 4 / MIB * MIB));
    let rest = ByteCount(whole.0.saturating_sub(fast.0));
    let slow = wanted.slow.unwrap_or(rest);
    if fast.0 == 0 || slow.0 == 0 {
        let (whole, fast) = (whole.0 / MIB, fast.0 / MIB);
        return Err(format!(
            "its {whole} MiB cannot be split into {fast} MiB of fast memory and the rest; give \
             --fast-mib a value above 0 and below its memory"
        ));
    }
    Ok(PerTier { fast, slow })
}

/// Speeds of the guest's cells for its HMAT; libvirt has the element since 6.6.
fn interconnects(speeds: [(u32, Speed); 2]) -> String {
    let mut text = String::from("      <interconnects>\n");
    for (cell, speed) in speeds {
        text += &format!(
            "        <latency initiator='0' target='{cell}' type='access' value='{}'/>\n",
            speed.latency_ns
        );
    }
    for (cell, speed) in speeds {
        // libvirt's unit is KiB/s.
        let bandwidth = speed.bandwidth_mb_s.saturating_mul(1_000_000) >> 10;
        text += &format!(
            "        <bandwidth initiator='0' target='{cell}' type='access' value='{bandwidth}' unit='KiB'/>\n"
        );
    }
    text + "      </interconnects>\n"
}

struct Edits<'a> {
    xml: &'a str,
    /// Notes for people.
    notes: Vec<String>,
    /// Replacements of text ranges; they do not overlap.
    edits: Vec<(Range<usize>, String)>,
}

impl Edits<'_> {
    fn note(&mut self, note: impl Into<String>) {
        self.notes.push(note.into());
    }

    /// Notes the removed parts of `<memoryBacking>`.
    fn note_taken_away(&mut self, backing: Node) {
        for element in backing.children().filter(Node::is_element) {
            let was = self.xml[element.range()].to_owned();
            let why = match element.tag_name().name() {
                "hugepages" => {
                    "a hole in hugetlbfs loses the page's reservation, and the VM could die of \
                     SIGBUS. Use transparent huge pages of shared memory instead \
                     (/sys/kernel/mm/transparent_hugepage/shmem_enabled)"
                }
                "source" if element.attribute("type") != Some("memfd") => {
                    "only memory in memfds can be returned"
                }
                "access" if element.attribute("mode") != Some("shared") => {
                    "private memory cannot be returned"
                }
                _ => continue,
            };
            let was = was.split_whitespace().collect::<Vec<_>>().join(" ");
            self.note(format!("takes away {was}: {why}"));
        }
    }

    /// Binds the cells to the host's nodes, if they are not bound yet.
    fn bind(
        &mut self,
        domain: Node,
        devices: Node,
        tiers: PerTier<NodeId>,
        host: Option<PerTier<HostTier>>,
    ) -> Result<(), String> {
        let tune = child(domain, &["numatune"]);
        let bound = tune.into_iter().flat_map(|of| of.children());
        let bound: Vec<_> = bound
            .filter(|of| of.has_tag_name("memnode"))
            .filter_map(|of| of.attribute("cellid")?.parse().ok().map(NodeId))
            .collect();
        let free = Tier::ALL.map(|tier| (tier, *tiers.get(tier)));
        let free: Vec<_> = free
            .iter()
            .filter(|(_, cell)| !bound.contains(cell))
            .collect();
        if free.is_empty() {
            return Ok(());
        }
        let Some(host) = host else {
            self.note(
                "its cells are not bound to nodes of the host, whose tiers are unknown, so its memory \
                 may lie anywhere; give --fast-node and --slow-node, or <numatune> with a <memnode> \
                 for each cell",
            );
            return Ok(());
        };
        let memory = tune.and_then(|of| child(of, &["memory"]));
        if memory.is_some_and(|of| of.attribute("placement") == Some("auto")) {
            return Err(
                "its <numatune> has placement='auto', so no cell can be bound; use placement='static' \
                 with a nodeset"
                    .into(),
            );
        }
        let lines: String = free
            .iter()
            .map(|(tier, cell)| {
                let node = host.get(*tier).node;
                format!("    <memnode cellid='{cell}' mode='strict' nodeset='{node}'/>\n")
            })
            .collect();
        match tune {
            Some(tune) if self.xml[tune.range()].ends_with("/>") => {
                self.replace(tune.range(), &format!("<numatune>\n{lines}  </numatune>"));
            }
            Some(tune) => self.before_end(tune, lines),
            None => self.before(devices, format!("  <numatune>\n{lines}  </numatune>\n")),
        }
        Ok(())
    }

    /// Makes memory shared and backed by memfds.
    fn share(&mut self, domain: Node, devices: Node) {
        if let Some(backing) = child(domain, &["memoryBacking"]) {
            self.note_taken_away(backing);
        }
        let mut text = String::from("  <memoryBacking>\n");
        let there = child(domain, &["memoryBacking"]);
        let kept = there.into_iter().flat_map(|of| of.children());
        // Memory on hugetlbfs can never be returned.
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

    /// Removes private access from cells.
    fn share_cells(&mut self, domain: Node) {
        for cell in cells_of(domain) {
            let access = cell.attributes().find(|of| of.name() == "memAccess");
            if let Some(access) = access.filter(|access| access.value() != "shared") {
                self.replace(access.range_value(), "shared");
            }
        }
    }

    /// Adds two cells with all CPUs in the fast one.
    fn cells(
        &mut self,
        domain: Node,
        devices: Node,
        tiers: PerTier<ByteCount>,
        host: Option<PerTier<HostTier>>,
    ) -> Result<(), String> {
        self.note(format!(
            "a fast cell of {} MiB and a slow one of {} MiB are the VM's boot memory and its maximum; \
             larger values of --fast-mib and --slow-mib let it grow later, and it returns the surplus \
             until then",
            tiers.fast.0 / MIB,
            tiers.slow.0 / MIB
        ));
        let speeds = host.and_then(|host| {
            let of = |tier: Tier| host.get(tier).speed;
            Some([(0, of(Tier::Fast)?), (1, of(Tier::Slow)?)])
        });
        let cpus = child(domain, &["vcpu"]).and_then(|of| of.text()?.trim().parse::<u32>().ok());
        let cpus = match cpus {
            Some(0) | None => return Err("its XML has no <vcpu> that can be read".into()),
            Some(1) => "0".into(),
            Some(count) => format!("0-{}", count - 1),
        };
        let [fast, slow] = [tiers.fast.0 >> 10, tiers.slow.0 >> 10];
        let interconnects = match speeds {
            Some(speeds) => interconnects(speeds),
            None => {
                self.note(
                    "the guest does not learn the speed of its cells, because the host's firmware \
                     does not report it \
                     (/sys/devices/system/node/node*/access0/initiators/read_latency)",
                );
                String::new()
            }
        };
        let numa = format!(
            "    <numa>\n      \
             <cell id='0' cpus='{cpus}' memory='{fast}' unit='KiB' memAccess='shared'/>\n      \
             <cell id='1' memory='{slow}' unit='KiB' memAccess='shared'/>\n\
             {interconnects}    </numa>\n"
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

    /// Adds a virtio-mem device to each cell, so that it can grow to twice its size.
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

    /// Inserts lines before an element's start.
    fn before(&mut self, element: Node, lines: String) {
        self.at(element.range().start, lines);
    }

    /// Inserts lines before an element's end tag.
    fn before_end(&mut self, element: Node, lines: String) {
        let range = element.range();
        let end = self.xml[range.clone()].rfind("</").unwrap_or(0);
        self.at(range.start + end, lines);
    }

    fn at(&mut self, place: usize, lines: String) {
        let line = self.xml[..place].rfind('\n').map_or(0, |end| end + 1);
        // If other text precedes it on its line, insert right before the element.
        let blank = self.xml[line..place].trim().is_empty();
        let place = if blank { line } else { place };
        self.edits.push((place..place, lines));
    }

    fn apply(mut self) -> Result<String, String> {
        // A stable sort keeps the order of insertions at one place.
        self.edits.sort_by_key(|(range, _)| range.start);
        let mut text = String::new();
        let mut done = 0;
        for (range, new) in self.edits {
            let kept = self.xml.get(done..range.start);
            text += kept.ok_or("its XML cannot be patched automatically; change it by hand")?;
            text += &new;
            done = range.end;
        }
        Ok(text + &self.xml[done..])
    }
}

#[cfg(test)]
mod tests;
