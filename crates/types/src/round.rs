//! Figures as JSON has them: measured values without the digits that nobody measured.
//!
//! Pure. Used by `serialize_with`; what is read is taken as it is.

use serde::{Serialize, Serializer};

/// Writes seconds, milliseconds, percent and rates to a thousandth.
pub(crate) fn rounded<S: Serializer>(value: &f64, to: S) -> Result<S::Ok, S::Error> {
    round(*value, 1e3).serialize(to)
}

/// Writes GB/s to a thousand bytes per second.
pub(crate) fn rounded_finely<S: Serializer>(value: &f64, to: S) -> Result<S::Ok, S::Error> {
    round(*value, 1e6).serialize(to)
}

/// As [`rounded`], where there may be no figure.
pub(crate) fn rounded_option<S: Serializer>(value: &Option<f64>, to: S) -> Result<S::Ok, S::Error> {
    value.map(|value| round(value, 1e3)).serialize(to)
}

fn round(value: f64, parts: f64) -> f64 {
    let rounded = (value * parts).round() / parts;
    // Too great to be rounded.
    if rounded.is_finite() { rounded } else { value }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_switchover_of_53_575216000000005_ms_is_written_as_53_575() {
        assert_eq!(round(53.575216000000005, 1e3), 53.575);
        assert_eq!(round(0.000_123_456, 1e6), 0.000_123);
        assert_eq!(round(f64::MAX, 1e3), f64::MAX);
    }
}
