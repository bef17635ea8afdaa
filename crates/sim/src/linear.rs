//! Linear model: the gain from direct segments, predicted from performance counters.
//!
//! # Problem
//! No processor has direct segments for virtual machines. Their gain follows, nearly, from TLB miss counts and the cost
//! of a miss natively and in a VM.
//!
//! # Approach
//! The linear model of Gandhi et al. (MICRO-47). A miss in the segment costs a walk of the remaining dimension, and the
//! comparisons with the segment's bounds. There are five if the segment replaces the hypervisor's dimension (the
//! guest's four tables and the data), and one if it replaces the guest's. All other misses cost as much as in a VM.
//! With two segments, a miss costs nothing.
//!
//! # Properties
//! - Without misses in the segment, every mode costs as much as paging.
//! - A larger share of misses in the segment never costs more, if a native walk plus comparisons is shorter than a
//!   nested walk.
//! - Contradictory counters are refused.

/// Bound comparisons in a walk if a segment replaces the hypervisor's dimension.
const CHECKS_VMM_DIRECT: f64 = 5.0;
/// Bound comparisons in a walk if a segment replaces the guest's dimension.
const CHECKS_GUEST_DIRECT: f64 = 1.0;
/// Maximum ratio of misses between two runs of the same work.
const MISSES_APART_MAX: f64 = 1.5;

/// Counters of one run. Times may have any unit, such as cycles, but all the same.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Counters {
    /// Total time.
    pub time: f64,
    /// Walks of page tables.
    pub walks: f64,
    /// Time of the walks.
    pub walk_time: f64,
}

/// Counters of a program natively and in a VM.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Runs {
    /// Without a hypervisor.
    pub native: Counters,
    /// With paging in both dimensions.
    pub virtualized: Counters,
    /// Share of the misses that fall in the segment, 0 to 1.
    pub segment_share: f64,
    /// Time of one comparison with a segment's bounds.
    pub check_time: f64,
}

/// Translation overhead of each mode: its time divided by all other time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Overheads {
    /// Paging, no hypervisor.
    pub native: f64,
    /// Paging in both dimensions.
    pub virtualized: f64,
    /// A segment, no hypervisor.
    pub direct_segment: f64,
    /// A segment from guest-physical to host memory.
    pub vmm_direct: f64,
    /// A segment from guest-virtual to guest-physical memory.
    pub guest_direct: f64,
    /// Both segments.
    pub dual_direct: f64,
}

/// A contradiction between counters.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
pub enum Contradiction {
    /// A value that is not finite or is negative.
    #[error("the {run} run: {what} = {value} is no count; count it again")]
    NoCount {
        /// Which run.
        run: &'static str,
        /// The counter.
        what: &'static str,
        /// Its value.
        value: f64,
    },
    /// More time in walks than in total.
    #[error(
        "the {run} run: walks took {walk_time} of {time}: no time is left for the program; count both in the \
         same run and in the same unit"
    )]
    AllWalks {
        /// Which run.
        run: &'static str,
        /// Time of walks.
        walk_time: f64,
        /// Total time.
        time: f64,
    },
    /// Walks without time, or time without walks.
    #[error(
        "the {run} run: {walks} walks took {walk_time}: a walk takes time, and time of walks needs walks; \
         count loads and stores in both"
    )]
    NoWalks {
        /// Which run.
        run: &'static str,
        /// Walks.
        walks: f64,
        /// Their time.
        walk_time: f64,
    },
    /// A VM's walks shorter than native ones.
    #[error(
        "a walk takes {virtualized:.1} in the VM and {native:.1} natively: the second dimension cannot save \
         time; are the two runs swapped?"
    )]
    Swapped {
        /// Time of a native walk.
        native: f64,
        /// Time of a VM's walk.
        virtualized: f64,
    },
    /// Runs of different amounts of work.
    #[error(
        "for the same work the VM has {apart:.2} times the native run's misses: one program with the same \
         input and page sizes has about as many in both"
    )]
    Unlike {
        /// Ratio of the VM's misses to native ones, for equal time outside of walks.
        apart: f64,
    },
    /// A share outside 0 to 1.
    #[error("the share of misses in the segment is {0}: give 0 to 1")]
    NoShare(f64),
}

