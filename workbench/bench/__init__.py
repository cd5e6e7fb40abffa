"""Measurements. Each module has one `run(…)` that returns a report as a dict:

    {"rows": [...], "machine": {...}, "command": "workbench bench …", "label": "measured"}

Imports nothing beyond what the engine needs, so that a bare GPU machine can run
`python -m workbench.bench NAME`. What is compared is measured in one run, in turns.
"""
