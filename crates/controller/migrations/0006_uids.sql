-- The user id that the next new VM's QEMU gets: one that was ever given out is not given to another VM.
CREATE TABLE uids (
    one  INTEGER PRIMARY KEY CHECK (one = 1),
    next INTEGER NOT NULL
) STRICT;
INSERT INTO uids (one, next) VALUES (1, 1879048192);
