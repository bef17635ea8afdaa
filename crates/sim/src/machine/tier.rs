//! Memory tiers: latency that grows with the load, and bandwidth.
//!
//! # Approach
//! Loaded latency fits `idle × (1 + a u / (1 - b u))`. Here u is the share of the peak bandwidth in use, and each kind of
//! memory has its own a and b, and its own peak for each mix of loads and stores (see `fit`). The share is averaged over
//! the last windows of time, to avoid oscillation. If demand exceeds the bandwidth, latency rises from window to window until demand equals the bandwidth.
//! On a machine of several sockets each has a path of its own to each node. A path is as busy as its own traffic
//! makes it, or as the node behind it with the traffic of all sockets, whichever is more.
//!
//! # Properties
//! - Programs that wait for each load get at most the peak bandwidth.

use demeter_policy::Level;
use demeter_scenario::Curve;

use super::ledger::Cause;

/// Bytes of a cache line.
pub(crate) const LINE_BYTES: u64 = 64;

/// Share of the peak bandwidth beyond which the fit is not trusted.
const USE_MAX: f64 = 0.98;

/// Maximum slowdown by overload.
const OVERLOAD_MAX: f64 = 1000.0;

/// Weight of the newest window in the average of used bandwidth.
const NEWEST: f64 = 0.25;

/// Number of cores that saturate the write bandwidth, unless a single core is slower than that (measured on Optane).
const CORES_PER_WRITE_PEAK: u64 = 4;

/// Model of one memory tier, or of a node of it as one socket reaches it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TierModel {
    /// Idle latency of a load.
    pub latency_ps: u64,
    /// Peak bandwidth of loads.
    pub read_bytes_per_s: u64,
    /// Peak bandwidth of stores.
    pub write_bytes_per_s: u64,
    /// Lines transferred internally for one random access.
    pub granule_lines: u64,
    /// How its latency grows with its load.
    pub curve: Curve,
    /// Growth of its latency with its load, percent of what the curve says.
    pub loaded_percent: u32,
    /// Bandwidth that users other than the VMs would load from idle memory. Their loads wait, too: at twice the latency
    /// they load half as much.
    pub others_bytes_per_s: u64,
}

/// A memory tier under load, or a path to a node of it.
#[derive(Debug, Clone)]
pub(crate) struct LoadedTier {
    model: TierModel,
    /// The cause of the time that its data takes.
    pub(crate) cause: Cause,
    /// Current latency of a load.
    pub(crate) latency_ps: u64,
    /// Current time for the next line of a stream.
    pub(crate) stream_ps: u64,
    core_line_ps: u64,
    /// Average share of the bandwidth in use.
    used: f64,
    /// Slowdown by demand above the bandwidth.
    overload: f64,
    /// Lines transferred internally for one random access.
    pub(crate) granule_lines: u64,
    /// Lines read since the window began.
    pub(crate) lines_read: u64,
    pub(crate) lines_written: u64,
    /// Lines of all earlier windows.
    lines_before: u64,
}

impl LoadedTier {
    /// An idle tier; one core streams at most `core_bytes_per_s`.
    pub(crate) fn new(model: TierModel, level: Level, core_bytes_per_s: u64) -> Self {
        let rate = core_bytes_per_s.min(model.read_bytes_per_s).max(1);
        let core_line_ps = LINE_BYTES * 1_000_000_000_000 / rate;
        Self {
            model,
            cause: match level {
                Level::First => Cause::Fast,
                _ => Cause::Slow,
            },
            latency_ps: model.latency_ps,
            stream_ps: core_line_ps,
            core_line_ps,
            used: 0.0,
            overload: 1.0,
            granule_lines: model.granule_lines,
            lines_read: 0,
            lines_written: 0,
            lines_before: 0,
        }
    }

    /// Lines read and written since the last [`Self::rest`].
    pub(crate) fn lines_ever(&self) -> u64 {
        self.lines_before + self.lines_read + self.lines_written
    }

    /// Resets the load to idle.
    pub(crate) fn rest(&mut self) {
        *self = Self {
            latency_ps: self.model.latency_ps,
            stream_ps: self.core_line_ps,
            used: 0.0,
            overload: 1.0,
            lines_read: 0,
            lines_written: 0,
            lines_before: 0,
            ..*self
        };
    }

