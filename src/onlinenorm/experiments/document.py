"""One HTML file that needs nothing else, on any screen, light or dark: what the demo's page and the report share."""

from html import escape

STYLE = """
:root { color-scheme: light dark;
  --paper: #fff; --ink: #1c2024; --faint: #5d666f; --line: #d9dee3; --card: #f5f7f9 }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14171a; --ink: #e8eaed; --faint: #a0a9b2; --line: #363d44; --card: #1d2125 } }
* { box-sizing: border-box }
body { margin: 0 auto; padding: 1.5rem 1rem 3rem; max-width: 60rem;
  background: var(--paper); color: var(--ink); font: 1rem/1.5 system-ui, sans-serif }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 .5rem; text-wrap: balance }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem }
p { margin: .5rem 0; max-width: 44rem } .faint { color: var(--faint); font-size: .9rem }
.headline { font-size: 1.1rem }
.scroll { overflow-x: auto } table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .35rem .8rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap }
th:first-child, td:first-child { text-align: left; padding-left: 0 }
th { color: var(--faint); font-weight: 600 } td.best { font-weight: 700 }
.dot { display: inline-block; width: .8em; height: .8em; margin-right: .45em; border-radius: 50% }
dl { display: grid; grid-template-columns: auto 1fr; gap: .15rem 1rem; font-size: .9rem; margin: .5rem 0 }
dt { color: var(--faint) } dd { margin: 0 }
@media (max-width: 30rem) { th, td { padding: .35rem .2rem; font-size: .76rem } }
"""


def document(title: str, body: str, style: str) -> str:
    """A whole page, of its body and of style sheets beyond `STYLE`."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<link rel="icon" href="data:,">
<style>{STYLE}{style}</style>
</head>
<body>
{body}
</body>
</html>
"""


def dot(colour: str) -> str:
    """The mark of a normaliser before its name."""
    return f'<span class="dot" style="background:{escape(colour)}"></span>'
