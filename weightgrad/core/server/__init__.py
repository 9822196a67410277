"""The state machine of the global server: a coordinator that decides, and a shard in every process."""
