from tests.quick import compiled_templates as compiled_templates, with_code as with_code, without_code as without_code
