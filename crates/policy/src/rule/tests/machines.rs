//! Whole runs on model machines.

use super::machine::{hardware, hot_set, lab, run, scattered, sweep, window};

#[test]
fn a_hot_set_comes_into_fast_memory_and_then_nothing_moves() {
    for (machine, t90_s) in [
        (hardware(128, 1), 2.0),
        (hardware(2000, 4), 3.0),
        (hardware(8000, 8), 4.0),
        (lab(400), 10.0),
    ] {
        let n = machine.blocks;
        for outcome in [
            run(&machine, 40.0, 1, hot_set(n - n / 10, n / 10)),
            run(&machine, 40.0, 2, hot_set(n / 2, n / 10)),
        ] {
            assert!(outcome.t90_s <= t90_s, "{n} blocks: {outcome:?}");
            assert!(outcome.end > 2.1, "{n} blocks: {outcome:?}");
            assert!(outcome.moved < n as u64 / 4, "{n} blocks: {outcome:?}");
        }
    }
}

#[test]
fn single_hot_blocks_are_found() {
    for machine in [hardware(500, 4), hardware(4000, 4)] {
        let outcome = run(&machine, 40.0, 1, scattered(machine.blocks / 10));
        assert!(outcome.end > 1.85, "{outcome:?}");
    }
}

#[test]
fn memory_that_is_used_evenly_stays() {
    for machine in [hardware(500, 4), hardware(4000, 8), lab(400)] {
        let even = |_, share: &mut Vec<f64>| {
            let n = share.len();
            share.fill(1.0 / n as f64);
        };
        let outcome = run(&machine, 60.0, 3, even);
        assert!(outcome.moved <= 4, "{outcome:?}");
    }
}

#[test]
fn a_sweep_and_a_hot_set_that_never_stays_lose_little() {
    for machine in [hardware(500, 1), lab(400), hardware(4000, 1)] {
        let outcomes = [
            run(&machine, 60.0, 1, sweep(3.0)),
            run(&machine, 60.0, 1, sweep(20.0)),
            run(&machine, 60.0, 1, window(machine.blocks / 20, 2.0)),
        ];
        for outcome in outcomes {
            assert!(outcome.mean > 0.93, "{machine:?}: {outcome:?}");
        }
    }
}
