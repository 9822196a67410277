"""The laboratory around the library: simulator, emulator, recipes, data, models, reports."""
