-- Hosts that are being emptied, or were and take no new VMs. A controller that restarts goes on with them.
CREATE TABLE drains (
    host   TEXT PRIMARY KEY,
    record TEXT NOT NULL                     -- JSON
) STRICT;

-- Reports are looked up by their hosts for what links achieved.
CREATE INDEX migrations_by_hosts ON migrations (source, destination);
