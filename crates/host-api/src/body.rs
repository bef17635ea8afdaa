//! Bodies of requests and answers.

use demeter_policy::provision::Policy;
use serde::{Deserialize, Serialize};

/// Desired size of a VM; an omitted tier stays unchanged.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tiers {
    /// Fast memory, MiB.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fast_mib: Option<u64>,
    /// Slow memory, MiB.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slow_mib: Option<u64>,
}

/// Body of a request that chooses a policy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PolicyChoice {
    /// The policy.
    pub policy: Policy,
}

/// Error body of a refused request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Problem {
    /// One line for people.
    pub error: String,
}
