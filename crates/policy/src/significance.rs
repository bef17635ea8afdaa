//! Tests whether two densities of samples differ significantly.

/// Standard deviations by which a difference must exceed chance: among some thousand pairs one in a thousand does.
pub(crate) const CERTAINTY: f64 = 3.0;

/// The squared number of standard deviations between the densities `a / a_len` and `b / b_len`, if both were samples of
/// one Poisson process: the pooled two-sample test.
///
/// Counts are in samples, lengths in any one unit. Zero without samples.
pub(crate) fn z_squared(a: f64, a_len: f64, b: f64, b_len: f64) -> f64 {
    let pooled = (a + b) * a_len * b_len;
    if pooled <= 0.0 {
        return 0.0;
    }
    let difference = a * b_len - b * a_len;
    difference * difference / pooled
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_densities_do_not_differ() {
        assert_eq!(z_squared(50.0, 10.0, 500.0, 100.0), 0.0);
        assert_eq!(z_squared(0.0, 10.0, 0.0, 100.0), 0.0);
    }

    #[test]
    fn significance_grows_with_the_samples() {
        let few = z_squared(2.0, 1.0, 1.0, 1.0);
        let many = z_squared(200.0, 1.0, 100.0, 1.0);
        assert!((many / few - 100.0).abs() < 1e-9);
    }

    #[test]
    fn nothing_seen_in_a_little_says_little() {
        // 16 samples in 100 blocks say nothing about one block without any.
        assert!(z_squared(16.0, 100.0, 0.0, 1.0) < 1.0);
        assert!(z_squared(16.0, 100.0, 0.0, 100.0) >= 16.0);
    }
}
