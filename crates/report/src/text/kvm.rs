//! The table of a nested host's KVM counters.

use crate::shape::Side;
use crate::text::clean;
use crate::text::grid::{Row, Table};
use crate::text::number::count;

/// Most rows of the table.
const ROWS_MAX: usize = 200;

/// KVM counters by their names in results (Documentation/virt/kvm, and `/sys/kernel/debug/kvm`), and pages moved by the
/// host.
const COUNTERS: [(&str, &str); 5] = [
    ("kvm_exits", "exits"),
    ("kvm_pf_taken", "page faults"),
    ("kvm_remote_tlb_flush_requests", "flushes asked for"),
    ("kvm_tlb_flush", "TLB flushes"),
    ("pgmigrate_success", "pages moved"),
];

/// Title of the table.
pub(crate) const KVM: &str = "What the host's KVM and kernel counted";

/// A row for each system; `None` without KVM counters.
pub(crate) fn kvm_table(sides: &[Side]) -> Option<Table> {
    let systems = sides
        .iter()
        .flat_map(|side| side.systems.iter().map(move |system| (side, system)));
    let rows: Vec<Row> = systems
        .filter(|(_, system)| system.counters.contains_key(COUNTERS[0].0))
        .take(ROWS_MAX)
        .map(|(side, system)| {
            let counted = COUNTERS.iter().map(|(name, _)| {
                let n = system.counters.get(*name);
                n.map_or("-".into(), |n| count(*n))
            });
            let named = [side.heading.clone(), clean::name(&system.name)];
            Row {
                cells: named.into_iter().chain(counted).collect(),
                class: "",
            }
        })
        .collect();
    let titles = ["case", "system"].into_iter();
    let titles = titles.chain(COUNTERS.iter().map(|(_, title)| *title));
    let titles = titles.map(String::from).collect();
    (!rows.is_empty()).then(|| Table::plain(titles, 2, rows))
}
