"""The live page of a run, and of a run that has finished."""
