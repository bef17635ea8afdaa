//! Writes many runs as a Parquet file, for data frames.

use std::sync::Arc;

use parquet::basic::{LogicalType, Repetition, Type as Physical};
use parquet::data_type::{ByteArray, ByteArrayType, DoubleType, Int64Type};
use parquet::errors::ParquetError;
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::types::Type;
use serde_json::Number;

use crate::export::rows::{Columns, RunRow};

/// A column's optional value for each row.
enum Values {
    Texts(Vec<ByteArray>),
    Integers(Vec<i64>, Vec<i16>),
    Doubles(Vec<f64>, Vec<i16>),
}

impl Values {
    /// Integers if all are.
    fn numbers(numbers: &[Option<&Number>]) -> Self {
        let there = numbers.iter().map(|n| i16::from(n.is_some())).collect();
        let measured = || numbers.iter().copied().flatten();
        match measured().map(Number::as_i64).collect() {
            Some(integers) => Self::Integers(integers, there),
            None => {
                let doubles = measured().map(|n| n.as_f64().unwrap_or(f64::NAN));
                Self::Doubles(doubles.collect(), there)
            }
        }
    }

    fn field(&self, name: &str) -> Result<Type, ParquetError> {
        let (physical, repetition, logical) = match self {
            Self::Texts(_) => (
                Physical::BYTE_ARRAY,
                Repetition::REQUIRED,
                Some(LogicalType::String),
            ),
            Self::Integers(..) => (Physical::INT64, Repetition::OPTIONAL, None),
            Self::Doubles(..) => (Physical::DOUBLE, Repetition::OPTIONAL, None),
        };
        Type::primitive_type_builder(name, physical)
            .with_repetition(repetition)
            .with_logical_type(logical)
            .build()
    }
}

/// The rows as a Parquet file with the columns of [`csv`](crate::csv).
///
/// Settings and system are texts. Figures are integers if all of a column are, otherwise doubles. Missing figures are
/// null.
///
/// # Errors
/// The library's errors, such as two columns of one name.
pub fn parquet(rows: &[RunRow]) -> Result<Vec<u8>, ParquetError> {
    let columns = Columns::new(rows);
    let texts = columns.texts().into_iter().map(|(name, texts)| {
        let texts = texts.into_iter().map(ByteArray::from);
        (name, Values::Texts(texts.collect()))
    });
    let numbers = columns.numbers();
    let numbers = numbers.iter().map(|(name, n)| (*name, Values::numbers(n)));
    let all: Vec<(&str, Values)> = texts.chain(numbers).collect();

    let fields: Result<Vec<_>, _> = all
        .iter()
        .map(|(name, values)| values.field(name).map(Arc::new))
        .collect();
    let schema = Type::group_type_builder("runs").with_fields(fields?);
    let properties = Arc::new(WriterProperties::builder().build());
    let mut file = SerializedFileWriter::new(Vec::new(), Arc::new(schema.build()?), properties)?;
    let mut group = file.next_row_group()?;
    for (_, values) in &all {
        let Some(mut column) = group.next_column()? else {
            break;
        };
        match values {
            Values::Texts(texts) => column
                .typed::<ByteArrayType>()
                .write_batch(texts, None, None)?,
            Values::Integers(integers, there) => {
                let column = column.typed::<Int64Type>();
                column.write_batch(integers, Some(there), None)?
            }
            Values::Doubles(doubles, there) => {
                let column = column.typed::<DoubleType>();
                column.write_batch(doubles, Some(there), None)?
            }
        };
        column.close()?;
    }
    group.close()?;
    file.into_inner()
}

#[cfg(test)]
mod tests {
    use parquet::file::reader::{FileReader, SerializedFileReader};
    use parquet::record::Field;

    use super::*;
    use crate::export::rows::tests::two_runs;

    #[test]
    fn what_is_written_is_read() {
        let bytes = parquet(&two_runs()).unwrap();
        let reader = SerializedFileReader::new(bytes::Bytes::from(bytes)).unwrap();
        let rows: Vec<Vec<(String, Field)>> = reader
            .get_row_iter(None)
            .unwrap()
            .map(|row| {
                row.unwrap()
                    .get_column_iter()
                    .map(|(n, f)| (n.clone(), f.clone()))
                    .collect()
            })
            .collect();
        assert_eq!(rows.len(), 2);
        let field = |row: usize, name: &str| {
            let (_, field) = rows[row].iter().find(|(n, _)| n == name).unwrap();
            field.clone()
        };
        assert_eq!(field(0, "workload.kind"), Field::Str("a,b".into()));
        assert_eq!(field(1, "system"), Field::Str("demeter".into()));
        assert_eq!(field(0, "mean_mops"), Field::Double(1.5));
        assert_eq!(field(1, "mean_mops"), Field::Null);
        assert_eq!(field(1, "cpu_s.flush"), Field::Double(0.25));
        // More than a signed integer can hold.
        assert_eq!(field(0, "counters.samples"), Field::Double(u64::MAX as f64));
    }

    #[test]
    fn no_rows_are_an_empty_table() {
        let bytes = parquet(&[]).unwrap();
        let reader = SerializedFileReader::new(bytes::Bytes::from(bytes)).unwrap();
        assert_eq!(reader.metadata().file_metadata().num_rows(), 0);
    }
}
