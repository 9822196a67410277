"""Data sets: downloaded, loaded, augmented, and divided among the workers."""
