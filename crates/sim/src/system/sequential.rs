//! The product's promotions without its demotions: reclaim frees memory, as in kernels.

use demeter_policy::engine::{Balance, ByHeat, Direction, EpochEnd, Strategy};
use demeter_policy::{Away, ByteCount, Heat, Pid, Plan, Situation};

/// Promotes by the product's rule and never demotes.
#[derive(Debug, Clone)]
pub(crate) struct Sequential(pub(crate) ByHeat);

impl Strategy for Sequential {
    type Classifier = Heat;

    const RECLAIMS_MAX: u32 = 64;

    fn classifier(&self) -> Heat {
        self.0.classifier()
    }

    /// The kernel enforces free memory, so the plan ignores it.
    fn plan(&mut self, situation: &Situation<'_>, heats: &[(Pid, &Heat)]) -> Plan {
        Plan {
            demotions: vec![],
            level: ByteCount(0),
            ..self.0.plan(situation, heats)
        }
    }

    fn saw(&mut self, away: Option<Away>, events: u32, exposure_s: Option<f64>) {
        self.0.saw(away, events, exposure_s);
    }

    fn end_epoch(&mut self, end: &EpochEnd) {
        self.0.end_epoch(end);
    }

    fn moved(&mut self, direction: Direction, tried: ByteCount, cpu_ns: u64, is_ordered: bool) {
        self.0.moved(direction, tried, cpu_ns, is_ordered);
    }

    fn balance(&self) -> Balance {
        self.0.balance()
    }
}
