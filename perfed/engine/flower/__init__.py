"""A federation whose clients are sites: messages as bytes, what is kept on disk at both ends, and what is checked."""
