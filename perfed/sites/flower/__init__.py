"""A federation of real sites over Flower: messages as bytes, what both ends keep on disk, and what is checked.

Only ``adapter`` (the server's end), ``node`` (a site's end) and ``letters`` (what both share) import flwr.
"""
