"""Calls of this package's operators, which eager mode replaces by functions unless a dispatch mode is active."""

from torch.utils._python_dispatch import TorchDispatchMode


class OperatorCalls(TorchDispatchMode):
    """A list of the arguments of each call of operators; `name` is one operator, None = all."""

    def __init__(self, name=None):
        super().__init__()
        self.name, self.calls = name, []

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        namespace, _, name = operator._schema.name.partition("::")
        if namespace == "luna_mega" and self.name in (None, name):
            self.calls.append(arguments)
        return operator(*arguments, **(options or {}))