    /// Lines read and written in this window so far.
    pub(crate) fn lines(&self) -> [u64; 2] {
        [self.lines_read, self.lines_written]
    }

    /// Share of its bandwidth that these lines and other users take in a window; each line stands for `2^k` real ones.
    pub(crate) fn used_by(
        &self,
        [lines_read, lines_written]: [u64; 2],
        window_ps: u64,
        k: u32,
    ) -> f64 {
        let share = |lines: u64, per_s: u64| {
            let bytes = (lines << k) as f64 * LINE_BYTES as f64;
            bytes * 1e12 / (window_ps as f64 * per_s as f64)
        };
        let slower = self.latency_ps as f64 / self.model.latency_ps.max(1) as f64;
        let others = self.model.others_bytes_per_s as f64 / slower.max(1.0);
        let read = share(lines_read, self.model.read_bytes_per_s)
            + others / self.model.read_bytes_per_s as f64;
        let written = share(lines_written, self.model.write_bytes_per_s);
        (read + written) / peak_at(self.model.curve, read, written)
    }

    /// Peak bandwidth of loads.
    pub(crate) fn peak_bytes_per_s(&self) -> u64 {
        self.model.read_bytes_per_s
    }

    /// Ends a window of time, in which this share of its bandwidth was in use. It sets the latency of the next window.
    pub(crate) fn end_window(&mut self, used: f64) {
        self.used += (used - self.used) * NEWEST;
        let overload = self.overload * (self.used / USE_MAX).sqrt();
        self.overload = overload.clamp(1.0, OVERLOAD_MAX);
        let more = slowdown(self.model.curve, self.used) - 1.0;
        let factor = (1.0 + more * f64::from(self.model.loaded_percent) / 100.0) * self.overload;
        self.latency_ps = (self.model.latency_ps as f64 * factor) as u64;
        self.stream_ps = (self.core_line_ps as f64 * factor) as u64;
        self.lines_before += self.lines_read + self.lines_written;
        self.lines_read = 0;
        self.lines_written = 0;
    }

    /// Time for one core to copy bytes from this tier to another.
    pub(crate) fn copy_ps(&self, to: &Self, bytes: u64) -> u64 {
        bytes / LINE_BYTES * self.stream_ps.max(to.write_line_ps())
    }

    fn write_line_ps(&self) -> u64 {
        let core_bytes_per_s = (self.model.write_bytes_per_s / CORES_PER_WRITE_PEAK).max(1);
        (LINE_BYTES * 1_000_000_000_000 / core_bytes_per_s).max(self.core_line_ps)
    }

    /// Time to zero bytes.
    pub(crate) fn clear_ps(&self, bytes: u64) -> u64 {
        bytes / LINE_BYTES * self.write_line_ps()
    }
}

/// Fit of a kind of memory to its measurements.
struct Fit {
    /// Factors of the curve, of memory that is only read.
    a: f64,
    b: f64,
    /// Peak bandwidth with one store for two loads, and for one load, in parts of that of loads alone.
    peaks: [f64; 2],
}

/// The fit of a curve. The peaks are 1 where no measurement is published.
///
/// - DDR4: measured on Ice Lake-SP, error about 3 %.
/// - DDR5, another socket, CXL: fitted to the measurements that come with *Exploring Performance and Cost Optimization with
///   ASIC-Based CXL Memory* (EuroSys 2024; MLC 3.10 on Sapphire Rapids). Errors up to 95 % of the peak: DDR5 1.3 %,
///   another socket 2.4 %, CXL 4.6 %. Stores turn the bus of DDR5 around; CXL has a lane for each direction.
/// - Optane: fitted to the loads' latency beside writers that comes with *An Empirical Guide to the Behavior and Use of
///   Scalable Persistent Memory* (FAST 2020; six modules on Cascade Lake). Error up to 95 % of the peak 3 %, without one point
///   that is off its neighbours. Its bandwidth of stores is the scenario's.
///
/// CXL memory behind a switch has no published curve. A switch adds idle latency, which is the scenario's.
fn fit(curve: Curve) -> Fit {
    let (a, b, peaks) = match curve {
        Curve::Ddr4 => (0.198, 0.891, [1.0, 1.0]),
        Curve::Ddr5 => (0.19, 0.78, [0.887, 0.861]),
        Curve::Remote => (0.14, 0.75, [0.623, 0.558]),
        Curve::Cxl => (0.20, 0.80, [1.129, 1.140]),
        Curve::Optane => (0.12, 0.725, [1.0, 1.0]),
    };
    Fit { a, b, peaks }
}

