//! Formats an error as one line.

use std::error::Error;

/// The chain of causes, joined by colons. A cause that its parent's text contains is skipped, and line breaks become
/// spaces.
pub fn one_line(error: &(dyn Error + 'static)) -> String {
    let mut line = String::new();
    let mut next = Some(error);
    while let Some(cause) = next {
        next = cause.source();
        let text = cause.to_string();
        let text = text.lines().map(str::trim).collect::<Vec<_>>().join(" ");
        if line.is_empty() {
            line = text;
        } else if !line.contains(&text) {
            line.push_str(": ");
            line.push_str(&text);
        }
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("{0}")]
    struct Said(&'static str, #[source] Option<Box<Said>>);

    fn chain(texts: &[&'static str]) -> Option<Box<Said>> {
        let (first, others) = texts.split_first()?;
        Some(Box::new(Said(first, chain(others))))
    }

    #[test]
    fn causes_are_joined_once_and_on_one_line() {
        let error = chain(&["report", "cannot write a: disk full", "disk\n  full"]).unwrap();
        assert_eq!(one_line(&*error), "report: cannot write a: disk full");
        let error = chain(&["what", "why"]).unwrap();
        assert_eq!(one_line(&*error), "what: why");
    }
}
