"""What is kept on a disk: checkpoints of sites, snapshots and input logs of the server, the final model."""
