//! Has the unit fallen silent? Some do, while programs miss their caches. Others go on without addresses.

use std::time::{Duration, Instant};

/// Silence from which on the unit is suspected.
const PATIENCE: Duration = Duration::from_secs(3);
/// The most patience: while programs are idle the unit is silent, and each proof costs some milliseconds.
const PATIENCE_MAX: Duration = Duration::from_secs(300);

/// Tells when to have a silent unit prove that it works.
#[derive(Debug)]
pub(super) struct Watchdog {
    /// The last sign of life.
    heard: Instant,
    patience: Duration,
}

impl Watchdog {
    pub fn new(now: Instant) -> Self {
        Self {
            heard: now,
            patience: PATIENCE,
        }
    }

    /// Whether the unit must prove that it works. `heard`: there was a sign of life since the last call.
    pub fn is_suspect(&mut self, heard: bool, now: Instant) -> bool {
        if heard {
            *self = Self::new(now);
        }
        now.saturating_duration_since(self.heard) >= self.patience
    }

    /// It has proved it: the program was silent, and may be so for long.
    pub fn is_alive(&mut self, now: Instant) {
        self.heard = now;
        self.patience = (self.patience * 2).min(PATIENCE_MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silence_is_suspect_and_the_longer_the_rarer() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut dog = Watchdog::new(at(0));
        assert!(!dog.is_suspect(false, at(2)));
        assert!(dog.is_suspect(false, at(3)));
        dog.is_alive(at(3));
        assert!(!dog.is_suspect(false, at(8)));
        assert!(dog.is_suspect(false, at(9)));
        // A record: the next silence is a new one.
        assert!(!dog.is_suspect(true, at(9)));
        assert!(dog.is_suspect(false, at(12)));
        for _ in 0..20 {
            dog.is_alive(at(12));
        }
        assert!(!dog.is_suspect(false, at(311)));
        assert!(dog.is_suspect(false, at(312)));
    }
}
