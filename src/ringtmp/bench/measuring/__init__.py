"""Run commands, one at a time, and keep what each of them gave as a file."""
