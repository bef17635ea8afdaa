//! Agreement with the emulator's plugin on the memory layout.
//!
//! Problem: the plugin must derive the node of an access from the address that the emulator reports, and emulators
//! report addresses in several formats. Approach: right after boot, the VM shows the plugin some pages of each node
//! with the physical addresses that the kernel reports. The plugin selects the format that matches all of them. As
//! pages may lie anywhere, the start of each node is also compared. On any mismatch the VM stops, since its
//! measurements would be meaningless.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use demeter_policy::{GuestPhysAddr, GuestVirtAddr, PAGE_SIZE};
use demeter_scenario::Machine;
use demeter_workload::Region;

use super::control_page::{ControlPage, field};
use super::zones::node_range;
use crate::fault::Fault;

/// Number of pages shown per node.
const PAGES: u64 = 16;

/// Shows pages of the machine's nodes to the plugin; fails if the plugin's addresses differ from the kernel's.
pub fn agree(root: &Path, machine: &Machine) -> Result<(), Fault> {
    let page = ControlPage::map(root)?;
    // It is still set if the VM was reset during a run.
    page.write(field::ARMED, 0);
    page.write(field::PERIOD, 0);
    let pagemap_path = root.join("proc/self/pagemap");
    let pagemap = File::open(&pagemap_path).map_err(Fault::io("open", &pagemap_path))?;
    let nodes = machine.nodes();
    let with_memory = (0u32..).zip(&nodes).filter(|(_, node)| node.usable_mib > 0);
    for (place, (node, _)) in with_memory.enumerate() {
        let (start, end) = node_range(root, node)?;
        let plugins = page.read_u64(field::NODE_GPA + 8 * node as usize);
        // The kernel keeps the first page of all for the firmware.
        if place > 0 && start != plugins {
            return Err(Fault::Tiers(format!(
                "node {node} begins at {start:#x}, not at {plugins:#x} as it was told"
            )));
        }
        let bytes = 0..PAGES * PAGE_SIZE;
        let region = Region::map(bytes.end).map_err(|e| Fault::Tiers(e.to_string()))?;
        region
            .prefer_node(&bytes, node)
            .map_err(|e| Fault::Tiers(e.to_string()))?;
        for word in region.words().iter().step_by((PAGE_SIZE / 8) as usize) {
            // A store, so that the page exists.
            word.store(1, Ordering::Relaxed);
            let gpa = gpa_of(&pagemap, word).map_err(Fault::io("read", &pagemap_path))?;
            if !(start..end).contains(&gpa.0) {
                return Err(Fault::Tiers(format!(
                    "node {node} gave a page at {:#x}, but spans {start:#x} to {end:#x}",
                    gpa.0
                )));
            }
            show(&page, word, gpa, node)?;
        }
    }
    page.write(field::ASKED, 0);
    Ok(())
}

/// Shows the plugin the page at the start of `word`, with physical address `gpa`.
fn show(page: &ControlPage, word: &AtomicU64, gpa: GuestPhysAddr, node: u32) -> Result<(), Fault> {
    page.write(field::ASKED, 0);
    page.write_u64(field::PAGE_GVA, gva_of(word).0);
    page.write_u64(field::PAGE_GPA, gpa.0);
    page.write(field::PAGE_NODE, node);
    // Any number that differs from the last page's and from 0.
    let number = page.read(field::ANSWERED).wrapping_add(1).max(1);
    page.write(field::ASKED, number);
    fence(Ordering::SeqCst);
    // The plugin observes this load.
    word.load(Ordering::SeqCst);
    fence(Ordering::SeqCst);
    if page.read(field::ANSWERED) != number {
        return Err(Fault::Tiers("it does not see loads".into()));
    }
    if page.read(field::FITTING) == 0 {
        return Err(Fault::Tiers(format!(
            "the page at {:#x} in node {node} is reported at {:#x}, which is no layout that it knows",
            gpa.0,
            page.read_u64(field::PAGE_REPORTED)
        )));
    }
    Ok(())
}

fn gva_of(word: &AtomicU64) -> GuestVirtAddr {
    GuestVirtAddr(std::ptr::from_ref(word) as u64)
}

/// Physical address of the page at the start of `word`. Bits 0 to 54 of its pagemap entry are the frame number.
fn gpa_of(pagemap: &File, word: &AtomicU64) -> std::io::Result<GuestPhysAddr> {
    const FRAME: u64 = (1 << 55) - 1;
    let mut entry = [0; 8];
    pagemap.read_exact_at(&mut entry, gva_of(word).0 / PAGE_SIZE * 8)?;
    Ok(GuestPhysAddr(
        (u64::from_ne_bytes(entry) & FRAME) * PAGE_SIZE,
    ))
}

#[cfg(test)]
mod tests {
    use super::super::control_page::tests::machine_with_plugin;
    use super::*;

    #[test]
    fn a_plugin_that_sees_nothing_is_named() {
        let (root, _memory) = machine_with_plugin();
        let page = ControlPage::map(root.path()).unwrap();
        let word = AtomicU64::new(0);
        let said = show(&page, &word, GuestPhysAddr(4096), 1).unwrap_err();
        assert!(said.to_string().contains("does not see loads"), "{said}");
        assert_eq!(page.read_u64(field::PAGE_GVA), gva_of(&word).0);
        assert_eq!(page.read(field::PAGE_NODE), 1);
    }
}
