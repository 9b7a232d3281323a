"""Index specifications: the file that users write (`loading`), and the plain objects that it becomes (`tree`)."""

from penstock.specification.loading import load_specification, parse_specification
from penstock.specification.tree import IndexSpecification

__all__ = ["IndexSpecification", "load_specification", "parse_specification"]
