"""The steps of an exchange, one file each, and the functions that select the steps of a run."""
