"""The steps of an exchange that only federations of real sites need; one file each."""
