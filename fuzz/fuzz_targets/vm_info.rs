//! Any text as Cloud Hypervisor's description of a VM: disjoint zones without loss, or refused.

#![no_main]

use demeter_host::hypervisor::cloud_hypervisor::Info;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let Ok(info) = Info::parse(text) else { return };
    let Ok(regions) = info.regions() else { return };
    for two in regions.windows(2) {
        assert!(two[0].guest.end() <= two[1].guest.start());
        assert!(two[0].zone <= two[1].zone);
    }
    for (place, zone) in info.zones.iter().enumerate() {
        let parts = regions.iter().filter(|region| region.zone == place);
        assert_eq!(
            parts.map(|region| region.guest.len().0).sum::<u64>(),
            zone.size
        );
    }
});
