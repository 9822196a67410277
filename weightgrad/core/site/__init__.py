"""The state machine of a site: a coordinator that decides, and a shard on every rank that has the values."""
