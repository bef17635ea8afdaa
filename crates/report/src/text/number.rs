//! Formats numbers for people, with about three significant digits.

/// Three significant digits, or all digits before the point, with a suffix from a million: `0.640`, `2.34`, `38.5`,
/// `1234`, `5.00M`. At most seven characters.
pub(crate) fn short(value: f64) -> String {
    const SUFFIXES: [(f64, &str); 4] = [(1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")];
    let size = value.abs();
    if size >= 1e18 {
        return format!("{value:.0e}");
    }
    for (unit, suffix) in SUFFIXES {
        // 999,999.5 would round up to seven digits.
        if size >= unit - 0.5 {
            return format!("{}{suffix}", significant(value / unit));
        }
    }
    significant(value)
}

fn significant(value: f64) -> String {
    let decimals = match value.abs() {
        size if size < 0.9995 => 3,
        size if size < 9.995 => 2,
        size if size < 99.95 => 1,
        _ => 0,
    };
    let text = format!("{value:.decimals$}");
    // "-0.000" has no sign.
    if text
        .trim_start_matches('-')
        .trim_matches(['0', '.'])
        .is_empty()
    {
        "0".into()
    } else {
        text
    }
}

/// A percentage with one digit after the point.
pub(crate) fn percent(share: f64) -> String {
    let percent = share * 100.0;
    if percent.abs() < 9999.95 {
        format!("{percent:.1}")
    } else {
        short(percent)
    }
}

/// An integer in full up to six digits, shorter above.
pub(crate) fn count(value: u64) -> String {
    if value < 1_000_000 {
        value.to_string()
    } else {
        short(value as f64)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn numbers_keep_about_three_digits() {
        let cases = [
            (0.0, "0"),
            (-0.0001, "0"),
            (0.64, "0.640"),
            (2.344, "2.34"),
            (9.996, "10.0"),
            (38.54, "38.5"),
            (500_764.0, "500764"),
            (999_999.7, "1.00M"),
            (5_123_456.0, "5.12M"),
            (-26.04, "-26.0"),
            (1e30, "1e30"),
        ];
        for (value, text) in cases {
            assert_eq!(short(value), text);
        }
        assert_eq!(percent(0.9765), "97.7");
        assert_eq!(count(344_920), "344920");
        assert_eq!(count(20_214_840), "20.2M");
    }

    proptest! {
        #[test]
        fn numbers_stay_short(value in proptest::num::f64::NORMAL | proptest::num::f64::ZERO) {
            prop_assert!(short(value).len() <= 7, "{}", short(value));
            prop_assert!(count(value.abs() as u64).len() <= 7);
        }
    }
}
