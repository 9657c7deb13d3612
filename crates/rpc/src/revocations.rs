//! Which certificates are wanted no more, though their chain is fine.
//!
//! Owns the list in memory; the controller's database and each agent's file keep it. Refuses: to take a revocation back.

use crate::pki::Holder;
use std::collections::BTreeSet;
use std::sync::{PoisonError, RwLock};

/// Whether a certificate whose chain is fine is still wanted.
pub trait Admission: Send + Sync {
    /// Asked at every request.
    fn admits(&self, holder: &Holder) -> bool;
}

/// Serial numbers of revoked certificates, shared between a server and whoever revokes.
#[derive(Debug, Default)]
pub struct Revocations(RwLock<BTreeSet<String>>);

impl Revocations {
    pub fn revoke(&self, serial: impl Into<String>) {
        let mut set = self.0.write().unwrap_or_else(PoisonError::into_inner);
        set.insert(serial.into());
    }

    /// Replaces all by what the controller says; revoking is for ever, so nothing is taken back.
    pub fn extend(&self, serials: impl IntoIterator<Item = String>) {
        let mut set = self.0.write().unwrap_or_else(PoisonError::into_inner);
        set.extend(serials);
    }

    pub fn all(&self) -> Vec<String> {
        let set = self.0.read().unwrap_or_else(PoisonError::into_inner);
        set.iter().cloned().collect()
    }
}

/// How a list of revocations names one certificate of a life that goes on.
pub fn one_certificate(serial: &str) -> String {
    format!("one:{serial}")
}

impl Admission for Revocations {
    fn admits(&self, holder: &Holder) -> bool {
        let set = self.0.read().unwrap_or_else(PoisonError::into_inner);
        // What is revoked is a life with all its certificates, or one certificate of a life that goes on.
        !set.contains(&holder.life)
            && !set.contains(&holder.serial)
            && !set.contains(&one_certificate(&holder.serial))
    }
}
