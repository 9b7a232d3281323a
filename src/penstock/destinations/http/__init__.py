"""Sends changes to your own service by HTTP: the "custom API" destination. `docs/reference/destinations/http.md`
describes the protocol for authors of a receiver."""

from penstock.destinations.http.bodies import BodyFormat, read_bodies
from penstock.destinations.http.destination import HttpDestination

__all__ = ["BodyFormat", "HttpDestination", "read_bodies"]
