-- Who asked for what, and what came of it. A row without a status is of a request that had no end yet when it was read,
-- or of a controller that ended in the middle.
CREATE TABLE audit (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    unix_s INTEGER NOT NULL,
    who TEXT NOT NULL,
    certificate TEXT,
    what TEXT NOT NULL,
    subject TEXT,
    detail TEXT,
    status INTEGER,
    message TEXT
);
CREATE INDEX audit_by_subject ON audit (subject);
