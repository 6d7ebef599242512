"""The conformance suite: what every backend must satisfy, run on any backend.

    python -m headmux.testing --backend NAME

or, in a third party's tests, a conftest.py with ``pytest_plugins = ["headmux.testing.plugin"]`` beside a test module of
one line, ``from headmux.testing.suite import *``. Running it takes pytest and hypothesis; the case list alone
(``headmux.testing.cases``), which benchmarks and documentation use too, takes neither.
"""
