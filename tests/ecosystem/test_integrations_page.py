"""The page about other libraries runs, top to bottom, as one program."""

import re
from pathlib import Path

import torch
from packages import needs
from test_lightning import fit

for library in ("torchvision", "timm", "monai", "lightning"):
    needs(library)
PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"


def test_integrations(tmp_path):
    blocks = re.findall(r"^```py\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    assert len(blocks) == 6
    page = {"__name__": "page"}
    exec(compile("\n".join(blocks), str(PAGE), "exec"), page)
    assert page["body"](torch.randn(2, 3, 32, 32))["layer2"].shape == (2, 128, 4, 4)
    watch = page["Watch"]()
    fit(tmp_path, 2, callbacks=[watch])
    result = watch.diagnosis.as_dict()["body.1"]
    assert list(result) == ["train"], "the validation was watched, too"
    assert result["train"]["backward_samples"] == 64
