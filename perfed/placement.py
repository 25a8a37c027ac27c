"""Where parameters live; see :mod:`perfed.model.placement`."""

from perfed.model.placement import FROZEN, PER_DOMAIN, PERSONAL, SENT, SHARED, Placement, place_parameters

__all__ = ["FROZEN", "PERSONAL", "PER_DOMAIN", "SENT", "SHARED", "Placement", "place_parameters"]
