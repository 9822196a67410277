"""Ways to run a recipe: in the simulator, in a deployment, as processes on one machine, or in the emulator."""
