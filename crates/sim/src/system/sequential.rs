//! The product's promotions without its demotions: reclaim makes room for them, as in kernels.

use demeter_policy::engine::{Ranges, Strategy};
use demeter_policy::{ByteCount, Classifier, Plan, Situation};

/// Promotes by the product's ranges and plan.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sequential(pub(crate) Ranges);

impl Strategy for Sequential {
    type Classifier = Classifier;

    const RECLAIMS_MAX: u32 = 64;

    fn classifier(&self) -> Classifier {
        self.0.classifier()
    }

    /// What promotions leave free the kernel sees to.
    fn plan(&self, situation: &Situation<'_>) -> Plan {
        Plan {
            demotions: vec![],
            level: ByteCount(0),
            ..self.0.plan(situation)
        }
    }
}
