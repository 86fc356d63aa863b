"""Adapters to other packages' formats. Each module imports what it adapts, torch included, on its own."""
