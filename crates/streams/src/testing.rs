//! What several modules' tests need.

use godwit_types::MigrationId;
use godwit_types::migration::{Cipher, MigrationSecret};
use godwit_wire::Spec;
use std::sync::Arc;

/// An encrypted migration named `m`.
pub(crate) fn spec() -> Arc<Spec> {
    let secret = MigrationSecret {
        key: vec![1; 32],
        nonce: vec![2; 8],
    };
    let id = MigrationId::new("m").unwrap();
    Arc::new(Spec::new(id, &secret, Cipher::Aes256Gcm).unwrap())
}
