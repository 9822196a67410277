"""The laboratory's commands: one file a command, no logic."""
