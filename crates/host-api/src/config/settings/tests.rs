use proptest::prelude::*;

use super::*;

const NAMES: [&str; 3] = ["a", "b", "c"];

fn section(share: u32) -> VmConfig {
    toml::from_str(&format!(
        "libvirt = \"d{share}\"\nshare = {share}\nfast = {{ size_mib = 40, guarantee_mib = 10 }}\n\
         slow = {{ size_mib = 80, guarantee_mib = 16 }}\n"
    ))
    .unwrap()
}

fn file(shares: &[u32]) -> Config {
    let mut config: Config = toml::from_str("pool = { fast_mib = 999, slow_mib = 999 }").unwrap();
    for (name, share) in NAMES.iter().zip(shares) {
        config.vms.insert(name.parse().unwrap(), section(*share));
    }
    config
}

fn change() -> impl Strategy<Value = VmChange> {
    let mib = || prop::option::of(0..200_u64);
    let share = prop::option::of(1..9_u32);
    let level = prop::option::of(1..9_u32);
    (share, level, mib(), mib()).prop_map(|(share, level, guarantee_mib, limit_mib)| VmChange {
        share,
        slowdown_max_percent: level,
        fast: TierDefaults {
            guarantee_mib,
            limit_mib,
        },
        ..VmChange::default()
    })
}

fn asked() -> impl Strategy<Value = Asked> {
    prop_oneof![
        (10..99_u32).prop_map(|share| Asked::Add(Box::new(section(share)))),
        change().prop_map(Asked::Change),
        Just(Asked::Remove),
        Just(Asked::Reset),
    ]
}

proptest! {
    /// The order of precedence, and that every difference is shown.
    #[test]
    fn a_setting_precedes_the_file_and_each_difference_is_shown(
        shares in prop::collection::btree_set(100..900_u32, 0..3),
        steps in prop::collection::vec((0..NAMES.len(), asked()), 0..12),
    ) {
        let file = file(&Vec::from_iter(shares));
        let mut settings = Settings::default();
        for (at, asked) in steps {
            let name: VmName = NAMES[at].parse().unwrap();
            settings.record(&name, asked.clone(), file.vms.contains_key(&name));
            let (used, unused) = settings.apply(&file);
            used.check_keys().expect("what is used is sound");
            let overrides = settings.overrides(&file, &used);
            let keys: Vec<_> = overrides.iter().map(|key| key.key.as_str()).collect();
            for differs in file.changes(&used) {
                prop_assert!(differs.is_within(keys.iter().copied()), "{differs} is not in {keys:?}");
            }
            match asked {
                _ if unused.contains_key(&name) => {
                    prop_assert_eq!(used.vms.get(&name), file.vms.get(&name), "as if not set");
                }
                Asked::Reset => prop_assert_eq!(used.vms.get(&name), file.vms.get(&name)),
                Asked::Remove => prop_assert_eq!(used.vms.get(&name), None),
                Asked::Add(vm) => prop_assert_eq!(used.vms.get(&name), Some(&*vm)),
                Asked::Change(change) => {
                    let vm = &used.vms[&name];
                    prop_assert_eq!(vm.share, change.share.unwrap_or(vm.share));
                    let level = change.slowdown_max_percent.or(vm.slowdown_max_percent);
                    prop_assert_eq!(vm.slowdown_max_percent, level);
                    let fast = &vm.fast;
                    prop_assert_eq!(fast.guarantee_mib, change.fast.guarantee_mib.unwrap_or(fast.guarantee_mib));
                    prop_assert!(fast.limit_mib >= change.fast.limit_mib);
                }
            }
            let text = serde_json::to_string(&settings).unwrap();
            prop_assert_eq!(serde_json::from_str::<Settings>(&text).unwrap(), settings.clone());
        }
    }
}

#[test]
fn a_setting_that_the_file_contradicts_is_not_used() {
    let name = |name: &str| name.parse::<VmName>().unwrap();
    let mut settings = Settings::default();
    settings.record(&name("new"), Asked::Add(Box::new(section(5))), false);
    let (used, unused) = settings.apply(&file(&[100]));
    assert!(used.vms.contains_key(&name("new")) && unused.is_empty());

    // The file now has the same domain under another name.
    let (used, unused) = settings.apply(&file(&[5]));
    assert!(!used.vms.contains_key(&name("new")));
    assert!(unused[&name("new")].contains("named twice"), "{unused:?}");

    let limit = TierDefaults {
        limit_mib: Some(5),
        ..TierDefaults::default()
    };
    let change = VmChange {
        fast: limit,
        ..VmChange::default()
    };
    settings.record(&name("a"), Asked::Change(change), true);
    let (_, unused) = settings.apply(&file(&[100]));
    let why = &unused[&name("a")];
    assert!(
        why.contains("vm.a.fast.guarantee_mib = 10 is over its limit_mib = 5"),
        "{why}"
    );
}
