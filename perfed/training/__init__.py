"""Local training of many clients at once."""
