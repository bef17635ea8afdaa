//! Parser of a program's output: last lines, readiness, figure. It has no I/O.

use std::collections::VecDeque;

use regex_lite::Regex;

use super::meter::Meter;

/// Maximum length of a parsed line; the rest of a longer line is skipped.
const LINE_BYTES_MAX: usize = 4096;

/// Maximum number of stored lines, and of their bytes.
const LINES_MAX: usize = 100;
const KEPT_BYTES_MAX: usize = 16 * 1024;

/// Parser of one program's output.
#[derive(Debug)]
pub struct OutputParser {
    ready: Option<Regex>,
    is_ready: bool,
    number: Option<Regex>,
    /// Its figure, if the program prints one.
    pub meter: Meter,
    line: Vec<u8>,
    kept: VecDeque<String>,
    kept_bytes: usize,
}

impl OutputParser {
    /// Waits for a line that matches `ready`, and reads numbers that match `number`.
    pub fn new(ready: Option<Regex>, number: Option<Regex>, meter: Meter) -> Self {
        Self {
            ready,
            is_ready: false,
            number,
            meter,
            line: vec![],
            kept: VecDeque::new(),
            kept_bytes: 0,
        }
    }

    /// Adds output printed at `t_s`. Returns true when the program first reports that it is ready.
    pub fn take(&mut self, bytes: &[u8], t_s: f64) -> bool {
        let was_ready = self.is_ready;
        for &byte in bytes {
            // Progress lines that overwrite themselves end with a carriage return.
            if byte == b'\n' || byte == b'\r' {
                self.end_line(t_s);
            } else if self.line.len() < LINE_BYTES_MAX {
                self.line.push(byte);
            }
        }
        self.is_ready && !was_ready
    }

    fn end_line(&mut self, t_s: f64) {
        let line = String::from_utf8_lossy(&std::mem::take(&mut self.line)).into_owned();
        if line.trim().is_empty() {
            return;
        }
        let found = |regex: &Option<Regex>| regex.as_ref().is_some_and(|r| r.is_match(&line));
        self.is_ready |= found(&self.ready);
        if let Some(value) = self.number.as_ref().and_then(|regex| number(regex, &line)) {
            self.meter.add(t_s, value);
        }
        self.kept_bytes += line.len();
        self.kept.push_back(line);
        while self.kept.len() > LINES_MAX || self.kept_bytes > KEPT_BYTES_MAX {
            self.kept_bytes -= self.kept.pop_front().map_or(0, |line| line.len());
        }
    }

    /// Whether the program has reported that it is ready.
    pub fn is_ready(&self) -> bool {
        self.is_ready
    }

    /// Its last lines.
    pub fn last_lines(&self) -> String {
        let kept = self.kept.iter().map(String::as_str);
        let unfinished = String::from_utf8_lossy(&self.line);
        let unfinished = (!unfinished.trim().is_empty()).then_some(&*unfinished);
        kept.chain(unfinished).collect::<Vec<_>>().join("\n")
    }
}

/// The number in a text: the first group of the expression.
pub fn number(regex: &Regex, text: &str) -> Option<f64> {
    regex.captures(text)?.get(1)?.as_str().parse().ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn heard() -> OutputParser {
        let regex = |text| Some(Regex::new(text).unwrap());
        OutputParser::new(regex("^ready"), regex("=([0-9.]+) ops"), Meter::new(false))
    }

    #[test]
    fn a_program_is_ready_once_and_its_numbers_are_read() {
        let mut heard = heard();
        assert!(!heard.take(b"rps=1 ops\rnot ready\nrea", 0.5));
        assert!(heard.take(b"dy\n", 1.0));
        assert!(!heard.take(b"ready again\nrps=x ops\nrps=3 ops\nlast", 1.5));
        assert!(heard.is_ready());
        assert_eq!(heard.meter.mean(), Some(2.0));
        assert!(
            heard
                .last_lines()
                .starts_with("rps=1 ops\nnot ready\nready\n")
        );
        assert!(heard.last_lines().ends_with("rps=3 ops\nlast"));
    }

    proptest! {
        /// For any output, in any pieces, memory is bounded.
        #[test]
        fn nothing_grows_without_bound(
            pieces in proptest::collection::vec(
                (proptest::collection::vec(any::<u8>(), 0..40), 1usize..2000), 0..20,
            ),
        ) {
            let mut heard = heard();
            for (piece, times) in pieces {
                heard.take(&piece.repeat(times), 0.0);
                prop_assert!(heard.line.len() <= LINE_BYTES_MAX);
                prop_assert!(heard.kept.len() <= LINES_MAX);
                let bytes: usize = heard.kept.iter().map(String::len).sum();
                prop_assert_eq!(bytes, heard.kept_bytes);
                prop_assert!(bytes <= KEPT_BYTES_MAX);
            }
        }
    }
}
