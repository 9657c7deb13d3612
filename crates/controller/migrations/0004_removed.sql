-- Where the agent of a host listened that was removed while it did not answer; NULL of one that answered, or once it
-- was seen to be off. A person may have been wrong: it is asked from time to time whether it runs VMs.
ALTER TABLE revoked ADD COLUMN unheard_at TEXT;
