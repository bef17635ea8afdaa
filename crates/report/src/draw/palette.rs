//! Colours of lines and bars, distinguishable for colour-blind people (after Okabe and Ito), on light and dark
//! backgrounds.

use std::collections::BTreeSet;
use std::fmt::Write;

use demeter_scenario::System;

/// A class of the style sheet, with a second one for dashes if colours repeat.
pub(crate) type Class = String;

/// Light and dark colour of each class `c0`, `c1`, ..., in the order of [`demeter_scenario::Color`].
const COLORS: [(&str, &str); 8] = [
    ("#24292f", "#e6e8eb"), // ink
    ("#8b9199", "#7f8790"), // grey
    ("#0072b2", "#4ba6e8"), // blue
    ("#d55e00", "#f0803c"), // vermilion
    ("#009e73", "#2fbf94"), // green
    ("#b0629a", "#d793bf"), // purple
    ("#c28100", "#e5ac3a"), // orange
    ("#4699c9", "#8fcdf0"), // sky
];
/// Colours for systems without one of their own.
const FREE: std::ops::Range<usize> = 2..COLORS.len();

/// Causes of CPU time and kinds of invalidations, in drawing order.
const PARTS: [(&str, usize); 17] = [
    ("agent_user", 2),
    ("agent_system", 7),
    ("kswapd", 3),
    ("kdamond", 4),
    ("workload_system", 6),
    ("other_system", 1),
    ("track", 2),
    ("classify", 7),
    ("migrate", 3),
    ("hint", 6),
    ("exit", 5),
    ("flush", 4),
    ("flush_guest_local_one", 7),
    ("flush_guest_local_all", 2),
    ("flush_guest_remote", 4),
    ("flush_host_vcpu", 6),
    ("flush_host_invept", 3),
];

/// Light and dark colour of each step of a heat map, `h0` (worst) to `h8`: one hue with different lightness, so that
/// the best cells are highlighted.
const HEAT: [(&str, &str); HEAT_STEPS] = [
    ("#eaf2f9", "#1c2a37"),
    ("#d3e4f2", "#20384c"),
    ("#b9d4ea", "#264a67"),
    ("#9bc2e1", "#2d5d84"),
    ("#7aaed6", "#3672a2"),
    ("#5b9bcb", "#4588bd"),
    ("#3577ae", "#5f9fd2"),
    ("#205f96", "#86bae3"),
    ("#0a4577", "#b5d7f1"),
];
/// Number of steps of a heat map.
pub(crate) const HEAT_STEPS: usize = 9;
/// First step on which text needs the other colour, on light and dark backgrounds.
const INK_TURNS: (usize, usize) = (6, 5);

/// A class for each system; a system has the same colour on every page.
pub(crate) fn systems<'a>(names: impl Iterator<Item = &'a str>) -> Vec<Class> {
    let own = |name: &str| Some(name.parse::<System>().ok()?.row().color? as usize);
    assign(own, names)
}

/// A class for each cause of CPU time or kind of invalidation.
pub(crate) fn parts<'a>(names: impl Iterator<Item = &'a str>) -> Vec<Class> {
    let own = |name: &str| {
        let known = PARTS.iter().find(|(known, _)| *known == name);
        known.map(|(_, slot)| *slot)
    };
    assign(own, names)
}

/// Drawing order of a part: known parts in their order, then all others.
pub(crate) fn rank(part: &str) -> usize {
    let known = PARTS.iter().position(|(known, _)| *known == part);
    known.unwrap_or(PARTS.len())
}

