"""The terminal chat. It uses the public API only."""
