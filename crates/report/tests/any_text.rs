//! The twin of the fuzz target `result`: a result file of any text is refused or drawn.

use demeter_outcome::{Case, Published, Repeats, RunResult, SystemResult, Tail};
use demeter_report::{html, table};
use proptest::prelude::*;

const EXAMPLE: &str = include_str!("../../outcome/tests/example.json");
const SCHEMA_1: &str = include_str!("../../outcome/tests/schema-1.json");

/// The example as three cases with all that a result can have, as text.
fn cases() -> String {
    let example = RunResult::from_json(EXAMPLE).unwrap();
    let case = |vms: u32| Case {
        group: 0,
        settings: vec![("sim.vms".into(), vms.to_string())],
        systems: vec![SystemResult {
            elapsed_s: Some(5.0),
            tail: Some(Tail::default()),
            repeats: Some(Repeats {
                runs: 2,
                min: 4.0,
                max: 6.0,
            }),
            counters: [("flush_total".into(), 3), ("flush_guest_remote".into(), 3)].into(),
            series: vec![],
            ..example.systems[0].clone()
        }],
    };
    let published = Published {
        figure: "elapsed_s".into(),
        system: "demeter".into(),
        over: None,
        case: vec![("sim.vms".into(), "1".into())],
        value: 5.5,
        ours: Some(5.0),
        within: 0.2,
        source: "a paper".into(),
    };
    let result = RunResult {
        systems: vec![],
        cases: (1..4).map(case).collect(),
        published: vec![published],
        ..example.clone()
    };
    serde_json::to_string(&result).unwrap()
}

proptest! {
    #[test]
    fn any_text_is_refused_or_drawn(
        whole in prop_oneof![Just(cases()), Just(EXAMPLE.into()), Just(SCHEMA_1.into())],
        at in any::<prop::sample::Index>(),
        cut in 0usize..40,
        text in prop_oneof![any::<String>(), "[-0-9.e{}\\[\\]:,\"a-z_]{0,20}"],
    ) {
        // ASCII: every byte is a character's border.
        let at = at.index(whole.len());
        let end = whole.len().min(at + cut);
        let altered = format!("{}{text}{}", &whole[..at], &whole[end..]);
        if let Ok(result) = RunResult::from_json(&altered) {
            html(&result);
            table(&result);
        }
        let _ = RunResult::from_json(&text);
    }
}
