//! Sanitizes text from result files for terminals and pages.

use std::fmt::{self, Write};

/// Maximum length of a name, characters; the rest becomes `..`.
const NAME_CHARS_MAX: usize = 24;
/// Maximum length of a sentence, characters.
const SENTENCE_CHARS_MAX: usize = 300;

/// A name that can be shown: short, without control characters (terminals would obey them) and bidirectional marks.
pub(crate) fn name(raw: &str) -> String {
    let mut shown: String = raw.chars().take(NAME_CHARS_MAX).map(visible).collect();
    if raw.chars().nth(NAME_CHARS_MAX).is_some() {
        shown.truncate(
            shown
                .char_indices()
                .nth(NAME_CHARS_MAX - 2)
                .map_or(0, |(at, _)| at),
        );
        shown.push_str("..");
    }
    shown
}

/// Longer text, such as a source, sanitized like a name.
pub(crate) fn sentence(raw: &str) -> String {
    raw.chars().take(SENTENCE_CHARS_MAX).map(visible).collect()
}

fn visible(c: char) -> char {
    let turns_direction = matches!(
        c,
        '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}'
    );
    // U+FFFE and U+FFFF are not characters, and XML forbids them.
    let is_nothing = matches!(c, '\u{fffe}' | '\u{ffff}');
    if c.is_control() || turns_direction || is_nothing {
        '\u{fffd}'
    } else {
        c
    }
}

/// Text escaped for HTML and SVG, in content and in quoted attributes.
pub(crate) struct Escaped<'a>(pub &'a str);

impl fmt::Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for c in self.0.chars() {
            match c {
                '&' => f.write_str("&amp;")?,
                '<' => f.write_str("&lt;")?,
                '>' => f.write_str("&gt;")?,
                '"' => f.write_str("&quot;")?,
                '\'' => f.write_str("&#39;")?,
                '\n' => f.write_char('\n')?,
                _ => f.write_char(visible(c))?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn escaped_text_has_no_markup(raw in any::<String>()) {
            let escaped = Escaped(&raw).to_string();
            prop_assert!(!escaped.contains(['<', '>', '"', '\'']));
            let unescaped = escaped
                .replace("&lt;", "<").replace("&gt;", ">")
                .replace("&quot;", "\"").replace("&#39;", "'").replace("&amp;", "&");
            let expected: String =
                raw.chars().map(|c| if c == '\n' { c } else { visible(c) }).collect();
            prop_assert_eq!(unescaped, expected);
        }

        #[test]
        fn names_are_short_and_printable(raw in any::<String>()) {
            let name = name(&raw);
            prop_assert!(name.chars().count() <= NAME_CHARS_MAX);
            prop_assert!(!name.chars().any(char::is_control));
        }
    }

    #[test]
    fn a_short_name_is_shown_as_it_is() {
        assert_eq!(name("demeter-damon"), "demeter-damon");
        assert_eq!(name(&"x".repeat(25)), format!("{}..", "x".repeat(22)));
        assert_eq!(name("\u{1b}[2Jnone"), "\u{fffd}[2Jnone");
    }
}
