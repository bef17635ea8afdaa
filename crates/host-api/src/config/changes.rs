//! Differences between two configurations, key by key, for people.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::Config;

/// Keys that take effect at the start only.
const AT_START: [&str; 7] = [
    "socket",
    "listen",
    "token_file",
    "state",
    "memory_paths",
    "libvirt",
    "discover",
];

/// A key with a changed value.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct KeyChange {
    /// The key's path: `vm.db.fast.size_mib`.
    pub key: String,
    /// The old value, if any.
    pub from: Option<String>,
    /// The new value, if any.
    pub to: Option<String>,
    /// Whether the change takes effect at the next start only.
    pub at_start: bool,
    /// Whether the change has no effect, because a person set another value.
    #[serde(default)]
    pub is_overridden: bool,
}

impl std::fmt::Display for KeyChange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let none = "(not set)";
        let from = self.from.as_deref().unwrap_or(none);
        let to = self.to.as_deref().unwrap_or(none);
        let when = match (self.is_overridden, self.at_start) {
            (true, _) => " (no effect while another value is set)",
            (false, true) => " (from the next start on)",
            (false, false) => "",
        };
        write!(f, "{}: {from} -> {to}{when}", self.key)
    }
}

impl KeyChange {
    /// The keys below `key` whose values differ in `new`, in order.
    pub fn between<T: Serialize>(key: &str, old: &T, new: &T) -> Vec<Self> {
        let mut changes = vec![];
        // Both are plain data, so serialization cannot fail.
        let values = (serde_json::to_value(old), serde_json::to_value(new));
        if let (Ok(old), Ok(new)) = values {
            compare(key, &old, &new, &mut changes);
        }
        changes
    }

    /// Whether this key or one around it is among `keys`.
    pub fn is_within<'a>(&self, keys: impl IntoIterator<Item = &'a str>) -> bool {
        let around = |key: &str| {
            let rest = self.key.strip_prefix(key);
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        };
        keys.into_iter().any(around)
    }
}

impl Config {
    /// The keys whose values differ in `new`, in order.
    pub fn changes(&self, new: &Self) -> Vec<KeyChange> {
        KeyChange::between("", self, new)
    }
}

fn compare(key: &str, old: &Value, new: &Value, changes: &mut Vec<KeyChange>) {
    if old == new {
        return;
    }
    let empty = serde_json::Map::new();
    let fields = |value: &Value| match value {
        Value::Object(fields) => Some(fields.clone()),
        Value::Null => Some(empty.clone()),
        _ => None,
    };
    if let (Some(before), Some(after)) = (fields(old), fields(new)) {
        let names: BTreeSet<_> = before.keys().chain(after.keys()).collect();
        for name in names {
            let key = match key {
                "" => name.clone(),
                key => format!("{key}.{name}"),
            };
            let of = |fields: &serde_json::Map<String, Value>| fields.get(name).cloned();
            let (old, new) = (of(&before), of(&after));
            let (old, new) = (old.unwrap_or_default(), new.unwrap_or_default());
            compare(&key, &old, &new, changes);
        }
        return;
    }
    if let (Value::Array(before), Value::Array(after)) = (old, new)
        && before.len() == after.len()
        && before.iter().all(Value::is_object)
    {
        for (at, (old, new)) in before.iter().zip(after).enumerate() {
            compare(&format!("{key}.{at}"), old, new, changes);
        }
        return;
    }
    let shown = |value: &Value| match value {
        Value::Null => None,
        Value::String(text) => Some(text.clone()),
        other => Some(other.to_string()),
    };
    let first = key.split('.').next().unwrap_or_default();
    changes.push(KeyChange {
        key: key.into(),
        from: shown(old),
        to: shown(new),
        at_start: AT_START.contains(&first),
        is_overridden: false,
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(text: &str) -> Config {
        toml::from_str(&format!("pool = {{ fast_mib = 9, slow_mib = 9 }}\n{text}")).unwrap()
    }

    #[test]
    fn each_key_that_changed_is_told_with_both_values() {
        let vm = |fast| {
            format!(
                "[vm.a]\nqmp = \"/q\"\nagent = \"/a\"\nfast = {{ memdev = \"m\", size_mib = {fast} }}\n\
                 slow = {{ memdev = \"n\", size_mib = 2 }}\n"
            )
        };
        let old = config(&vm(1));
        assert_eq!(old.changes(&old), []);
        let new = config(&("socket = \"/s\"\n".to_owned() + &vm(3)));
        let said: Vec<_> = old.changes(&new).iter().map(ToString::to_string).collect();
        assert_eq!(
            said,
            [
                "socket: /run/demeter/host.sock -> /s (from the next start on)",
                "vm.a.fast.size_mib: 1 -> 3",
            ]
        );
        let said = old.changes(&config("")).into_iter();
        let said: Vec<_> = said.map(|change| change.to_string()).collect();
        assert!(
            said.contains(&"vm.a.qmp: /q -> (not set)".to_owned()),
            "{said:?}"
        );
        assert!(
            said.iter().all(|line| line.starts_with("vm.a.")),
            "{said:?}"
        );
    }
}
