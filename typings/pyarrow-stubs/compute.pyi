# Arrow makes most functions of this module when it is imported, from a registry that no type checker can see.
from typing import Any

def __getattr__(name: str) -> Any: ...
