"""The files that others publish, from which the files of data sets are made: where they are, and how they are read."""
