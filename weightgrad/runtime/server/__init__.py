"""The global server of a run: admission, rounds, its processes, its disk and its operator."""
