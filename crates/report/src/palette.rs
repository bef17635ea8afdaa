//! Colours of lines and bars: told apart by people who see colours differently (after Okabe and
//! Ito), on light and dark ground.

/// A class of the style sheet, with a second one that dashes lines when colours repeat.
pub(crate) type Class = String;

/// Light and dark colour of each class `c0`, `c1`, ...
const COLORS: [(&str, &str); 8] = [
    ("#24292f", "#e6e8eb"), // ink: the oracle
    ("#8b9199", "#7f8790"), // grey: no management
    ("#0072b2", "#4ba6e8"), // blue
    ("#d55e00", "#f0803c"), // vermilion
    ("#009e73", "#2fbf94"), // green
    ("#b0629a", "#d793bf"), // purple
    ("#c28100", "#e5ac3a"), // orange
    ("#4699c9", "#8fcdf0"), // sky
];
/// The colours for what has none of its own.
const FREE: std::ops::Range<usize> = 2..COLORS.len();

const SYSTEMS: [(&str, usize); 6] = [
    ("oracle", 0),
    ("none", 1),
    ("demeter", 2),
    ("linux", 3),
    ("damon", 4),
    ("demeter-damon", 5),
];

const CAUSES: [(&str, usize); 6] = [
    ("agent_user", 2),
    ("agent_system", 7),
    ("kswapd", 3),
    ("kdamond", 4),
    ("workload_system", 6),
    ("other_system", 1),
];

/// A class for each system: the same system has the same colour on every page.
pub(crate) fn systems<'a>(names: impl Iterator<Item = &'a str>) -> Vec<Class> {
    assign(&SYSTEMS, names)
}

/// A class for each cause of CPU time.
pub(crate) fn causes<'a>(names: impl Iterator<Item = &'a str>) -> Vec<Class> {
    assign(&CAUSES, names)
}

/// Known names have their colour; the others take those that are left, and then repeat, dashed.
fn assign<'a>(known: &[(&str, usize)], names: impl Iterator<Item = &'a str>) -> Vec<Class> {
    let own = |name: &str| {
        known
            .iter()
            .find(|(known, _)| *known == name)
            .map(|(_, slot)| *slot)
    };
    let own: Vec<Option<usize>> = names.map(own).collect();
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
    let rules = |color: fn(&(&'static str, &'static str)) -> &'static str| {
        let rule = |(slot, pair)| {
            let color = color(pair);
            format!(".c{slot}{{stroke:{color};fill:{color};background:{color}}}")
        };
        COLORS.iter().enumerate().map(rule).collect::<String>()
    };
    format!(
        "{}{}@media(prefers-color-scheme:dark){{{}{}}}{}",
        rules(|pair| pair.0),
        ".ground{fill:#fff}.grid{stroke:#e4e6ea}.axis,.shift{stroke:#8b9199}\
         text{fill:#24292f}.tick,.note{fill:#5a626b}",
        rules(|pair| pair.1),
        ".ground{fill:#14171b}.grid{stroke:#2a2f36}.axis,.shift{stroke:#7f8790}\
         text{fill:#e6e8eb}.tick,.note{fill:#a2aab3}",
        "text{font:13px system-ui,-apple-system,\"Segoe UI\",sans-serif;stroke:none}\
         .tick,.note{font-size:12px;font-variant-numeric:tabular-nums}\
         .title{font-size:15px;font-weight:600}\
         .end{text-anchor:end}.middle{text-anchor:middle}\
         .strong{font-weight:600}\
         .line{fill:none;stroke-width:1.75;stroke-linejoin:round;stroke-linecap:round}\
         .line.strong{stroke-width:2.75}.line.dashed{stroke-dasharray:7 4}\
         .leader{fill:none;stroke-width:1}\
         .shift{stroke-dasharray:4 4}.bar{stroke:none}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_system_keeps_its_colour_and_others_differ() {
        let classes = systems(["tpp", "demeter", "memtis", "oracle"].into_iter());
        assert_eq!(classes, ["c3", "c2", "c4", "c0"]);
        assert_eq!(systems(["demeter"].into_iter()), ["c2"]);
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
