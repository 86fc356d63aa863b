"""The web page of `composer view`, and report.html. Read catalog.py first, then run_payload.py and server.py.

    catalog, rollout_index ──> run_payload, rollout_payload ──> workspace, server (live) | report_html (one file)

Both give the same JSON to the same JavaScript (assets/). A run directory is only read.
"""
