"""The shipped conformance suite, on every backend that is known here."""

from headmux.testing.suite import *  # noqa: F403
