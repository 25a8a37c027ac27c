"""A federation of real sites over Flower: messages as bytes, what both ends keep on disk, and what is checked.

Only ``adapter`` imports flwr. Nothing of what Flower starts for each message imports torch: a site's worker, which
does, lives as long as the site.
"""
