"""The sections of the command line, from the parsers of `luna_mega_cli`. It imports only the standard library."""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Commands have a guide each.
GUIDES = {"convert": "../conversion.md", "verify": "../conversion.md#verify", "bundle": "../hub.md"}
HEAD = """## Command line

```text
luna-mega COMMAND --help
```

Exit status of every command: 0 success; 1 invalid input, with one line on stderr that says how to fix it; 2 usage.
`python -m luna_mega_cli` is the same command."""


def write(text: str) -> str:
    """Return text for a cell of a table: other words than code are escaped."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def row(action: argparse.Action) -> str:
    value = action.metavar or ("{" + ",".join(action.choices) + "}" if action.choices else "")
    value = f"{value} ..." if action.nargs == "+" else value
    name = f"`{', '.join(action.option_strings)}{' ' * bool(action.option_strings and value)}{value}`"
    return f"| {write(name)} | {write(action.help or '')} |"


def make_page() -> str:
    """Return the end of docs/api/functions.md: one section per command with its description, options and examples."""
    sys.path.insert(0, str(ROOT))
    try:
        import luna_mega_cli
    finally:
        sys.path.remove(str(ROOT))
    parser = luna_mega_cli._parser(luna_mega_cli.COMMANDS)
    commands = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    parts = [HEAD]
    for name, command in commands.choices.items():
        examples = "\n".join(line.strip() for line in command.epilog.splitlines()[1:])
        actions = sorted(command._actions, key=lambda action: bool(action.option_strings))  # positional ones first
        rows = "\n".join(row(action) for action in actions if action.dest != "help")
        parts.append(f"## luna-mega {name}\n\n{command.description}\n\nGuide: [{name}]({GUIDES[name]}).")
        parts.append(f"| argument | meaning |\n|---|---|\n{rows}\n\n```bash\n{examples}\n```\n")
    return "\n\n".join(parts)
