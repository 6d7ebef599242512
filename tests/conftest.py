"""Options and report of the conformance suite."""

pytest_plugins = ["headmux.testing.plugin"]
