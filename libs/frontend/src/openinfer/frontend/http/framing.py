"""Where messages of a connection begin and end, read strictly and before any HTTP parser: one rule for all of them.

Bytes that two parsers may read differently are refused, because they can smuggle requests past a proxy. Parts that no
parser bounds have a bound here: a head and its lines, the lines between chunks, the number of chunks, trailers.
"""

import re

HEAD_BYTES = 64 << 10
"""The limit of request line and headers together, and of trailers."""
HEAD_LINES = 256
"""Lines and chunks cost far more than their bytes. A body may have FREE_CHUNKS, and one more for each CHUNK_BYTES."""
FREE_CHUNKS = 512
CHUNK_BYTES = 128
CHUNK_LINE_BYTES = 256
MAX_BODY_DIGITS = 18
ABSOLUTE = re.compile(rb"https?://([^/?#]*)(/?)", re.IGNORECASE)
"""The beginning of a target with scheme, authority, and path."""

_TOKENS = frozenset(b"!#$%&'*+-.^_`|~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
_WHOLE_HEAD = re.compile(rb"[^\r\n]+\r\n(?:[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[^\r\n]*\r\n)*\r\n")
"""A sound head that is there at once, as nearly all are."""


class Violation(Exception):
    """The bytes are no HTTP/1.1 as this server takes it; the message is for the client."""


class Framing:
    """Follows the bytes of one connection. `heads`: how many heads have ended."""

    def __init__(self) -> None:
        self.heads = 0
        self._line = bytearray()  # one that has not ended
        self._room = HEAD_BYTES  # of the head, of a chunk's line, or of trailers
        self._lines: list[bytes] = []
        self._count = 0  # lines of a head or of trailers
        self.body_left = 0  # bytes still to come, as far as its head or the chunk under way says
        self._chunks = self._chunk_bytes = 0  # of this body
        self._part = "head"  # head, body, size, data, after or trailers

    @property
    def in_head(self) -> bool:
        """Between messages, or within a head."""
        return self._part == "head"

    def feed(self, data: bytes) -> tuple[int, Violation | None]:
        """How many bytes are sound, and what is wrong with the next one, if there is something."""
        at = 0
        try:
            while at < len(data):
                if self.body_left:
                    step = min(self.body_left, len(data) - at)
                    self.body_left -= step
                    at += step
                    if not self.body_left:
                        self._begin("after" if self._part == "data" else "head")
                elif self._part == "head" and not self._lines and not self._line:
                    whole = _WHOLE_HEAD.match(data, at, at + HEAD_BYTES)
                    at = self._take_line(data, at) if whole is None else self._take_head(whole)
                else:
                    at = self._take_line(data, at)
        except Violation as violation:
            return at, violation
        return at, None

    def _begin(self, part: str) -> None:
        self._part = part
        self._lines.clear()
        self._count = 0
        self._room = {"size": CHUNK_LINE_BYTES, "after": 2}.get(part, HEAD_BYTES)

    def _take_head(self, whole: re.Match[bytes]) -> int:
        self._lines += whole[0][:-4].split(b"\r\n")
        self._count_lines(len(self._lines))
        self._end_head()
        return whole.end()

    def _take_line(self, data: bytes, at: int) -> int:
        """Read up to the end of a line, or of the data; where that is."""
        end = data.find(b"\n", at)
        stop = len(data) if end < 0 else end + 1
        self._room -= stop - at
        if self._room < 0:
            if self._part == "head":
                raise Violation(f"The head of the request is larger than {HEAD_BYTES} bytes.")
            raise Violation("A chunk or the trailers of the request are too long.")
        self._line += data[at:stop]
        if end >= 0:
            line = bytes(self._line)
            self._line.clear()
            if not line.endswith(b"\r\n") or b"\r" in line[:-2]:
                raise Violation("A line of the request does not end with CRLF.")
            self._end_line(line[:-2])
        return stop

    def _count_lines(self, more: int) -> None:
        self._count += more
        if self._count > HEAD_LINES:
            raise Violation(f"The head of the request, or its trailers, have more than {HEAD_LINES} lines.")

    def _end_line(self, line: bytes) -> None:
        if self._part in ("head", "trailers"):
            self._count_lines(1)
        match self._part:
            case "head":
                if line:
                    self._check_header(line, bool(self._lines))
                    self._lines.append(line)
                elif self._lines:  # empty lines before a request are ignored
                    self._end_head()
            case "size":
                self._begin_chunk(line)
            case "after":
                if line:
                    raise Violation("A chunk of the request is not as long as it says.")
                self._begin("size")
            case _:
                if line:
                    self._check_header(line, True)
                else:
                    self._begin("head")

    def _check_header(self, line: bytes, is_header: bool) -> None:
        name, colon, _ = line.partition(b":")
        if is_header and (not colon or not name or not _TOKENS.issuperset(name)):
            raise Violation("A header of the request is malformed or folded.")

    def _end_head(self) -> None:
        request, *lines = self._lines
        values: dict[bytes, list[bytes]] = {b"host": [], b"content-length": [], b"transfer-encoding": []}
        for line in lines:
            name, _, value = line.partition(b":")
            if (found := values.get(name.lower())) is not None:
                found.append(value.strip(b" \t"))
        hosts, lengths, codings = values.values()
        old = request.endswith(b" HTTP/1.0")
        if len(hosts) > 1 or not (hosts or old):
            raise Violation("The request must have one Host header.")
        target = request.partition(b" ")[2]
        if absolute := ABSOLUTE.match(target):
            authority, path = absolute.groups()
            if not path or hosts not in ([], [authority]):
                raise Violation(
                    "An absolute target of the request must have a path, and the host of its Host header."
                )
        elif not target.startswith((b"/", b"* ")):
            raise Violation("The target of the request must be a path.")
        if codings:
            if lengths or old or [coding.lower() for coding in codings] != [b"chunked"]:
                raise Violation(
                    "Transfer-Encoding must be chunked, alone, without Content-Length, and in HTTP/1.1."
                )
            self.heads += 1
            self._chunks = self._chunk_bytes = 0
            self._begin("size")
            return
        self._begin("head")
        if lengths:
            if len(lengths) > 1 or not lengths[0].isdigit() or len(lengths[0]) > MAX_BODY_DIGITS:
                raise Violation("Content-Length must be one number.")
            self.body_left = int(lengths[0])
            self._part = "body" if self.body_left else "head"
        self.heads += 1

    def _begin_chunk(self, line: bytes) -> None:
        digits = line.partition(b";")[0].rstrip(b" \t")
        try:
            size = int(digits, 16) if digits.isalnum() and len(digits) <= 15 else -1
        except ValueError:
            size = -1
        if size < 0:
            raise Violation("A chunk of the request has no size.")
        if self._chunks > FREE_CHUNKS + self._chunk_bytes // CHUNK_BYTES:
            raise Violation(
                f"The body of the request has more than {FREE_CHUNKS} chunks, and fewer than {CHUNK_BYTES} bytes in "
                "each on average."
            )
        self._chunks += 1
        self._chunk_bytes += size
        self._begin("data" if size else "trailers")
        self.body_left = size
