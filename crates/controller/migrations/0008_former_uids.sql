-- The user ids of VMs that were deleted after they had run: their images may be those users' alone.
CREATE TABLE former_uids (
    vm  TEXT PRIMARY KEY,
    uid INTEGER NOT NULL
) STRICT;
