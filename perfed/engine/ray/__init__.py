"""Chunks of clients on Ray workers (extra ``perfed[ray]``): the only place that knows Ray."""
