//! What the database keeps of certificates: which are refused, and which operators have one.
//!
//! Owns the tables `revoked_before` and `operators`, and reads `revoked`. Refuses: to take a revocation back.

use crate::error::ControllerError;
use crate::store::{Store, use_token};
use godwit_rpc::pki::Holder;
use godwit_rpc::revocations::made_before;
use sqlx::{query, query_as, query_scalar};

type Result<T> = std::result::Result<T, ControllerError>;

/// A life of an operator's certificates.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OperatorRow {
    pub name: String,
    /// Serial number of the first certificate.
    pub life: String,
    pub made_unix_s: i64,
    pub ends_unix_s: i64,
}

impl Store {
    /// Every revocation, as the texts of which a list is made.
    pub async fn revoked(&self) -> Result<Vec<String>> {
        let lives = "SELECT serial FROM revoked UNION SELECT life FROM operators WHERE removed_unix_s IS NOT NULL";
        let mut texts: Vec<String> = query_scalar(lives).fetch_all(&self.pool).await?;
        let sql = "SELECT what, unix_s FROM revoked_before";
        let before: Vec<(String, i64)> = query_as(sql).fetch_all(&self.pool).await?;
        texts.extend(
            before
                .iter()
                .map(|(what, unix_s)| made_before(what, *unix_s)),
        );
        Ok(texts)
    }

    /// Notes that of this life or role nothing is wanted that was made before that time.
    pub async fn revoke_before(&self, what: &str, unix_s: i64) -> Result<()> {
        query(REVOKE_BEFORE)
            .bind(what)
            .bind(unix_s)
            .execute(&self.pool)
            .await?;
        Ok(())
    }

    /// Uses a token up for a host that is enrolled; false when the token is not good.
    pub async fn use_up(&self, hash: &str, now_unix_s: i64) -> Result<bool> {
        let mut tx = self.pool.begin().await?;
        let used = use_token(&mut tx, hash, now_unix_s).await?;
        tx.commit().await?;
        Ok(used)
    }

    /// Operators' certificates that are wanted, by name.
    pub async fn operators(&self) -> Result<Vec<OperatorRow>> {
        type Row = (String, String, i64, i64);
        let sql = "SELECT name, life, made_unix_s, ends_unix_s FROM operators WHERE removed_unix_s IS NULL ORDER BY name, made_unix_s";
        let rows: Vec<Row> = query_as(sql).fetch_all(&self.pool).await?;
        let row = |(name, life, made_unix_s, ends_unix_s)| OperatorRow {
            name,
            life,
            made_unix_s,
            ends_unix_s,
        };
        Ok(rows.into_iter().map(row).collect())
    }

    /// Notes an operator's certificate, or that a later one of its life was made.
    pub async fn note_operator(&self, name: &str, holder: &Holder) -> Result<()> {
        let sql = "INSERT INTO operators (life, name, made_unix_s, ends_unix_s) VALUES (?1, ?2, ?3, ?4) ON CONFLICT (life) DO UPDATE SET made_unix_s = max(made_unix_s, ?3), ends_unix_s = max(ends_unix_s, ?4)";
        query(sql)
            .bind(&holder.life)
            .bind(name)
            .bind(holder.made_unix_s)
            .bind(holder.not_after_unix_s)
            .execute(&self.pool)
            .await?;
        Ok(())
    }

    /// Revokes every certificate of an operator: those that are known by their lives, others by when they were made.
    pub async fn remove_operator(
        &self,
        name: &str,
        role: &str,
        before_unix_s: i64,
        now_unix_s: i64,
    ) -> Result<()> {
        let mut tx = self.pool.begin().await?;
        let sql =
            "UPDATE operators SET removed_unix_s = ? WHERE name = ? AND removed_unix_s IS NULL";
        query(sql)
            .bind(now_unix_s)
            .bind(name)
            .execute(&mut *tx)
            .await?;
        query(REVOKE_BEFORE)
            .bind(role)
            .bind(before_unix_s)
            .execute(&mut *tx)
            .await?;
        tx.commit().await?;
        Ok(())
    }
}

const REVOKE_BEFORE: &str = "INSERT INTO revoked_before (what, unix_s) VALUES (?1, ?2) ON CONFLICT (what) DO UPDATE SET unix_s = max(unix_s, ?2)";
