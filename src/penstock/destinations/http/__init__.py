"""Changes to a system of one's own, by HTTP: the "custom API" destination. `docs/reference/destinations/http.md` is the
protocol, for people who write the other side."""

from penstock.destinations.http.bodies import BodyFormat, read_bodies
from penstock.destinations.http.destination import HttpDestination

__all__ = ["BodyFormat", "HttpDestination", "read_bodies"]
