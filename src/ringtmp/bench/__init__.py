"""Experiments: cases x repeats, interleaved, every measurement a file. `speed` is the first that uses the harness."""
