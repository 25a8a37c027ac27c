"""Engines decide how a cohort is cut into chunks and where each chunk runs; results do not depend on it."""
