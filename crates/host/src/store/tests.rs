use proptest::prelude::*;
use strum::VariantNames;

use super::*;
use crate::config::Asked;

fn tier_bytes() -> impl Strategy<Value = TierBytes> {
    (any::<u64>(), any::<u64>()).prop_map(|(fast, slow)| TierBytes {
        fast: ByteCount(fast),
        slow: ByteCount(slow),
    })
}

/// A setting, or none.
fn settings(is_set: bool) -> Settings {
    let mut settings = Settings::default();
    if is_set {
        settings.record(&"db".parse().unwrap(), Asked::Remove, true);
    }
    settings
}

fn ledger() -> impl Strategy<Value = Ledger> {
    let name = "[a-zA-Z0-9._-]{1,64}".prop_map(|name| name.parse().unwrap());
    let account = (tier_bytes(), tier_bytes())
        .prop_map(|(desired, committed)| Account { desired, committed });
    let policy = prop::sample::select(Policy::VARIANTS).prop_map(|name| name.parse().unwrap());
    (
        prop::option::of(policy),
        prop::collection::btree_map(name, account, 0..5),
    )
        .prop_map(|(policy, accounts): (_, BTreeMap<VmName, Account>)| {
            let marked = accounts.keys().step_by(2);
            let in_pools = accounts.keys().skip(1).step_by(2);
            Ledger {
                policy,
                marks: marked
                    .map(|name| (name.clone(), "it lies".into()))
                    .collect(),
                settings: settings(policy.is_some()),
                pools: in_pools
                    .map(|name| (name.clone(), PoolName("s1".into())))
                    .collect(),
                accounts,
            }
        })
}

proptest! {
    #[test]
    fn what_was_saved_last_is_read(first in ledger(), last in ledger()) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state/host.json");
        let (store, empty) = Store::open(&path).unwrap();
        prop_assert_eq!(empty, Ledger::default());
        store.save(&first).unwrap();
        store.save(&last).unwrap();
        let taken = Store::open(&path);
        prop_assert!(matches!(taken, Err(StoreError::Taken { .. })), "{taken:?}");
        drop(store);
        prop_assert_eq!(Store::open(&path).unwrap().1, last);
        prop_assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 2, "the state and its lock");
    }

    #[test]
    fn a_file_that_was_cut_is_refused(ledger in ledger(), cut in any::<prop::sample::Index>()) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("host.json");
        Store::open(&path).unwrap().0.save(&ledger).unwrap();
        let text = fs::read(&path).unwrap();
        // Cut at least the last brace.
        fs::write(&path, &text[..cut.index(text.len() - 2)]).unwrap();
        let refused = Store::open(&path);
        prop_assert!(matches!(refused, Err(StoreError::Damaged { .. })), "{refused:?}");
    }
}

#[test]
fn a_child_that_has_not_executed_its_program_yet_keeps_no_lock() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("host.json");
    let (store, _) = Store::open(&path).unwrap();
    // A fork copies descriptors like this, whether or not an exec closes them later.
    let of_child = store._lock.file().try_clone().unwrap();
    let clone = store.clone();
    drop(store);
    let taken = Store::open(&path);
    assert!(matches!(taken, Err(StoreError::Taken { .. })), "{taken:?}");
    drop(clone);
    Store::open(&path).unwrap();
    drop(of_child);
}

#[test]
fn the_remains_of_a_killed_writer_change_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("host.json");
    let ledger = Ledger {
        policy: Some(Policy::Wss),
        ..Ledger::default()
    };
    let (store, _) = Store::open(&path).unwrap();
    store.save(&ledger).unwrap();
    drop(store);
    fs::write(dir.path().join("host.new"), "{\"version\": 1, \"vm").unwrap();
    let (store, read) = Store::open(&path).unwrap();
    assert_eq!(read, ledger);
    store.save(&Ledger::default()).unwrap();
    drop(store);
    assert_eq!(Store::open(&path).unwrap().1, Ledger::default());
}

#[test]
fn what_is_no_state_is_refused_with_the_way_out() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("host.json");
    let says = |text: &str| {
        fs::write(&path, text).unwrap();
        Store::open(&path).unwrap_err().to_string()
    };
    let future = says("{\"version\": 4, \"tenants\": []}");
    assert!(future.contains("has version 4"), "{future}");
    let account =
        "\"desired_fast_bytes\": 1, \"desired_slow_bytes\": 1, \"committed_fast_bytes\": 1";
    for text in [
        "".to_owned(),
        "[]".to_owned(),
        "{\"version\": 1, \"policy\": \"magic\", \"vms\": {}}".to_owned(),
        "{\"version\": 1, \"policy\": null, \"vms\": {}, \"extra\": 1}".to_owned(),
        format!("{{\"version\": 1, \"policy\": null, \"vms\": {{\"a\": {{{account}}}}}}}"),
        format!(
            "{{\"version\": 1, \"policy\": null, \
             \"vms\": {{\"a b\": {{{account}, \"committed_slow_bytes\": 1}}}}}}"
        ),
        format!(
            "{{\"version\": 1, \"policy\": null, \
             \"vms\": {{\"a\": {{{account}, \"committed_slow_bytes\": -1}}}}}}"
        ),
        " ".repeat(FILE_BYTES_MAX as usize + 1),
    ] {
        let error = says(&text);
        assert!(error.contains("is damaged"), "{error}");
        assert!(error.contains("host.json"), "{error}");
    }
}

#[test]
fn an_older_release_can_read_a_file_without_its_newer_parts() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("host.json");
    let (store, mut ledger) = Store::open(&path).unwrap();
    let name: VmName = "db".parse().unwrap();
    let account = Account {
        desired: TierBytes::default(),
        committed: TierBytes::default(),
    };
    ledger.accounts.insert(name.clone(), account);
    let mut version_with = |settings, pool: Option<&str>| {
        ledger.settings = settings;
        let pool = pool.map(|pool| (name.clone(), PoolName(pool.into())));
        ledger.pools = pool.into_iter().collect();
        store.save(&ledger).unwrap();
        let text = fs::read_to_string(&path).unwrap();
        let text: serde_json::Value = serde_json::from_str(&text).unwrap();
        (text["version"].as_u64().unwrap(), text["settings"].clone())
    };
    assert_eq!(version_with(settings(false), Some("s1")).0, 3);
    assert_eq!(version_with(settings(true), None).0, 2);
    assert_eq!(
        version_with(settings(false), None),
        (1, serde_json::Value::Null)
    );
}

#[test]
fn the_word_of_older_files_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("host.json");
    let account = "\"desired_fast_bytes\": 1, \"desired_slow_bytes\": 2, \
                   \"counted_fast_bytes\": 3, \"counted_slow_bytes\": 4";
    let text = format!("{{\"version\": 1, \"policy\": null, \"vms\": {{\"a\": {{{account}}}}}}}");
    fs::write(&path, text).unwrap();
    let accounts = Store::open(&path).unwrap().1.accounts;
    let committed = accounts.values().next().unwrap().committed;
    assert_eq!((committed.fast.0, committed.slow.0), (3, 4));
}
