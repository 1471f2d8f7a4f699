"""What is trained, with which strategy, on which devices, and the command that does it. Pure."""
