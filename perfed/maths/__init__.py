"""Formulas that several methods share: means, distances, quadratic programmes."""
