-- What was made before that time is refused: of a host's life, since a later certificate of it is in use, and of an
-- operator's name, since that operator was removed.
CREATE TABLE revoked_before (
    what   TEXT PRIMARY KEY,                 -- the life's serial number, or the role's URI
    unix_s INTEGER NOT NULL
) STRICT;

-- Operators' certificates, by their lives. Those that were made by an older version come in when they are used.
CREATE TABLE operators (
    life           TEXT PRIMARY KEY,
    name           TEXT NOT NULL,
    made_unix_s    INTEGER NOT NULL,
    ends_unix_s    INTEGER NOT NULL,
    removed_unix_s INTEGER                   -- NULL: it is wanted
) STRICT;

-- Refused attempts of clients without certificate are counted in one row a day.
ALTER TABLE audit ADD COLUMN times INTEGER NOT NULL DEFAULT 1;
ALTER TABLE audit ADD COLUMN last_unix_s INTEGER;
CREATE INDEX audit_by_who ON audit (who, id);
