"""Who the clients are and what they hold: federations, partitions, files."""
