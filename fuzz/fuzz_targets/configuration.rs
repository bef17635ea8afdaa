//! Any text as the controller's configuration, the agent's, or the state file: accepted, or refused
//! in one line. An accepted state is saved unchanged.
#![no_main]

use std::fs;
use std::path::PathBuf;
use std::sync::LazyLock;

use demeter_host::store::Store;
use libfuzzer_sys::fuzz_target;

/// In memory, because a campaign writes a million files.
static FILE: LazyLock<PathBuf> = LazyLock::new(|| {
    let name = format!("demeter-fuzz-{}", std::process::id());
    std::path::Path::new("/dev/shm").join(name)
});

fuzz_target!(|input: (u8, &str)| {
    let (which, text) = input;
    fs::write(&*FILE, text).unwrap();
    let refused = match which % 3 {
        0 => demeter_host::config::Config::load(&FILE)
            .err()
            .map(|e| e.to_string()),
        1 => match demeter_guest::config::Config::load(&FILE) {
            Ok(config) => config.check().err().map(|e| e.to_string()),
            Err(error) => Some(error.to_string()),
        },
        _ => match Store::open(&FILE) {
            Ok((store, ledger)) => {
                store.save(&ledger).unwrap();
                // An open store is locked, so close it first.
                drop(store);
                assert_eq!(Store::open(&FILE).unwrap().1, ledger);
                None
            }
            Err(error) => Some(error.to_string()),
        },
    };
    assert_ne!(refused.as_deref(), Some(""), "refused without a word");
    let _ = fs::remove_file(&*FILE);
});
