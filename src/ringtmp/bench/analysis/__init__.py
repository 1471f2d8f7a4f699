"""What measurements say: intervals, values per step, formulas to hold them against, and who wins. Pure."""
