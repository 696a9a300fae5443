from tests.modeling.conftest import tokenizer  # noqa: F401  # a fixture
