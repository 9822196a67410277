"""A site of a run, rank by rank: how it enters, steps, pushes, applies results and leaves."""
