"""Training of the bundled models: corpus, tokenizer, network, trainer, export and report.

`python -m engine.train` rebuilds a model, `python -m engine.train.corpus` the text it learns
from, `python -m engine.train.report` the tables in its README. Nothing here runs at serving
time, except that `engine.train.data` lends the held-out text to tests and live traffic.
"""
