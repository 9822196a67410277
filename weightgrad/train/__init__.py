"""Models and data small enough to train while you watch."""
