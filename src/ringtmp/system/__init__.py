"""The machine this process runs on: files, memory, limits, signals."""
