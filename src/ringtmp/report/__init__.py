"""What was found becomes a page: figures, tables, verdicts, one file that opens anywhere."""
