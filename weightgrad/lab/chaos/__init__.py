"""Chaos tests: random faults in the simulator or the emulator, and a verdict on whether anything was lost."""
