"""Differential privacy: settings, what leaves and by which mechanism, the accountant, and both units as extensions."""
