"""Trees that are prepared once on this machine, and cloned copy-on-write into each bubblewrap box."""
