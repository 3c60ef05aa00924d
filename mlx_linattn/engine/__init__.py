"""One model for many callers: a thread that owns it, rows that decode together, and prefixes that are read once."""
