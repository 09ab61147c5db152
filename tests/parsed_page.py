"""A report page, parsed."""

from html.parser import HTMLParser


class Page(HTMLParser):
    """The tables, headings, images and addresses of a page; an element left open is an error."""

    VOID = ("meta", "link", "img", "br")

    def __init__(self, text):
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.headings: list[tuple[int, str]] = []
        self.images, self.addresses, self.open, self.text = [], [], [], ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.addresses += [found[name] for name in ("src", "href") if name in found]
        self.images += [found] if tag == "img" else []
        if tag not in (*self.VOID, "path"):
            self.open.append(tag)
        if tag == "table":
            self._rows: list[list[str]] = []
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("td", "th", "caption", "h1", "h2", "h3", "h4"):
            self.text = ""

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_data(self, data):
        self.text += data

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        if tag == "caption":
            self.tables[self.text] = self._rows
        elif tag in ("td", "th"):
            self._rows[-1].append(self.text)
        elif tag[0] == "h" and tag[1:].isdigit():
            self.headings.append((int(tag[1]), self.text))


def read(path):
    return Page(path.read_text())
