"""A plugin whose own dependency is missing."""

import no_such_module

__all__ = ["no_such_module"]