/// Assigns each name its `own` slot if it is free. Other names get the remaining slots, then repeat them with dashes.
fn assign<'a>(
    own: impl Fn(&str) -> Option<usize>,
    names: impl Iterator<Item = &'a str>,
) -> Vec<Class> {
    let mut taken = BTreeSet::new();
    let own: Vec<Option<usize>> = names
        .map(|name| own(name).filter(|slot| taken.insert(*slot)))
        .collect();
    let left: Vec<usize> = FREE.filter(|slot| !own.contains(&Some(*slot))).collect();
    let repeated = FREE.cycle().map(|slot| format!("c{slot} dashed"));
    let mut others = left.iter().map(|slot| format!("c{slot}")).chain(repeated);
    own.iter()
        .map(|own| match own {
            Some(slot) => format!("c{slot}"),
            // The chain never ends.
            None => others.next().unwrap_or_default(),
        })
        .collect()
}

/// The style sheet of a picture, light and dark.
pub(crate) fn css() -> String {
    format!(
        "{}.ground{{fill:#fff}}.grid{{stroke:#e4e6ea}}.axis,.shift{{stroke:#8b9199}}\
         text{{fill:#24292f}}.tick,.note{{fill:#5a626b}}\
         .value{{stroke:#fff;stroke-width:4px;paint-order:stroke}}\
         @media(prefers-color-scheme:dark){{{}.ground{{fill:#14171b}}.grid{{stroke:#2a2f36}}\
         .axis,.shift{{stroke:#7f8790}}text{{fill:#e6e8eb}}.tick,.note{{fill:#a2aab3}}\
         .value{{stroke:#14171b}}}}\
         text{{font:13px system-ui,-apple-system,\"Segoe UI\",sans-serif}}\
         .tick,.note{{font-size:12px;font-variant-numeric:tabular-nums}}\
         .title{{font-size:15px;font-weight:600}}\
         .end{{text-anchor:end}}.middle{{text-anchor:middle}}\
         .strong{{font-weight:600}}\
         .line{{fill:none;stroke-width:1.75;stroke-linejoin:round;stroke-linecap:round}}\
         .line.strong{{stroke-width:2.75}}.line.dashed{{stroke-dasharray:7 4}}\
         .leader{{fill:none;stroke-width:1;stroke-dasharray:1 3}}.whisker{{fill:none;stroke-width:1.25}}\
         .bar.dashed{{fill-opacity:.55}}\
         .shift{{stroke-dasharray:4 4}}.bar{{stroke:none}}",
        colors(|pair| pair.0, INK_TURNS.0, "#fff"),
        colors(|pair| pair.1, INK_TURNS.1, "#14171b"),
    )
}

/// The rules for all colours on one background. Text has the colour `ink` on steps of a heat map from `turn` on.
fn colors(of: fn(&(&'static str, &'static str)) -> &'static str, turn: usize, ink: &str) -> String {
    let mut rules = String::new();
    for (slot, pair) in COLORS.iter().enumerate() {
        let color = of(pair);
        // Writing to a String cannot fail.
        let _ = write!(
            rules,
            ".c{slot}{{stroke:{color};fill:{color};background:{color}}}"
        );
    }
    for (step, pair) in HEAT.iter().enumerate() {
        let color = of(pair);
        let _ = write!(
            rules,
            ".h{step}{{fill:{color};background:{color};stroke:none}}"
        );
        if step >= turn {
            let _ = write!(rules, "text.on{step}{{fill:{ink}}}");
        }
    }
    rules
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_system_keeps_its_colour_and_others_differ() {
        let classes = systems(["tpp", "demeter", "other", "oracle"].into_iter());
        assert_eq!(classes, ["c3", "c2", "c4", "c0"]);
        assert_eq!(systems(["demeter"].into_iter()), ["c2"]);
        // If two have the same slot, the first gets it.
        assert_eq!(systems(["damon", "memtis"].into_iter()), ["c4", "c2"]);
    }

    #[test]
    fn repeated_colours_are_dashed() {
        let names: Vec<String> = (0..12).map(|i| format!("x{i}")).collect();
        let classes = systems(names.iter().map(String::as_str));
        let mut unique = classes.clone();
        unique.sort();
        unique.dedup();
        assert_eq!(unique.len(), 12);
    }
}
