"""Emulated devices on this machine: networks, processor shares and memory caps of their own."""
