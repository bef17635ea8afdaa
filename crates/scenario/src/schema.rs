//! JSON Schemas of types that serde reads by hand.

use std::borrow::Cow;

use demeter_policy::provision::ProvisionerKind;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::Serialize;

use crate::{Provisioner, System};

/// A name that is allowed, with its meaning.
#[derive(Serialize)]
struct Name {
    r#const: &'static str,
    description: &'static str,
}

impl JsonSchema for System {
    fn schema_name() -> Cow<'static, str> {
        "System".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        let name = |system: &Self| Name {
            r#const: system.row().name,
            description: system.row().about,
        };
        let names: Vec<_> = Self::ALL.iter().map(name).collect();
        json_schema!({ "description": "A system.", "oneOf": names })
    }
}

impl JsonSchema for Provisioner {
    fn schema_name() -> Cow<'static, str> {
        "Provisioner".into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let booted = Name {
            r#const: "static",
            description: "They boot with the memory that they own.",
        };
        let sized = generator.subschema_for::<ProvisionerKind>();
        json_schema!({ "description": "The mechanism that gives VMs their memory.", "oneOf": [booted, sized] })
    }
}

/// The schema of `vary`: tables of lists. Their keys are any of a scenario's, dotted.
pub(crate) fn vary(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "items": { "type": "object", "additionalProperties": { "type": "array", "minItems": 1 } },
    })
}
