"""Clients and their data: federations, partitions and files."""
