//! Cleans text from the other side for terminals and logs.

/// Replaces control characters and marks of text direction by question marks. The result is never
/// longer than `raw`.
///
/// Otherwise escape sequences or line feeds in foreign text could control a terminal or forge log
/// lines.
pub fn shown(raw: &str) -> String {
    let shown = |c: char| if is_obeyed(c) { '?' } else { c };
    raw.chars().map(shown).collect()
}

fn is_obeyed(c: char) -> bool {
    let turns_direction = matches!(
        c,
        '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}'
    );
    // Unicode's line and paragraph separators also end a line.
    c.is_control() || turns_direction || matches!(c, '\u{2028}' | '\u{2029}')
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn nothing_is_left_that_would_be_obeyed(raw in any::<String>()) {
            let once = shown(&raw);
            prop_assert!(!once.chars().any(is_obeyed));
            prop_assert!(once.len() <= raw.len());
            prop_assert_eq!(shown(&once), once);
        }
    }

    #[test]
    fn all_other_text_stays_as_it_is() {
        assert_eq!(shown("no room: Größe 3 MiB"), "no room: Größe 3 MiB");
        assert_eq!(shown("\x1b[2Ja\nb\u{202e}c"), "?[2Ja?b?c");
    }
}
