-- Who may hold which VM, as the site's rules have it.

-- The controller's last word: one row.
CREATE TABLE site_stamp (
    one    INTEGER PRIMARY KEY CHECK (one = 1),
    epoch  INTEGER NOT NULL,
    number INTEGER NOT NULL
) STRICT;
INSERT INTO site_stamp (one, epoch, number) VALUES (1, 0, 0);

-- One row a name that was ever used; it outlives the VM. A row is replaced only by a later word's.
CREATE TABLE site_vms (
    vm     TEXT PRIMARY KEY,
    entry  TEXT NOT NULL,                    -- JSON
    epoch  INTEGER NOT NULL,
    number INTEGER NOT NULL
) STRICT;

-- Beside hosts: whether a person said that one is off, and its newest life.
CREATE TABLE site_hosts (
    host   TEXT PRIMARY KEY,
    record TEXT NOT NULL                     -- JSON
) STRICT;

-- Hosts that records name, that are not enrolled, and that a person said are off.
CREATE TABLE site_strangers (
    host TEXT PRIMARY KEY
) STRICT;

-- What was known before: any host may hold any VM until it was asked.
INSERT INTO site_vms (vm, entry, epoch, number)
SELECT g.vm,
       json_object(
           'holder', v.host,
           'held', 0,
           'highest', g.highest,
           'may_hold', json((SELECT json_group_object(h.name, g.highest) FROM hosts h)),
           'granted', json('[]'),
           'deleted', json(CASE WHEN v.name IS NULL THEN 'true' ELSE 'false' END),
           'stamp', json_object('epoch', 0, 'number', 0)),
       0, 0
FROM generations g LEFT JOIN vms v ON v.name = g.vm;

ALTER TABLE vms DROP COLUMN host;
DROP TABLE generations;
DROP TABLE grants;
