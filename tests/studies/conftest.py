from tests.examples.conftest import call, offline, script  # noqa: F401  (fixtures)
