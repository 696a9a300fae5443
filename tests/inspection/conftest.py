from tests.convert.conftest import convert as convert, make as make
