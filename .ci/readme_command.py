"""Print one of the commands that README.md gives, so that CI runs the very line a newcomer copies.

    python .ci/readme_command.py test

In README.md each command is a fenced bash block of one line, directly below an HTML comment that names it:

    <!-- command: test -->
    ```bash
    python -m venv .venv && ...
    ```
"""

import argparse
import sys
from pathlib import Path

README = Path(__file__).resolve().parents[1] / "README.md"


def readme_command(text: str, name: str) -> str:
    """The one-line command that the README text marks as `name`; ValueError when it is not marked exactly so."""
    lines = [line.rstrip() for line in text.splitlines()]
    marker = f"<!-- command: {name} -->"
    if lines.count(marker) != 1:
        raise ValueError(f"README.md has the line {marker!r} {lines.count(marker)} times; it must have it once")
    block = lines[lines.index(marker) + 1 :]
    if not block or block[0] != "```bash" or "```" not in block:
        raise ValueError(f"the line {marker!r} must be followed directly by a closed ```bash block")
    commands = block[1 : block.index("```")]
    if len(commands) != 1 or not commands[0].strip():
        raise ValueError(f"the block below {marker!r} has {len(commands)} lines; it must be one command on one line")
    return commands[0].strip()


def main() -> None:
    parser = argparse.ArgumentParser(description="Print a command that README.md gives.")
    parser.add_argument("name", help="the name in the marker, for example test")
    name = parser.parse_args().name
    try:
        print(readme_command(README.read_text(encoding="utf-8"), name))
    except (OSError, ValueError) as error:
        sys.exit(f"{Path(__file__).name}: {error}")


if __name__ == "__main__":
    main()
