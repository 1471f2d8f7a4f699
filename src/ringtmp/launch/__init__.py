"""Bringing nodes to life: processes on this machine, or all in one process."""
