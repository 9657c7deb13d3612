//! Random values from the operating system: secrets, ids, nonces. Owns nothing and keeps nothing.

use crate::error::Outcome;
use godwit_types::migration::MigrationSecret;
use godwit_types::{ApiError, ErrorCode, MigrationId};

const KEY_LEN: usize = 32;
const NONCE_LEN: usize = 8;

fn random(len: usize) -> Outcome<Vec<u8>> {
    let mut bytes = vec![0u8; len];
    getrandom::fill(&mut bytes).map_err(|_| {
        ApiError::new(
            ErrorCode::Internal,
            "the operating system gave no random numbers",
        )
    })?;
    Ok(bytes)
}

/// Key and nonce of one migration.
pub fn migration_secret() -> Outcome<MigrationSecret> {
    Ok(MigrationSecret {
        key: random(KEY_LEN)?,
        nonce: random(NONCE_LEN)?,
    })
}

/// The id of a new migration.
pub fn migration_id() -> Outcome<MigrationId> {
    let text = format!("m-{}", godwit_rpc::pki::hex(&random(8)?));
    MigrationId::new(text).map_err(|error| ApiError::new(ErrorCode::Internal, error.to_string()))
}

/// A number that nobody else has.
pub fn number() -> Outcome<u64> {
    let bytes = random(8)?;
    Ok(bytes
        .iter()
        .fold(0, |sum, byte| (sum << 8) | u64::from(*byte)))
}

/// A nonce for probe frames, lower-case hex.
pub fn probe_nonce() -> Outcome<String> {
    Ok(godwit_rpc::pki::hex(&random(16)?))
}
