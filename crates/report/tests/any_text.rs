//! The counterpart of the fuzz target `result`: any text is rejected or drawn.

use demeter_outcome::RunResult;
use demeter_report::{html, table};
use proptest::prelude::*;

const EXAMPLE: &str = include_str!("../../outcome/tests/example.json");
const SCHEMA_1: &str = include_str!("../../outcome/tests/schema-1.json");

/// The example as text, as three cases with all optional fields.
fn cases() -> String {
    let more = r#""elapsed_s": 5, "tail": {"mean_ns": 9, "p50_ns": 1, "p90_ns": 1, "p99_ns": 2,
        "p999_ns": 30}, "repeats": {"runs": 2, "min": 4, "max": 6}, "cpu_s": {"track": 1},"#;
    let counters = r#""flush_total": 3, "flush_guest_remote": 3, "pgmigrate_success""#;
    let (head, systems) = EXAMPLE.split_once("\"systems\"").unwrap();
    let systems = systems.replace("\"cpu_s\"", &format!("{more} \"cpu\""));
    let systems = systems.replace("\"pgmigrate_success\"", counters);
    let systems = systems.trim_end().strip_suffix('}').unwrap();
    let case = |vms| format!(r#"{{"settings": [["sim.vms", "{vms}"]], "systems"{systems}}}"#);
    let text = format!(
        r#"{head}"cases": [{}, {}, {}], "systems": [], "published": [{{"figure": "elapsed_s",
        "system": "demeter", "case": [["sim.vms", "1"]], "value": 5.5, "ours": 5, "within": 0.2,
        "source": "a paper"}}]}}"#,
        case(1),
        case(2),
        case(3)
    );
    assert_eq!(RunResult::from_json(&text).unwrap().cases.len(), 3);
    text
}

proptest! {
    #[test]
    fn any_text_is_refused_or_drawn(
        whole in prop_oneof![Just(cases()), Just(EXAMPLE.into()), Just(SCHEMA_1.into())],
        at in any::<prop::sample::Index>(),
        cut in 0usize..40,
        text in prop_oneof![any::<String>(), "[-0-9.e{}\\[\\]:,\"a-z_]{0,20}"],
    ) {
        // The text is ASCII, so that every byte is a character boundary.
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
