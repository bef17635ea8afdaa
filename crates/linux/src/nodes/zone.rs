//! The kernel's memory zones, from /proc/zoneinfo.

use demeter_policy::NodeId;

/// A zone of a node; all sizes in pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Zone {
    /// Free pages.
    pub free: u64,
    /// Free pages on per-CPU lists.
    pub held_by_cpus: u64,
    /// The low watermark: below it kswapd is woken, and allocations use other zones.
    pub low: u64,
    /// The high watermark: kswapd reclaims up to it.
    pub high: u64,
    /// Its first page frame.
    pub first: u64,
    /// Its pages including holes.
    pub spanned: u64,
    /// Its pages that exist and are online.
    pub present: u64,
    /// Pages that the page allocator manages.
    pub managed: u64,
    /// Its largest reserve for other kinds of allocation (`protection`).
    pub reserve: u64,
    /// Cached file pages that were not accessed lately. The kernel counts them for the whole node, with its first zone.
    pub inactive_file: u64,
}

impl Zone {
    /// Parses the zones of a node, in the text's order. Invalid numbers count as 0.
    pub fn of_node(zoneinfo: &str, node: NodeId) -> Vec<Self> {
        let header = format!("Node {node}, zone ");
        let mut zones = Vec::new();
        let mut is_wanted = false;
        for line in zoneinfo.lines() {
            if line.starts_with("Node ") {
                is_wanted = line.starts_with(&header);
                if is_wanted {
                    zones.push(Self::default());
                }
            } else if let (true, Some(zone)) = (is_wanted, zones.last_mut()) {
                zone.take_line(line);
            }
        }
        zones
    }

    fn take_line(&mut self, line: &str) {
        let mut words = line.split_ascii_whitespace();
        let number = |word: Option<&str>| word.and_then(|word| word.parse().ok()).unwrap_or(0);
        match words.next() {
            Some("pages") if words.next() == Some("free") => self.free = number(words.next()),
            Some("low") => self.low = number(words.next()),
            Some("high") => self.high = number(words.next()),
            Some("spanned") => self.spanned = number(words.next()),
            Some("present") => self.present = number(words.next()),
            Some("nr_inactive_file") => self.inactive_file = number(words.next()),
            Some("managed") => self.managed = number(words.next()),
            Some("start_pfn:") => self.first = number(words.next()),
            Some("count:") => {
                self.held_by_cpus = self.held_by_cpus.saturating_add(number(words.next()));
            }
            Some("protection:") => {
                self.reserve = words
                    .filter_map(|word| word.trim_matches(['(', ',', ')']).parse().ok())
                    .max()
                    .unwrap_or(0);
            }
            _ => {}
        }
    }
}
