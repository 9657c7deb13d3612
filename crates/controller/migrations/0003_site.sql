-- Who may hold which VM, as the site's rules have it.

-- The controller's last word: one row. What is taken over from before, below, is its first.
CREATE TABLE site_stamp (
    one    INTEGER PRIMARY KEY CHECK (one = 1),
    epoch  INTEGER NOT NULL,
    number INTEGER NOT NULL
) STRICT;
INSERT INTO site_stamp (one, epoch, number) VALUES (1, 0, 1);

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
           'granted', json((SELECT json_group_array(json_object('generation', generation, 'to', destination, 'from', source))
                              FROM (SELECT * FROM (SELECT * FROM grants r WHERE r.vm = g.vm ORDER BY r.id DESC LIMIT 16)
                                    ORDER BY id))),
           'deleted', json(CASE WHEN v.name IS NULL THEN 'true' ELSE 'false' END),
           'stamp', json_object('epoch', 0, 'number', 1)),
       0, 1
FROM generations g LEFT JOIN vms v ON v.name = g.vm;

-- Who held a VM last is in site_vms from now on.
CREATE TABLE described (
    name     TEXT PRIMARY KEY,
    spec     TEXT NOT NULL,                  -- JSON, as described
    resolved TEXT                            -- JSON, with CPU model and machine type resolved; NULL before the first start
) STRICT;
INSERT INTO described (name, spec, resolved) SELECT name, spec, resolved FROM vms;
DROP TABLE vms;
ALTER TABLE described RENAME TO vms;
DROP TABLE generations;
DROP TABLE grants;
