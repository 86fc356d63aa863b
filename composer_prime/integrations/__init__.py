"""Adapters to other packages' formats. Each module imports the package that it adapts."""