impl Runs {
    /// Predicts the overhead of each mode.
    ///
    /// # Errors
    /// When counters contradict each other; the error says how to fix it.
    pub fn predict(&self) -> Result<Overheads, Contradiction> {
        let share = self.segment_share;
        if !(0.0..=1.0).contains(&share) {
            return Err(Contradiction::NoShare(share));
        }
        check("native", &self.native)?;
        check("virtual", &self.virtualized)?;
        let (native_rate, native) = rate_and_cost(&self.native);
        let (rate, virtualized) = rate_and_cost(&self.virtualized);
        if self.virtualized.walks > 0.0 && virtualized < native {
            return Err(Contradiction::Swapped {
                native,
                virtualized,
            });
        }
        let apart = rate / native_rate;
        if !(MISSES_APART_MAX.recip()..=MISSES_APART_MAX).contains(&apart) && rate != native_rate {
            return Err(Contradiction::Unlike { apart });
        }
        let mixed = |in_segment: f64| rate * (share * in_segment + (1.0 - share) * virtualized);
        let checks = |count: f64| native + count * self.check_time;
        Ok(Overheads {
            native: native_rate * native,
            virtualized: rate * virtualized,
            direct_segment: native_rate * (1.0 - share) * native,
            vmm_direct: mixed(checks(CHECKS_VMM_DIRECT)),
            guest_direct: mixed(checks(CHECKS_GUEST_DIRECT)),
            dual_direct: mixed(0.0),
        })
    }
}

/// Misses per unit of time outside of walks, and the time of one miss.
fn rate_and_cost(counters: &Counters) -> (f64, f64) {
    let cost = match counters.walks > 0.0 {
        true => counters.walk_time / counters.walks,
        false => 0.0,
    };
    (counters.walks / (counters.time - counters.walk_time), cost)
}

fn check(run: &'static str, counters: &Counters) -> Result<(), Contradiction> {
    let &Counters {
        time,
        walks,
        walk_time,
    } = counters;
    for (what, value) in [
        ("time", time),
        ("walks", walks),
        ("time of walks", walk_time),
    ] {
        if !value.is_finite() || value < 0.0 {
            return Err(Contradiction::NoCount { run, what, value });
        }
    }
    if walk_time >= time {
        return Err(Contradiction::AllWalks {
            run,
            walk_time,
            time,
        });
    }
    if (walks > 0.0) != (walk_time > 0.0) {
        return Err(Contradiction::NoWalks {
            run,
            walks,
            walk_time,
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn counters(time: f64, walks: f64, walk_time: f64) -> Counters {
        Counters {
            time,
            walks,
            walk_time,
        }
    }

    fn runs(segment_share: f64) -> Runs {
        Runs {
            // A walk takes 40 and 120, with ten walks per 1000 of other time.
            native: counters(1400.0, 10.0, 400.0),
            virtualized: counters(2200.0, 10.0, 1200.0),
            segment_share,
            check_time: 1.0,
        }
    }

    #[test]
    fn overheads_are_those_of_the_formula() {
        let all = runs(1.0).predict().unwrap();
        let near = |a: f64, b: f64| assert!((a - b).abs() < 1e-12, "{a} {b}");
        near(all.native, 0.4);
        near(all.virtualized, 1.2);
        near(all.vmm_direct, 0.45);
        near(all.guest_direct, 0.41);
        assert_eq!((all.direct_segment, all.dual_direct), (0.0, 0.0));
        let half = runs(0.5).predict().unwrap();
        near(half.dual_direct, 0.6);
        near(half.vmm_direct, 0.825);
    }

    #[test]
    fn counters_that_contradict_each_other_are_refused() {
        let with = |change: &dyn Fn(&mut Runs)| {
            let mut runs = runs(0.9);
            change(&mut runs);
            runs.predict().unwrap_err().to_string()
        };
        type Change<'a> = &'a dyn Fn(&mut Runs);
        let all: [(Change<'_>, &str); 6] = [
            (&|r| r.native.walk_time = 1400.0, "no time is left"),
            (&|r| r.native.walks = 0.0, "needs walks"),
            (&|r| r.virtualized.time = f64::NAN, "is no count"),
            (
                &|r| std::mem::swap(&mut r.native, &mut r.virtualized),
                "swapped",
            ),
            (
                &|r| r.virtualized.time = 20_000.0,
                "times the native run's misses",
            ),
            (&|r| r.segment_share = 1.2, "0 to 1"),
        ];
        for (change, reason) in all {
            let said = with(change);
            assert!(said.contains(reason), "{said}");
        }
    }

    proptest! {
        #[test]
        fn a_larger_segment_costs_no_more(a in 0.0f64..=1.0, b in 0.0f64..=1.0) {
            let (less, more) = (a.min(b), a.max(b));
            let [less, more] = [less, more].map(|share| runs(share).predict().unwrap());
            let near = 1e-12;
            prop_assert!(more.vmm_direct <= less.vmm_direct + near);
            prop_assert!(more.guest_direct <= less.guest_direct + near);
            prop_assert!(more.dual_direct <= less.dual_direct + near);
            prop_assert!(less.vmm_direct <= less.virtualized + near);
        }

        #[test]
        fn any_counters_are_answered(n in proptest::array::uniform8(any::<f64>())) {
            let runs = Runs {
                native: counters(n[0], n[1], n[2]),
                virtualized: counters(n[3], n[4], n[5]),
                segment_share: n[6],
                check_time: n[7],
            };
            let _ = runs.predict();
        }
    }
}
