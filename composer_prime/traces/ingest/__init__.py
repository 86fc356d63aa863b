"""Real agent sessions to states.jsonl: one reader a format, one accounting, one masking.

    file -> reading.py (bounded lines, documents) -> a format's reader -> builder.py (turns, results) -> TraceState
                                                          |                    `-> masking.py (secrets)
                                                          `-> tally.py (every record: taken, or skipped and why)

Read `formats.py` first. A format is one module with `NAME`, `VERSION`, `matches(sample)` and `read(...)`.
"""
