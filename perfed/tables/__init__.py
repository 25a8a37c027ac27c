"""Tables with one row per sample: files and data frames, each site's columns and preprocessing."""
