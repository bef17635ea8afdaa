//! Converts result files of schema 1 to the present schema.
//!
//! Schema 1 had speeds in fields by unit (`mean_mops`, `mean_latency_ns`, ...), a run's hash and scale among its
//! counters, and several VMs within provisioning. Every run had a hot set.

use serde_json::{Map, Value, json};

/// Converts the file's content. Unexpected values stay as they are, and the reader rejects them.
pub(crate) fn upgrade(mut file: Value) -> Value {
    if let Some(fields) = file.as_object_mut() {
        fields.insert("schema".into(), json!(crate::SCHEMA));
    }
    for system in items(&mut file, "systems") {
        upgrade_system(system);
    }
    for case in items(&mut file, "cases") {
        items(case, "systems").for_each(upgrade_system);
    }
    file
}

/// The objects of a list; empty if there is no list.
fn items<'a>(of: &'a mut Value, key: &str) -> impl Iterator<Item = &'a mut Value> {
    let list = of.get_mut(key).and_then(Value::as_array_mut);
    list.into_iter().flatten().filter(|item| item.is_object())
}

fn upgrade_system(system: &mut Value) {
    upgrade_speed(system);
    let take = |from: &mut Value, key: &str| from.as_object_mut().and_then(|o| o.remove(key));
    if let Some(counters) = system.get_mut("counters") {
        let metadata: Map<String, Value> = ["event_log_hash", "scale"]
            .into_iter()
            .filter_map(|key| Some((key.into(), take(counters, key)?)))
            .collect();
        system["metadata"] = metadata.into();
    }
    let Some(provisioning) = system.get_mut("provisioning").filter(|p| p.is_object()) else {
        return;
    };
    for (old, new) in [
        ("p99_resizing_mops", "p99_resizing"),
        ("p99_other_mops", "p99_other"),
    ] {
        if let Some(value) = take(provisioning, old) {
            provisioning[new] = value;
        }
    }
    if let Some(vms) = take(provisioning, "vms") {
        system["workloads"] = vms;
        items(system, "workloads").for_each(upgrade_speed);
    }
}

/// Converts the speed of a system or VM, and of its points.
fn upgrade_speed(of: &mut Value) {
    let Some(fields) = of.as_object_mut() else {
        return;
    };
    let mut speed = |unit: &str, mean: &str, steady: &str| {
        let (mean, steady) = (fields.remove(mean), fields.remove(steady));
        let known = mean.iter().chain(&steady).any(|value| !value.is_null());
        known.then(|| json!({ "unit": unit, "mean": mean, "steady": steady }))
    };
    let mops = speed("Mops", "mean_mops", "steady_mops");
    let latency = speed("ns", "mean_latency_ns", "steady_latency_ns");
    if let Some(speed) = mops.or(latency) {
        of["speed"] = speed;
    }
    for point in items(of, "series") {
        let fields = point.as_object_mut();
        let taken = fields.map(|f| ["mops", "latency_ns"].map(|key| f.remove(key)));
        let mut values = taken.into_iter().flatten().flatten();
        point["speed"] = values.find(|value| !value.is_null()).unwrap_or_default();
    }
}
