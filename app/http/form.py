"""Forms (multipart/form-data) with one file, which is read as it comes."""

from typing import Final

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from batching import InvalidRequest

_MAX_FIELD: Final = 4096
_MAX_FIELDS: Final = 64
FILE: Final = "file"


class FormReader:
    """Splits the body of a form into its fields and the bytes of its file.

    fields: the parts that are no file, by name.
    filename: the client's name of the file; None before its part.
    is_complete: whether the end of the form has come.
    """

    def __init__(self, content_type: str) -> None:
        """Begin with the header of the request.

        Raises:
            InvalidRequest: it is no form.
        """
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            message = "the request body must be a form, sent as Content-Type: multipart/form-data"
            raise InvalidRequest(FILE, message)
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.is_complete = False
        self._pieces: list[bytes] = []
        self._num_parts = 0
        self._header = bytearray()
        self._value = bytearray()
        self._name: str | None = None
        self._field = bytearray()
        self._disposition = b""
        try:
            self._parser: Final = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin_part,
                    "on_header_field": lambda data, start, end: self._header.extend(
                        data[start:end]
                    ),
                    "on_header_value": lambda data, start, end: self._value.extend(data[start:end]),
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._begin_content,
                    "on_part_data": self._take,
                    "on_part_end": self._end_part,
                    "on_end": self._end,
                },
            )
        except FormParserError:
            raise InvalidRequest(FILE, "the boundary of the form is too long") from None

    def feed(self, data: bytes) -> bytes:
        """Take a piece of the body; return the bytes of the file in it.

        Raises:
            InvalidRequest: it is no form, or has too much beside its file.
        """
        try:
            self._parser.write(data)
        except FormParserError:
            raise InvalidRequest(FILE, "the form is malformed") from None
        file, self._pieces = b"".join(self._pieces), []
        return file

    def _begin_part(self) -> None:
        self._num_parts += 1
        if self._num_parts > _MAX_FIELDS:
            raise InvalidRequest(FILE, f"the form has more than {_MAX_FIELDS} parts")
        self._disposition = b""
        self._name = None
        self._field.clear()

    def _end_header(self) -> None:
        if bytes(self._header).lower() == b"content-disposition":
            self._disposition = bytes(self._value)
        self._header.clear()
        self._value.clear()

    def _begin_content(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode(errors="replace")
        if self._name == FILE:
            if self.filename is not None:
                raise InvalidRequest(FILE, "the form has several files")
            self.filename = options.get(b"filename", b"").decode(errors="replace")

    def _take(self, data: bytes, start: int, end: int) -> None:
        if self._name == FILE:
            self._pieces.append(data[start:end])
            return
        self._field += data[start:end]
        if len(self._field) > _MAX_FIELD:
            # The field's name is the client's, and a log line has that of the parameter.
            raise InvalidRequest(FILE, f"a field beside it has more than {_MAX_FIELD} bytes")

    def _end_part(self) -> None:
        if self._name is not None and self._name != FILE:
            self.fields[self._name] = self._field.decode(errors="replace")

    def _end(self) -> None:
        self.is_complete = True
