"""The steps of an exchange: one file each, and the function that selects those that a run asks for."""
