import pytest

from tests.convert.conftest import Convert, make as make
from tests.quick import compiled_templates as compiled_templates, with_code as with_code, without_code as without_code


@pytest.fixture
def convert(tmp_path, capsys):
    found = Convert(tmp_path, capsys)
    found.writes = True
    return found
