//! The migration's secret and what is derived from it.
//!
//! Owns the key bytes: wiped on drop, never printed, never copied silently. Refuses keys of another length.

use crate::{ChannelId, Direction, PROTOCOL_VERSION, WireError};
use aws_lc_rs::{aead, hkdf, hmac};
use godwit_types::MigrationId;
use godwit_types::migration::{Cipher, MigrationSecret};
use std::fmt;
use zeroize::{ZeroizeOnDrop, Zeroizing};

/// Length of a migration's key in bytes.
pub const KEY_LEN: usize = 32;
/// Length of each side's handshake random in bytes.
pub const RANDOM_LEN: usize = 32;
/// Length of the derived part of a record's nonce in bytes; the counter is the rest.
const NONCE_PREFIX_LEN: usize = 4;

/// The 256-bit secret of one migration. Shared by reference; wiped when dropped.
#[derive(ZeroizeOnDrop)]
pub struct MigrationKey([u8; KEY_LEN]);

impl MigrationKey {
    /// Wraps 32 random bytes.
    pub fn from_bytes(bytes: [u8; KEY_LEN]) -> Self {
        Self(bytes)
    }
}

impl fmt::Debug for MigrationKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("MigrationKey(secret)")
    }
}

/// What the streams need of the controller's spec. Not clonable, since the key is not: share it behind an `Arc`.
pub struct Spec {
    /// The migration's name on both hosts.
    pub migration: MigrationId,
    pub key: MigrationKey,
    /// 64 random bits, part of every key derivation.
    pub nonce: u64,
    /// How guest pages travel. Decided by the controller, never by the two hosts.
    pub cipher: Cipher,
}

impl Spec {
    /// Takes the secret over from the controller's message, which the caller then drops.
    pub fn new(
        migration: MigrationId,
        secret: &MigrationSecret,
        cipher: Cipher,
    ) -> Result<Self, WireError> {
        let key = <[u8; KEY_LEN]>::try_from(secret.key.as_slice());
        let nonce = <[u8; 8]>::try_from(secret.nonce.as_slice());
        Ok(Self {
            migration,
            key: MigrationKey::from_bytes(key.map_err(|_| WireError::SecretLength)?),
            nonce: u64::from_le_bytes(nonce.map_err(|_| WireError::SecretLength)?),
            cipher,
        })
    }
}

impl fmt::Debug for Spec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Spec")
            .field("migration", &self.migration)
            .field("cipher", &self.cipher)
            .finish_non_exhaustive()
    }
}

/// The cipher's number in the key derivation.
fn cipher_code(cipher: Cipher) -> u8 {
    match cipher {
        Cipher::Aes256Gcm => 1,
        Cipher::None => 2,
    }
}

/// Both sides' handshake randoms: what makes the keys of two connections differ.
#[derive(Clone, Copy)]
pub(crate) struct Randoms {
    pub client: [u8; RANDOM_LEN],
    pub server: [u8; RANDOM_LEN],
}

/// Key and nonce prefix of one direction of one channel.
pub(crate) struct RecordKey {
    aead: aead::LessSafeKey,
    prefix: [u8; NONCE_PREFIX_LEN],
}

impl RecordKey {
    pub(crate) fn aead(&self) -> &aead::LessSafeKey {
        &self.aead
    }

    /// The nonce of the record `counter`: unique since counters are.
    pub(crate) fn nonce(&self, counter: u64) -> aead::Nonce {
        let [a, b, c, d] = self.prefix;
        let [e, f, g, h, i, j, k, l] = counter.to_le_bytes();
        aead::Nonce::assume_unique_for_key([a, b, c, d, e, f, g, h, i, j, k, l])
    }
}

struct Length(usize);

impl hkdf::KeyType for Length {
    fn len(&self) -> usize {
        self.0
    }
}

/// The derivations of one connection.
pub(crate) struct Schedule<'a> {
    spec: &'a Spec,
    channel: ChannelId,
    secret: hkdf::Prk,
}

impl<'a> Schedule<'a> {
    pub(crate) fn new(spec: &'a Spec, channel: ChannelId, randoms: &Randoms) -> Self {
        let mut salt = [0; 8 + 2 * RANDOM_LEN];
        let (nonce, rest) = salt.split_at_mut(8);
        let (client, server) = rest.split_at_mut(RANDOM_LEN);
        nonce.copy_from_slice(&spec.nonce.to_le_bytes());
        client.copy_from_slice(&randoms.client);
        server.copy_from_slice(&randoms.server);
        let secret = hkdf::Salt::new(hkdf::HKDF_SHA256, &salt).extract(&spec.key.0);
        Self {
            spec,
            channel,
            secret,
        }
    }

    /// The key that proves the sender of `direction` knows the spec.
    pub(crate) fn proof_key(&self, direction: Direction) -> Result<hmac::Key, WireError> {
        let mut bytes = Zeroizing::new([0; KEY_LEN]);
        self.fill(b"proof", direction, bytes.as_mut())?;
        Ok(hmac::Key::new(hmac::HMAC_SHA256, bytes.as_ref()))
    }

    /// The key that seals the records of `direction`.
    pub(crate) fn record_key(&self, direction: Direction) -> Result<RecordKey, WireError> {
        let mut bytes = Zeroizing::new([0; KEY_LEN]);
        let mut prefix = [0; NONCE_PREFIX_LEN];
        self.fill(b"record key", direction, bytes.as_mut())?;
        self.fill(b"record nonce", direction, &mut prefix)?;
        let key = aead::UnboundKey::new(&aead::AES_256_GCM, bytes.as_ref());
        let aead = aead::LessSafeKey::new(key.map_err(|_| WireError::Crypto)?);
        Ok(RecordKey { aead, prefix })
    }

    /// Everything that both sides must agree on is part of the info; fixed-length fields, and a length before the
    /// id, so that no two sets of fields give the same bytes.
    fn fill(&self, purpose: &[u8], direction: Direction, out: &mut [u8]) -> Result<(), WireError> {
        let id = self.spec.migration.as_str().as_bytes();
        let id_len = u8::try_from(id.len()).map_err(|_| WireError::Crypto)?;
        let version = PROTOCOL_VERSION.to_le_bytes();
        let channel = self.channel.0.to_le_bytes();
        let codes = [cipher_code(self.spec.cipher), direction.code(), id_len];
        let info: [&[u8]; 6] = [b"godwit stream", &version, &codes, id, &channel, purpose];
        self.secret
            .expand(&info, Length(out.len()))
            .and_then(|material| material.fill(out))
            .map_err(|_| WireError::Crypto)
    }
}
