"""Pure planning: who holds what, and what a node does next. No sockets, clocks or live objects."""
