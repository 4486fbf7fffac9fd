"""The page about other libraries runs, top to bottom, as one program."""

import re
from pathlib import Path

from conftest import needs

for library in ("torchvision", "timm", "monai", "lightning"):
    needs(library)
PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"


def test_integrations():
    blocks = re.findall(r"^```py\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    assert len(blocks) == 5
    exec(compile("\n".join(blocks), str(PAGE), "exec"), {"__name__": "page"})
