//! What is known of a certificate besides who holds it: when it was made, when it ends, and what follows from that.
//!
//! Pure data: time comes in as a value. Refuses nothing.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// How far clocks may differ before a certificate counts as one that was made by a wrong clock, s: each is valid from so
/// long before it was made.
const CLOCKS_DIFFER_S: i64 = 3600;

/// When a certificate was made and when it ends, seconds since 1970.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, ToSchema,
)]
pub struct CertificateDates {
    /// When it was made.
    pub made_unix_s: i64,
    pub ends_unix_s: i64,
}

/// How far a certificate is through its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum CertificateStage {
    /// Nothing is to be done.
    Fresh,
    /// Two thirds of its life are over, or it is not valid yet: it is renewed.
    Due,
    /// Less than a sixth of its life is left, and it was not renewed: a person must know.
    NearEnd,
    /// It has ended: nobody accepts it.
    Ended,
}

impl CertificateDates {
    /// How long it is good for, seconds.
    pub fn life_s(&self) -> i64 {
        self.ends_unix_s.saturating_sub(self.made_unix_s).max(1)
    }

    /// Whether nobody accepts it yet: it was made while a clock was ahead, or the clock that is looked at is behind.
    pub fn is_not_valid_yet(&self, now_unix_s: i64) -> bool {
        now_unix_s < self.made_unix_s.saturating_sub(CLOCKS_DIFFER_S)
    }

    /// How far it is through its life.
    pub fn stage(&self, now_unix_s: i64) -> CertificateStage {
        let left = i128::from(self.ends_unix_s) - i128::from(now_unix_s);
        let life = i128::from(self.life_s());
        match left {
            ..=0 => CertificateStage::Ended,
            _ if left * 6 < life => CertificateStage::NearEnd,
            _ if left * 3 <= life || self.is_not_valid_yet(now_unix_s) => CertificateStage::Due,
            _ => CertificateStage::Fresh,
        }
    }

    /// How long it has left, or since when it is over, as part of a sentence.
    pub fn left(&self, now_unix_s: i64) -> String {
        let left = self.ends_unix_s.saturating_sub(now_unix_s);
        let amount = match left.unsigned_abs() {
            s @ ..120 => format!("{s} s"),
            s @ ..7200 => format!("{} minutes", s / 60),
            s @ ..172_800 => format!("{} hours", s / 3600),
            s => format!("{} days", s / 86_400),
        };
        match left {
            1.. => format!("ends in {amount}"),
            _ => format!("ended {amount} ago"),
        }
    }
}

/// What a host says of its certificate.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CertificateInfo {
    /// Its serial number, lower-case hex; each renewal has its own.
    pub serial: String,
    /// When it was made and when it ends.
    #[serde(flatten)]
    pub dates: CertificateDates,
    /// What is wrong with it, or why it is not renewed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_certificate_is_renewed_at_two_thirds_and_warned_of_at_five_sixths() {
        let dates = CertificateDates {
            made_unix_s: 1_000,
            ends_unix_s: 1_600,
        };
        for (now, stage) in [
            (0, CertificateStage::Fresh),
            (1_000, CertificateStage::Fresh),
            (1_399, CertificateStage::Fresh),
            (1_400, CertificateStage::Due),
            (1_500, CertificateStage::Due),
            (1_501, CertificateStage::NearEnd),
            (1_599, CertificateStage::NearEnd),
            (1_600, CertificateStage::Ended),
            (i64::MAX, CertificateStage::Ended),
        ] {
            assert_eq!(dates.stage(now), stage, "at {now}");
        }
    }

    #[test]
    fn a_certificate_that_was_made_while_a_clock_was_ahead_is_due_and_not_fresh() {
        let dates = CertificateDates {
            made_unix_s: 300 * 86_400,
            ends_unix_s: 665 * 86_400,
        };
        let made = dates.made_unix_s;
        for (now, stage) in [
            (0, CertificateStage::Due),
            (made - 3601, CertificateStage::Due),
            (made - 3600, CertificateStage::Fresh),
        ] {
            assert_eq!(dates.stage(now), stage, "at {now}");
        }
        assert!(dates.is_not_valid_yet(0) && !dates.is_not_valid_yet(made - 3600));
    }

    #[test]
    fn dates_that_make_no_sense_are_judged_all_the_same() {
        let dates = CertificateDates {
            made_unix_s: i64::MAX,
            ends_unix_s: i64::MIN,
        };
        assert_eq!(dates.stage(0), CertificateStage::Ended);
        assert_eq!(dates.life_s(), 1);
        assert!(dates.left(i64::MAX).starts_with("ended"));
    }

    #[test]
    fn what_is_left_is_said_in_a_fitting_unit() {
        let dates = CertificateDates {
            made_unix_s: 0,
            ends_unix_s: 1_000_000,
        };
        assert_eq!(dates.left(0), "ends in 11 days");
        assert_eq!(dates.left(999_990), "ends in 10 s");
        assert_eq!(dates.left(1_010_000), "ended 2 hours ago");
    }
}
