"""The negative controls that `CONTROLS.md` lists. Imported by conftest.py: no packages here."""

import re
from pathlib import Path

PAGE = Path(__file__).with_name("CONTROLS.md").read_text("utf-8")

# The ids of pytest, without the part in brackets.
CONTROLS = {f"tests/{test}" for test in re.findall(r"^\| `(\S+::\w+)` \|", PAGE, re.MULTILINE)}
WRONG = set(re.findall(r"^\| `([A-Z]\w+)` \|", PAGE, re.MULTILINE))