/// Slowdown of a load against an idle tier, by share of the bandwidth in use.
fn slowdown(curve: Curve, used: f64) -> f64 {
    let Fit { a, b, .. } = fit(curve);
    let u = used.clamp(0.0, USE_MAX);
    1.0 + a * u / (1.0 - b * u)
}

/// The peak bandwidth for this traffic, in parts of that of loads alone: straight between the measured mixes, and constant
/// where stores exceed loads.
fn peak_at(curve: Curve, read: f64, written: f64) -> f64 {
    let [third, half] = fit(curve).peaks;
    let stores = written / (read + written).max(f64::MIN_POSITIVE);
    if stores < 1.0 / 3.0 {
        1.0 + (third - 1.0) * stores * 3.0
    } else {
        third + (half - third) * (stores.min(0.5) - 1.0 / 3.0) * 6.0
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const DRAM: TierModel = TierModel {
        latency_ps: 91_500,
        read_bytes_per_s: 176_000_000_000,
        write_bytes_per_s: 176_000_000_000,
        granule_lines: 1,
        curve: Curve::Ddr4,
        loaded_percent: 100,
        others_bytes_per_s: 0,
    };

    fn idle(model: TierModel, core_bytes_per_s: u64) -> LoadedTier {
        LoadedTier::new(model, Level::First, core_bytes_per_s)
    }

    /// Ends a window with the tier's own traffic.
    fn end(tier: &mut LoadedTier, window_ps: u64, k: u32) {
        tier.end_window(tier.used_by(tier.lines(), window_ps, k));
    }

    #[test]
    fn latency_follows_the_fit() {
        let window_ps = 1_000_000_000;
        let at = |share: f64| {
            let mut tier = idle(DRAM, 12_000_000_000);
            for _ in 0..50 {
                tier.lines_read = (share * 176e9 * 1e-3 / 64.0) as u64;
                end(&mut tier, window_ps, 0);
            }
            tier.latency_ps as f64 / 1000.0
        };
        assert!((at(0.0) - 91.5).abs() < 0.1);
        assert!((at(0.5) - 91.5 * (1.0 + 0.099 / 0.5545)).abs() < 0.5);
        assert!(at(0.9) > 1.8 * 91.5);
        assert!(at(3.0) > 2.5 * at(0.9));
    }

    /// A measured curve: MB/s and ns.
    struct Measured {
        curve: Curve,
        idle_ns: f64,
        peak: f64,
        points: [(f64, f64); 4],
    }

    /// Some of the measurements (`data/ddr5/log_d4_c16_w0_r0`, `log_d7_c16_w0_r0` and `data/cxl/log_d0_c16_w0_r0` of the artifact
    /// of EuroSys 2024; `graphs/06-bandwidth_seqwrite_latency.csv` of that of FAST 2020).
    const MEASURED: [Measured; 4] = [
        Measured {
            curve: Curve::Optane,
            idle_ns: 163.76,
            peak: 12_039.6,
            points: [
                (2_195.5, 169.79),
                (4_692.6, 173.16),
                (7_805.4, 188.22),
                (11_012.9, 218.04),
            ],
        },
        Measured {
            curve: Curve::Ddr5,
            idle_ns: 98.0,
            peak: 69_300.0,
            points: [
                (16_747.3, 103.99),
                (26_247.1, 108.01),
                (36_404.6, 114.15),
                (66_140.1, 161.19),
            ],
        },
        Measured {
            curve: Curve::Remote,
            idle_ns: 191.0,
            peak: 70_800.0,
            points: [
                (15_447.9, 196.82),
                (24_256.9, 206.26),
                (33_769.6, 215.76),
                (64_137.1, 261.02),
            ],
        },
        Measured {
            curve: Curve::Cxl,
            idle_ns: 258.0,
            peak: 48_000.0,
            points: [
                (17_211.5, 295.92),
                (28_634.5, 317.24),
                (36_205.4, 341.58),
                (44_955.0, 456.90),
            ],
        },
    ];

    #[test]
    fn curves_fit_their_measurements() {
        for measured in MEASURED {
            for (bandwidth, measured_ns) in measured.points {
                let times = slowdown(measured.curve, bandwidth / measured.peak);
                let error = (measured.idle_ns * times / measured_ns - 1.0).abs();
                assert!(
                    error < 0.05,
                    "{:?} at {bandwidth} MB/s: {error}",
                    measured.curve
                );
            }
        }
    }

    /// Peaks in MB/s of the measurements of EuroSys 2024: loads alone, 2:1, 1:1.
    const PEAKS: [(Curve, [f64; 3]); 3] = [
        (Curve::Ddr5, [69_300.0, 61_500.0, 59_700.0]),
        (Curve::Remote, [70_800.0, 44_100.0, 39_500.0]),
        (Curve::Cxl, [48_000.0, 54_200.0, 54_700.0]),
    ];

    /// A tier with as much demand as a measured peak is as slow as at its peak of loads.
    #[test]
    fn peaks_of_mixes_are_the_measured_ones() {
        let window_ps = 1_000_000_000;
        for (curve, peaks) in PEAKS {
            let bytes_per_s = (peaks[0] * 1e6) as u64;
            let at = |peak: f64, stores: f64| {
                let mut tier = idle(
                    TierModel {
                        curve,
                        read_bytes_per_s: bytes_per_s,
                        write_bytes_per_s: bytes_per_s,
                        ..DRAM
                    },
                    12_000_000_000,
                );
                for _ in 0..50 {
                    let lines = 0.9 * peak * 1e6 * 1e-3 / LINE_BYTES as f64;
                    tier.lines_read = (lines * (1.0 - stores)) as u64;
                    tier.lines_written = (lines * stores) as u64;
                    end(&mut tier, window_ps, 0);
                }
                tier.latency_ps as f64
            };
            let loads = at(peaks[0], 0.0);
            for (peak, stores) in [(peaks[1], 1.0 / 3.0), (peaks[2], 0.5)] {
                let error = (at(peak, stores) / loads - 1.0).abs();
                assert!(error < 0.01, "{curve:?} {stores}: {error}");
            }
        }
    }

    #[test]
    fn latency_never_falls_with_the_load() {
        for curve in Curve::ALL {
            let at: Vec<f64> = (0..=120)
                .map(|u| slowdown(curve, f64::from(u) / 100.0))
                .collect();
            assert_eq!(at[0], 1.0);
            assert!(at.is_sorted(), "{curve:?}");
        }
    }

    proptest! {
        #[test]
        fn those_who_wait_for_each_load_get_no_more_than_there_is(
            waiting in 1u64..2000,
            window_ns in 100_000u64..10_000_000,
        ) {
            let mut tier = idle(DRAM, 12_000_000_000);
            let window_ps = window_ns * 1000;
            let (mut lines, windows) = (0, 200);
            for window in 0..windows {
                let loads = waiting * window_ps / tier.latency_ps;
                lines += if window >= windows / 2 { loads } else { 0 };
                tier.lines_read = loads;
                end(&mut tier, window_ps, 0);
            }
            let seconds = (windows / 2 * window_ps) as f64 / 1e12;
            prop_assert!((lines * LINE_BYTES) as f64 / seconds < 176e9 * 1.01);
        }
    }

    proptest! {
        /// Demand of others beyond the bandwidth slows all users in proportion.
        #[test]
        fn others_wait_as_well(times in 3u64..20) {
            let model = TierModel { others_bytes_per_s: times * DRAM.read_bytes_per_s, ..DRAM };
            let mut tier = idle(model, 12_000_000_000);
            (0..500).for_each(|_| end(&mut tier, 1_000_000_000, 0));
            let slower = tier.latency_ps as f64 / DRAM.latency_ps as f64;
            prop_assert!((slower * USE_MAX / times as f64 - 1.0).abs() < 0.02, "{}", slower);
        }
    }

    #[test]
    fn scaled_lines_weigh_more() {
        let (mut one, mut many) = (idle(DRAM, 1 << 33), idle(DRAM, 1 << 33));
        one.lines_read = 1 << 20;
        many.lines_read = 1 << 16;
        end(&mut one, 1_000_000_000, 0);
        end(&mut many, 1_000_000_000, 4);
        assert_eq!(one.latency_ps, many.latency_ps);
        assert!(one.latency_ps > DRAM.latency_ps);
    }
}
