"""A federation of real sites over Flower: bytes out to sites, bytes back; only ``adapter`` imports flwr.

Nothing of what Flower starts for each message imports torch: a site's worker, which does, lives as long as the site.
"""
