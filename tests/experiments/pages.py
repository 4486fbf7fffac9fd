"""What tests ask of a page: its text, its addresses, its tags, and that every tag is closed."""

import re
from html import unescape
from html.parser import HTMLParser
from pathlib import Path


class Page(HTMLParser):
    """A page that was read; one that is not well formed fails the test."""

    VOID = ("meta", "link", "img", "br")

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open, self.tags, self.addresses, self.ids, self.text = [], [], [], [], ""
        self.feed(path.read_text(encoding="utf-8"))
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href", "srcset", "data")]
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data

    @staticmethod
    def text_of(html: str) -> str:
        """The text of a part of a page."""
        return unescape(re.sub(r"<[^>]*>", "", html))
