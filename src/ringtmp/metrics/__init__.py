"""Everything that happens becomes an event; events become a summary, a trace, a report."""
