"""Marks of images and files: texts with them are joined, split and filled."""

from hypothesis import given, strategies as st

from app.prompts.images.image_marks import (
    MARK,
    FileSource,
    ImageSource,
    MarkedText,
    PdfFile,
    PdfPage,
    Source,
    attachments_in,
    filled,
    joined,
    moved_first,
    split,
)

IMAGE = ImageSource("data:,")
OTHER = ImageSource("data:,", detail="low")
FILE = FileSource("file-1")

PARTS = st.lists(
    st.text("a\n", min_size=1)
    | st.sampled_from([IMAGE, OTHER, FILE, FileSource("file-1", name="a")])
)


@given(PARTS)
def test_a_text_is_split_into_what_it_was_joined_of(parts: list[str | Source]) -> None:
    text = joined(parts)
    assert joined(split(text)) == text
    assert [p for p in split(text) if not isinstance(p, str)] == [
        p for p in parts if not isinstance(p, str)
    ]
    assert isinstance(text, MarkedText) == any(not isinstance(p, str) for p in parts)
    assert {a.source for a in attachments_in(text, "x").values()} == {
        p for p in parts if not isinstance(p, str)
    }


def test_texts_are_lines_of_their_own_and_images_are_not() -> None:
    assert joined(["a", "b", IMAGE, "c"]) == f"a\nb{IMAGE.mark}c"
    assert joined([]) == ""


def test_all_that_tells_sources_apart_is_in_the_mark() -> None:
    named = FileSource("file-1", name="a")
    sources: list[Source] = [IMAGE, OTHER, ImageSource("data:,", "base64"), FILE, named]
    sources.append(FileSource("file-1", "base64"))
    assert len({source.mark for source in sources}) == len(sources)
    assert all(MARK.fullmatch(source.mark) for source in sources)
    assert IMAGE.mark == ImageSource("data:,").mark


def test_pages_are_told_apart_by_their_file_and_number() -> None:
    one, other = PdfFile(b"1", "the file"), PdfFile(b"2", "the file")
    marks = [PdfPage(one, 1).mark, PdfPage(one, 2).mark, PdfPage(other, 1).mark]
    assert len({*marks}) == 3
    assert PdfPage(PdfFile(b"1", "the file 'a'"), 1).mark == marks[0]


def test_a_mark_that_stands_for_nothing_is_text() -> None:
    assert split(f"a{IMAGE.mark}") == [f"a{IMAGE.mark}"]
    text = joined([f"a{OTHER.mark}", IMAGE])
    assert split(text) == [f"a{OTHER.mark}", IMAGE]
    assert attachments_in("a", "x") == {}
    assert filled(text, {FILE.mark: "b"}) == text


def test_the_texts_of_files_take_the_places_of_their_marks() -> None:
    text = joined(["a", FILE, IMAGE])
    assert filled(text, {FILE.mark: "\\1"}) == f"a\n\\1\n{IMAGE.mark}"


def test_marks_move_before_all_else() -> None:
    assert moved_first(joined(["a", IMAGE, "b", OTHER])) == f"{IMAGE.mark}{OTHER.mark}ab"
