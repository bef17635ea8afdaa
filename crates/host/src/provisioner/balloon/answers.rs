//! How a guest's answers are judged.

use demeter_proto::Outcome;

use crate::provisioner::ProvisionError;

/// The reason why a request was fulfilled in part only; an error if not at all.
pub(super) fn fulfilled(
    outcome: Outcome,
    reason: String,
) -> Result<Option<String>, ProvisionError> {
    match outcome {
        Outcome::Ok => Ok(None),
        Outcome::Partial => Ok(Some(reason)),
        Outcome::NoDriver => Err(ProvisionError::NoDriver),
        Outcome::Refused => Err(ProvisionError::Refused(reason)),
    }
}

/// Error for an answer that cannot be true.
pub(super) fn hostile(what: &str) -> ProvisionError {
    ProvisionError::Hostile(what.to_owned())
}
