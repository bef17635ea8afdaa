//! Names of VMs and pools.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// Maximum length of a name.
const NAME_BYTES_MAX: usize = 64;

/// A VM's name: 1 to 64 letters, digits, `-`, `_` and `.`.
///
/// It needs no escaping in URLs and metrics. Cheap to clone.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(try_from = "String", into = "String")]
pub struct VmName(Arc<str>);

/// Error: a text is no valid VM name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is no name for a VM; use 1 to {NAME_BYTES_MAX} letters, digits, '-', '_' and '.'")]
pub struct BadVmName(String);

impl VmName {
    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for VmName {
    type Err = BadVmName;

    fn from_str(text: &str) -> Result<Self, BadVmName> {
        let allowed = |c: u8| c.is_ascii_alphanumeric() || b"-_.".contains(&c);
        if (1..=NAME_BYTES_MAX).contains(&text.len()) && text.bytes().all(allowed) {
            Ok(Self(text.into()))
        } else {
            Err(BadVmName(text.chars().take(NAME_BYTES_MAX).collect()))
        }
    }
}

impl TryFrom<String> for VmName {
    type Error = BadVmName;

    fn try_from(text: String) -> Result<Self, BadVmName> {
        text.parse()
    }
}

impl From<VmName> for String {
    fn from(name: VmName) -> Self {
        name.0.as_ref().into()
    }
}

impl fmt::Display for VmName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Name of a pool; empty for the only pool of a host.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(transparent)]
pub struct PoolName(pub String);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_that_need_no_escape_are_taken() {
        for good in ["a", "vm-1", "db_0.prod", &"x".repeat(NAME_BYTES_MAX)] {
            assert_eq!(good.parse::<VmName>().unwrap().as_str(), good);
        }
        for bad in ["", "a b", "a/b", "a\"", "ü", "a\n", &"x".repeat(65)] {
            assert!(bad.parse::<VmName>().is_err(), "{bad:?}");
        }
    }
}
