//! Tests of the database: what is kept of migrations, and what is shown first.

use super::*;
use godwit_types::migration::Side;

fn spec(id: u32) -> MigrationSpec {
    let spec = serde_json::json!({
        "id": format!("m{id}"), "vm": format!("web{id}"), "generation": 2,
        "source": {"host": "a", "address": "10.0.0.1:1"},
        "destination": {"host": "b", "address": "10.0.0.2:1"},
        "secret": {"key": "", "nonce": ""}, "cipher": "none", "max_downtime_ms": 50,
        "deadline_s": null, "max_bandwidth_mbit_per_s": null, "source_addresses": [],
    });
    serde_json::from_value(spec).unwrap()
}

/// It was no longer listed once a thousand others had been begun, although a person has to end it.
#[tokio::test]
async fn a_migration_that_has_not_ended_is_listed_however_many_came_after_it() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(&dir.path().join("controller.db"), true)
        .await
        .unwrap();
    let begin = async |id| {
        let spec = spec(id);
        let report = MigrationReport::begun(&spec, Side::Source, 64, 0);
        let added = store.grant_migration(&spec, &report, &[]).await.unwrap();
        assert!(matches!(added, Added::Yes));
        report
    };
    let open = begin(0).await;
    let later = begin(1).await;
    store.end_migration(&later, &[]).await.unwrap();
    // As a thousand that went the same way, and as many as are kept.
    let copies = "WITH RECURSIVE n(i) AS (SELECT 2 UNION ALL SELECT i + 1 FROM n WHERE i < 10100) INSERT INTO migrations (id, vm, source, destination, spec, report, ended) SELECT 'm' || i, vm, source, destination, spec, report, 1 FROM n JOIN migrations ON id = 'm1'";
    query(copies).execute(&store.pool).await.unwrap();
    assert_eq!(store.reports().await.unwrap()[0].id, open.id);
    let last = begin(20_000).await;
    store.end_migration(&last, &[]).await.unwrap();
    let kept: i64 = query_scalar("SELECT count(*) FROM migrations WHERE ended = 1")
        .fetch_one(&store.pool)
        .await
        .unwrap();
    assert_eq!(kept, 10_000);
    assert_eq!(store.reports().await.unwrap()[0].id, open.id);
    assert!(
        store.report(&later.id).await.unwrap().is_none(),
        "the oldest"
    );
}

/// The controller went on in a transaction that never ended, and its next life had lost what it had confirmed.
#[tokio::test]
async fn what_is_written_after_the_disk_was_full_is_in_the_database() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("controller.db");
    let store = Store::open(&path, true).await.unwrap();
    let create = query("CREATE TABLE filler (number INTEGER)");
    create.execute(&store.pool).await.unwrap();
    let insert = || query("INSERT INTO filler VALUES (1)");
    // As SQLite does it by itself where the disk is full.
    let mut full = store.pool.begin().await.unwrap();
    query("ROLLBACK").execute(&mut *full).await.unwrap();
    drop(full);
    let mut given_up = store.pool.begin().await.unwrap();
    insert().execute(&mut *given_up).await.unwrap();
    drop(given_up);
    let mut kept = store.pool.begin().await.unwrap();
    insert().execute(&mut *kept).await.unwrap();
    kept.commit().await.unwrap();
    let other = Store::open(&path, false).await.unwrap();
    let count = query_scalar::<_, i64>("SELECT COUNT(*) FROM filler");
    assert_eq!(count.fetch_one(&other.pool).await.unwrap(), 1);
}

/// A password that somebody had taken out of a description could be read from the pages that SQLite had not used again.
#[tokio::test]
async fn what_is_deleted_is_overwritten_in_the_database() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("controller.db");
    let store = Store::open(&path, true).await.unwrap();
    let overwrites = query_scalar::<_, i64>("PRAGMA secure_delete");
    assert_eq!(overwrites.fetch_one(&store.pool).await.unwrap(), 1);
}
