//! Any text as the XML of a libvirt domain: repaired, or refused in one line.
#![no_main]

use demeter_host::hypervisor::libvirt::fuzz::xml;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| xml(text));
