"""Record calls of this package's operators. Without a dispatch mode, eager mode calls plain functions instead."""

from torch.utils._python_dispatch import TorchDispatchMode


class OperatorCalls(TorchDispatchMode):
    """Record the operator and the arguments of each call of the operator `name`, or of all if `name` is None."""

    def __init__(self, name=None):
        super().__init__()
        self.name, self.operators, self.calls = name, [], []

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        namespace, _, name = operator._schema.name.partition("::")
        if namespace == "luna_mega" and self.name in (None, name):
            self.operators.append(operator)
            self.calls.append(arguments)
        return operator(*arguments, **(options or {}))
