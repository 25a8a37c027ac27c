"""The report as one HTML file: its sections, the drawing of its figures, its style sheet and its script."""
