"""Turn recorded agent sessions into states.jsonl.

    file -> reading.py -> formats/ -> messages.py or record_tree.py -> turns.py -> TraceState
            bounded JSON  a reader    |  contexts, open turns          |  masking/ masks every text on entry
                          a format    `-> tally.py: every record is taken, or skipped with a reason

Read `ingest.py` first. A format is a module of formats/ with `NAME`, `VERSION`, `matches(sample)` and `read(file)`.
"""
