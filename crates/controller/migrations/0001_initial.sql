-- The controller's memory. Secrets are never here: of a join token only its hash, of a migration never its key.

CREATE TABLE hosts (
    name             TEXT PRIMARY KEY,
    agent_address    TEXT NOT NULL,
    serial           TEXT NOT NULL,          -- of its certificate, lower-case hex
    info             TEXT,                   -- JSON of what it said last; NULL until it was heard
    last_seen_unix_s INTEGER NOT NULL
) STRICT;

CREATE TABLE tokens (
    hash           TEXT PRIMARY KEY,         -- SHA-256 of the secret
    expires_unix_s INTEGER NOT NULL,
    used_unix_s    INTEGER
) STRICT;

CREATE TABLE revoked (
    serial TEXT PRIMARY KEY,
    host   TEXT NOT NULL,
    unix_s INTEGER NOT NULL
) STRICT;

CREATE TABLE vms (
    name     TEXT PRIMARY KEY,
    spec     TEXT NOT NULL,                  -- JSON, as described
    resolved TEXT,                           -- JSON, with CPU model and machine type resolved; NULL before the first start
    host     TEXT                            -- who holds it, as last known
) STRICT;

-- Highest generation of each name ever seen or granted. Outlives the VM: a name that is used again goes on from here.
CREATE TABLE generations (
    vm      TEXT PRIMARY KEY,
    highest INTEGER NOT NULL
) STRICT;

-- Every right that was granted, written before any host hears of it.
CREATE TABLE grants (
    id          INTEGER PRIMARY KEY AUTOINCREMENT,
    vm          TEXT NOT NULL,
    generation  INTEGER NOT NULL,
    source      TEXT,                        -- NULL: a start, not a migration
    destination TEXT NOT NULL,
    migration   TEXT,
    unix_s      INTEGER NOT NULL
) STRICT;

CREATE TABLE migrations (
    seq         INTEGER PRIMARY KEY AUTOINCREMENT,
    id          TEXT NOT NULL UNIQUE,
    vm          TEXT NOT NULL,
    source      TEXT NOT NULL,
    destination TEXT NOT NULL,
    spec        TEXT NOT NULL,               -- JSON without the secret
    report      TEXT NOT NULL,               -- JSON
    ended       INTEGER NOT NULL             -- 0 or 1
) STRICT;

-- A VM moves once at a time.
CREATE UNIQUE INDEX one_active_migration ON migrations (vm) WHERE ended = 0;
