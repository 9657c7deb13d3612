-- VMs that were deleted after they had run: whose images theirs are, and where the newest of them were.
CREATE TABLE former_vms (
    vm   TEXT PRIMARY KEY,
    uid  INTEGER,
    host TEXT                                -- NULL: none that was in the site when it was deleted
) STRICT;
