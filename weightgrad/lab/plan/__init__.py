"""What a run will take, before it is started: time, memory, bytes and money."""
