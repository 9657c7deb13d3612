//! The identity that a party speaks with now: a renewal replaces it under running servers and clients.
//!
//! Owns the identity in memory; its files are `pki_files`' business. New connections show the new certificate, open ones
//! go on with the one that they began with. Refuses: a certificate that does not fit its key.

use crate::pki::{Holder, Identity, PkiError};
use rustls::crypto::aws_lc_rs;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};

/// An identity that may be replaced.
pub struct Current(RwLock<Arc<Held>>);

struct Held {
    identity: Arc<Identity>,
    holder: Holder,
    shown: Arc<CertifiedKey>,
}

impl Held {
    fn new(identity: Identity) -> Result<Arc<Self>, PkiError> {
        let provider = aws_lc_rs::default_provider();
        let shown = CertifiedKey::from_der(identity.chain()?, identity.key()?, &provider)
            .map_err(|error| PkiError::Tls(error.to_string()))?;
        Ok(Arc::new(Self {
            holder: identity.holder()?,
            identity: Arc::new(identity),
            shown: Arc::new(shown),
        }))
    }
}

impl fmt::Debug for Current {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Current({})", self.held().holder.serial)
    }
}

impl Current {
    /// Begins with this one.
    pub fn new(identity: Identity) -> Result<Arc<Self>, PkiError> {
        Ok(Arc::new(Self(RwLock::new(Held::new(identity)?))))
    }

    fn held(&self) -> Arc<Held> {
        self.0
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    pub fn identity(&self) -> Arc<Identity> {
        self.held().identity.clone()
    }

    /// What its certificate says.
    pub fn holder(&self) -> Holder {
        self.held().holder.clone()
    }

    /// New connections show this one from now on.
    pub fn replace(&self, identity: Identity) -> Result<(), PkiError> {
        let held = Held::new(identity)?;
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = held;
        Ok(())
    }
}

impl ResolvesServerCert for Current {
    fn resolve(&self, _hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.held().shown.clone())
    }
}
